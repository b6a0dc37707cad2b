"""Connectors: what plugs the client into inference engines. Only these folders may import an engine.

Importing this package, or any of its parts, loads neither numba nor kernels: engines import connectors early, in
every process, and vLLM's CPU worker dies when numba was there before it.
"""
