"""Reuse of segments at shifted positions: which rows to compute again, and the loop that computes them."""
