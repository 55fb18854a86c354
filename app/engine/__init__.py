"""Engines sample completions: their protocol, and what all of them share."""
