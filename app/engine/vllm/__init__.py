"""The only rooms that import vLLM."""
