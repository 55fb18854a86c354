"""Reward functions and their weighted sum."""
