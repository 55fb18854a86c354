"""Lockstep: GRPO on PyTorch Lightning with vLLM rollouts, and a measured, corrected engine mismatch."""
