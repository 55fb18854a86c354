"""Advantages of the completions to one prompt, from their rewards."""

from app.maths.advantages.decoupled import decoupled_advantages
from app.maths.advantages.group import Scale, group_advantages, zero_std_groups

__all__ = ["Scale", "decoupled_advantages", "group_advantages", "zero_std_groups"]
