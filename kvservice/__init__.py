"""kvservice: exact, disaggregated KV-cache storage for multi-agent LLM inference."""

__version__ = "0.1.0"
