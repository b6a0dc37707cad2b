"""The words both sides share: pure data, no I/O. Imports the standard library and blake3, nothing of ours."""
