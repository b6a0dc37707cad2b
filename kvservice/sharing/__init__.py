"""Sharing: what other nodes and cold storage hold is brought here when a lookup asks for it; what is new goes there."""
