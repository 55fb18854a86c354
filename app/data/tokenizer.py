"""The tokenizer that turns prompts into ids, once."""

from __future__ import annotations

from typing import Any

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


def eos_token_ids(model_path: str) -> list[int]:
    """Return every id that ends a completion, ascending: from generation config, model config and tokenizer.

    Chat models often have two (end of turn, end of text) in different files; an engine that misses one samples past
    the end of its answer.
    """
    return sorted({token for ids in eos_by_source(model_path).values() for token in ids})


def eos_by_source(model_path: str) -> dict[str, list[int]]:
    """Return the ids that end a completion, by source: generation config, config and tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    sources: dict[str, Any] = {"generation config": GenerationConfig, "config": AutoConfig, "tokenizer": AutoTokenizer}
    found: dict[str, list[int]] = {}
    for name, source in sources.items():
        try:
            value = source.from_pretrained(model_path).eos_token_id
        except (OSError, ValueError):
            if source is AutoConfig:
                raise  # not a model
            continue  # The folder has no such file; the others decide.
        found[name] = value if isinstance(value, list) else [] if value is None else [value]
    return found
