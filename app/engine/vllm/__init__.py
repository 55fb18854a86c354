"""vLLM in this process: the only room that imports it."""
