"""Prompts: sources, tokenisation, and rows to batches and back."""
