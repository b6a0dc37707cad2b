"""Bytes on media: records, arenas, tiers. Knows keys and bytes, not tensors, not gRPC."""
