"""Online miss-ratio curves: what other sizes of memory and SSD would find, from sampled lookups as they happen."""
