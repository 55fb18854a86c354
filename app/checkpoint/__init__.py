"""Checkpoints: written whole or not at all, checked before they are used, readable by any strategy."""
