"""The trained model: loading, scoring, LoRA, saving."""
