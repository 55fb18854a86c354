"""The GRPO step: module, correction, meters, optimiser, resume."""
