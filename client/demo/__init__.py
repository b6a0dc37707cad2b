"""The demo: one all-gather round on a small model, on any machine with two cores."""
