"""A model's weights as data: full tensors by Hugging Face name, and their checksums."""
