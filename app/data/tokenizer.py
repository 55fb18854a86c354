"""The tokenizer that turns prompts into ids, once."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.builtin.models import no_such_model, resolve_model
from app.errors import DataError, first_line


def load_tokenizer(model_name_or_path: str, key: str = "model.model_name_or_path") -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; a missing pad token is replaced by the end-of-sequence token.

    Args:
        model_name_or_path: whose tokenizer.
        key: the setting that named the model, for messages.

    Raises:
        DataError: if there is no such model, or no token to pad with.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(model_name_or_path))
    except (OSError, ValueError) as error:
        raise DataError(f"{no_such_model(model_name_or_path, key)} ({first_line(error)})") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(f"the tokenizer of {model_name_or_path!r} has neither a pad nor an end-of-sequence token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
