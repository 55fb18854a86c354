"""The ids that end a completion, by what a model's files say; nothing heavy is imported before they are read."""

from __future__ import annotations

from typing import Any


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
