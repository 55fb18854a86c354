"""Rows to prompts: the chat template and the tokenizer are applied once, here, and never again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from app.errors import DataError
from app.types import Messages, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize_prompts(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    label: str,
    *,
    overlong: Literal["error", "drop"] = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Tokenise the rows of `app.data.sources.load_rows`, in order.

    The two forms are TRL's: chat messages go through the tokenizer's chat template with a generation prompt; text
    is tokenised as it stands, with the special tokens the tokenizer adds by itself and no template. Text that
    already begins with the beginning-of-sequence token does not get a second one.

    Args:
        rows: each with a `prompt`, text or messages; the other columns go to the rewards.
        tokenizer: the model's tokenizer.
        max_prompt_tokens: most tokens of a prompt, template and special tokens included.
        label: names the source in messages.
        overlong: a longer prompt is an error, or is dropped; one warning says how many were.
        chat_template_kwargs: more arguments for the chat template, such as {"enable_thinking": False}.

    Raises:
        DataError: naming the row (from 0), for a chat without a chat template, a template that refuses the messages,
            an overlong prompt, a prompt of no tokens, or no prompt left.
    """
    template_kwargs = dict(chat_template_kwargs or {})
    texts = {row: data["prompt"] for row, data in enumerate(rows) if isinstance(data["prompt"], str)}
    ids_of_row = dict(zip(texts, tokenizer(list(texts.values()))["input_ids"], strict=True)) if texts else {}
    prompts: list[Prompt] = []
    lengths_dropped: list[int] = []
    for row, data in enumerate(rows):
        place = f"{label} row {row}"
        prompt = data["prompt"]
        ids = ids_of_row[row] if row in ids_of_row else _chat_ids(prompt, tokenizer, place, template_kwargs)
        if tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        if not ids:
            raise DataError(f"{place}: the prompt has no tokens")
        if len(ids) > max_prompt_tokens:
            if overlong == "error":
                raise DataError(
                    f"{place}: the prompt has {len(ids)} tokens, the limit is {max_prompt_tokens}; "
                    "raise max_prompt_tokens or set overlong to drop"
                )
            lengths_dropped.append(len(ids))
            continue
        columns = {column: value for column, value in data.items() if column != "prompt"}
        prompts.append(Prompt(row=row, prompt=prompt, token_ids=tuple(ids), columns=columns))
    _report_dropped(lengths_dropped, len(rows), max_prompt_tokens, label)
    return prompts


def _chat_ids(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, place: str, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Ids of one chat. The template writes its own special tokens, so the tokenizer adds none."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{place}: the prompt is a chat, but the tokenizer has no chat template; "
            "use text prompts or an instruct model"
        )
    try:
        # return_dict is stated: what the method returns without it changed from ids to a mapping in transformers 5.
        encoded: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, **template_kwargs
        )
    except Exception as error:  # templates raise whatever jinja and their authors raise
        reason = " ".join(str(error).split())
        raise DataError(f"{place}: the chat template refuses the messages: {type(error).__name__}: {reason}") from error
    return list(encoded["input_ids"])


def _report_dropped(lengths: Sequence[int], total: int, limit: int, label: str) -> None:
    """Warn once of dropped prompts. Raises DataError if none is left."""
    if not lengths:
        return
    message = f"{label}: {len(lengths)} of {total} prompts have over {limit} tokens (longest: {max(lengths)})"
    if len(lengths) == total:
        raise DataError(f"{message}; none is left, raise max_prompt_tokens")
    warnings.warn(f"{message} and are dropped", stacklevel=3)
