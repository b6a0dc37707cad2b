"""What does reuse cost in quality, and what does it save in bytes? Worlds, sources, selectors; see README.md here."""
