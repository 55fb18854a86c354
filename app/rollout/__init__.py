"""Prompts to batches: sampling, preparation, loading."""
