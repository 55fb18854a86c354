"""Checks before any number is compared: ids, template, vocabulary, end of sequence, padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.audit.attribution.compare import shortened, text, token_text
from app.audit.types import AuditRow, Check
from app.types import Prompt, TrainBatch


def all_checks(
    *,
    rows: Sequence[AuditRow],
    prompts: Sequence[Prompt],
    consumed: Sequence[Sequence[int] | None],
    batch: TrainBatch,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    eos_by_source: Mapping[str, int | Sequence[int] | None],
    trainer_vocabulary: int,
    engine_vocabulary: int | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Check, ...]:
    """Return every check of this module; for the arguments see each of them."""
    sent = [row.prompt_ids for row in rows]
    return (
        prompt_ids(sent, consumed, tokenizer),
        chat_template(prompts, tokenizer, chat_template_kwargs),
        special_tokens(sent, tokenizer),
        token_range(rows, tokenizer, trainer_vocabulary),
        vocabularies(trainer_vocabulary, engine_vocabulary, tokenizer),
        eos_sources(eos_by_source, tokenizer),
        stopping(rows, eos_ids, tokenizer),
        scored_tokens(rows, batch),
    )


def prompt_ids(
    sent: Sequence[Sequence[int]], consumed: Sequence[Sequence[int] | None], tokenizer: PreTrainedTokenizerBase
) -> Check:
    """Compare the prompts that were sent with those that the engine consumed, row by row.

    Args:
        sent: prompt ids of each row.
        consumed: prompt ids that the engine reports for each row; None: not reported.
        tokenizer: decodes the first difference.
    """
    name = "prompt ids"
    pairs = [(row, list(a), list(b)) for row, (a, b) in enumerate(zip(sent, consumed, strict=True)) if b is not None]
    if not pairs:
        return Check(name=name, passed=None, detail="the engine does not report the prompts that it consumed")
    wrong = [(row, a, b) for row, a, b in pairs if a != b]
    if not wrong:
        return Check(name=name, passed=True, detail=f"the engine consumed what it was sent, in all {len(pairs)} rows")
    row, a, b = wrong[0]
    detail = (
        f"{len(wrong)} of {len(pairs)} rows differ; row {row}: sent {len(a)} tokens, consumed {len(b)}, "
        f"{_first_difference(a, b, tokenizer, 'sent', 'consumed')}"
    )
    return Check(name=name, passed=False, detail=detail)


def chat_template(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> Check:
    """Compare the ids of the prompts with those that the tokenizer produces now, and find the usual template faults.

    Args:
        prompts: with their text or messages, and the ids that were sent.
        tokenizer: the model's tokenizer.
        template_kwargs: further arguments for the chat template.
    """
    name = "chat template"
    for prompt in prompts:
        if fault := _template_fault(prompt, tokenizer, dict(template_kwargs or {})):
            return Check(name=name, passed=False, detail=f"prompt {prompt.row}: {fault}")
    texts = sum(isinstance(prompt.prompt, str) for prompt in prompts)
    if texts and tokenizer.chat_template:
        detail = (
            f"{texts} of {len(prompts)} prompts are text although the tokenizer has a chat template: they are sent as "
            "they stand, which suits a base model; a chat model expects messages"
        )
        return Check(name=name, passed=None, detail=detail)
    form = "text, tokenised as it stands" if texts == len(prompts) else "chats, rendered with a generation prompt"
    return Check(name=name, passed=True, detail=f"{len(prompts)} prompts: {form}; the ids are the tokenizer's")


def _template_fault(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> str | None:
    """The fault in the ids of one prompt; None: no fault."""
    sent, bos = list(prompt.token_ids), tokenizer.bos_token_id
    if bos is not None and sent[:2] == [bos, bos]:
        return f"begins with two beginning-of-sequence tokens '{token_text(bos, tokenizer)}'; a template adds its own"
    if isinstance(prompt.prompt, str):
        expected = list(tokenizer(prompt.prompt)["input_ids"])
    elif not tokenizer.chat_template:
        return "is a chat, but the tokenizer has no chat template"
    else:
        expected = _rendered(prompt, tokenizer, True, template_kwargs)
        if sent != expected and sent == _rendered(prompt, tokenizer, False, template_kwargs):
            missing = text(expected[len(sent) :], tokenizer)
            return f"lacks the generation prompt '{missing}' that the template ends in (add_generation_prompt)"
    if bos is not None and expected[:2] == [bos, bos]:
        expected = expected[1:]
    if sent == expected:
        return None
    if expected[:1] == [bos] and sent == expected[1:]:
        return f"lacks the beginning-of-sequence token '{token_text(expected[0], tokenizer)}'"
    return f"the ids are not the tokenizer's: {_first_difference(sent, expected, tokenizer, 'sent', 'tokenizer')}"


def _rendered(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, generation_prompt: bool, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Ids of a rendered chat; the template writes the special tokens, so the tokenizer adds none."""
    messages: Any = prompt.prompt
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt, **template_kwargs
    )
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def special_tokens(sent: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Check:
    """Count the special ids in the prompts; a pad token inside a prompt is a fault.

    A pad token that is also the beginning- or end-of-sequence token counts as the latter.
    """
    name = "special tokens"
    bos, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
    for row, ids in enumerate(sent):
        if pad is not None and pad not in (bos, tokenizer.eos_token_id) and pad in ids:
            where = list(ids).index(pad)
            return Check(
                name=name,
                passed=False,
                detail=f"row {row}: the pad token '{token_text(pad, tokenizer)}' stands inside the prompt, at position "
                f"{where} of {len(ids)}; prompts are sent without padding",
            )
    special = set(tokenizer.all_special_ids)
    rows_with = Counter(token for ids in sent for token in special.intersection(ids))
    shown = ", ".join(f"{token} '{token_text(token, tokenizer)}' in {rows_with[token]}" for token in sorted(rows_with))
    return Check(name=name, passed=True, detail=f"of {len(sent)} prompts: {shown}" if shown else "none in the prompts")


def token_range(rows: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase, trainer_vocabulary: int) -> Check:
    """Find ids without an embedding in the trainer, and ids in prompts that the tokenizer does not know.

    Completions may hold ids without text: models pad their embeddings beyond the tokenizer's vocabulary, and a barely
    trained model samples them.

    Args:
        rows: the sampled rows.
        tokenizer: the model's tokenizer.
        trainer_vocabulary: number of rows in the trainer's embedding.
    """
    name = "token ids"
    known = set(tokenizer.get_vocab().values())
    nameless = 0
    for number, row in enumerate(rows):
        for part, ids in (("prompt", row.prompt_ids), ("completion", row.completion_ids)):
            outside = next((token for token in ids if not 0 <= token < trainer_vocabulary), None)
            if outside is not None:
                detail = (
                    f"row {number}: id {outside} in the {part} is outside the trainer's {trainer_vocabulary} embeddings"
                )
                return Check(name=name, passed=False, detail=detail)
            unknown = [token for token in ids if token not in known]
            if unknown and part == "prompt":
                detail = (
                    f"row {number}: id {unknown[0]} in the prompt is not in the tokenizer's vocabulary: the prompts "
                    "come from another tokenizer"
                )
                return Check(name=name, passed=False, detail=detail)
            nameless += len(unknown)
    detail = f"all within the trainer's {trainer_vocabulary} embeddings"
    if nameless:
        detail += f"; {nameless} sampled tokens have no text in the tokenizer"
    return Check(name=name, passed=True, detail=detail)


def vocabularies(trainer: int, engine: int | None, tokenizer: PreTrainedTokenizerBase) -> Check:
    """Compare the sizes of the vocabularies over which both sides normalise.

    Args:
        trainer: number of logits of the trainer's model.
        engine: number of logits of the engine's model; None: unknown.
        tokenizer: the model's tokenizer; its size is reported too.
    """
    name = "vocabulary"
    own = f"the trainer has {trainer} logits, the tokenizer {len(tokenizer)} tokens"
    if engine is None:
        return Check(name=name, passed=None, detail=f"the engine does not tell its vocabulary; {own}")
    if engine != trainer:
        detail = f"the engine normalises over {engine} logits; {own}: one side has a resized embedding"
        return Check(name=name, passed=False, detail=detail)
    return Check(name=name, passed=True, detail=f"the engine has {engine} logits, {own}")


def eos_sources(by_source: Mapping[str, int | Sequence[int] | None], tokenizer: PreTrainedTokenizerBase) -> Check:
    """Compare the end-of-sequence ids that generation config, model config and tokenizer name.

    Args:
        by_source: ids by the file that names them; a file without ids is not compared.
        tokenizer: decodes the ids.
    """
    name = "end-of-sequence ids"
    ids_of = {source: [ids] if isinstance(ids, int) else list(ids or ()) for source, ids in by_source.items()}
    named = {source: sorted(set(ids)) for source, ids in ids_of.items() if ids}
    everything = sorted({token for ids in named.values() for token in ids})
    if not everything:
        return Check(name=name, passed=False, detail=f"none in {', '.join(by_source)}: no completion stops by itself")
    if all(ids == everything for ids in named.values()):
        return Check(name=name, passed=True, detail=f"{_named(everything, tokenizer)}, in {' and '.join(named)}")
    each = "; ".join(f"{source}: {_named(ids, tokenizer)}" for source, ids in named.items())
    detail = f"the model's files differ ({each}); Lockstep stops at each of them, other programs may not"
    return Check(name=name, passed=None, detail=detail)


def stopping(rows: Sequence[AuditRow], eos_ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> Check:
    """Check that every completion ends where it should: the sampled end of sequence is its last token, and only that.

    Args:
        rows: the sampled rows.
        eos_ids: every id that ends a completion, see `app.data.tokenizer.eos_token_ids`.
        tokenizer: decodes the tokens.
    """
    name = "stopping"
    ends = set(eos_ids)
    faults: dict[str, list[str]] = {}
    for number, row in enumerate(rows):
        last = row.completion_ids[-1]
        inside = next((place for place, token in enumerate(row.completion_ids[:-1]) if token in ends), None)
        if inside is not None:
            token = token_text(row.completion_ids[inside], tokenizer)
            what = f"row {number} goes on after '{token}' at token {inside}: the engine does not stop at it"
            faults.setdefault("an end of sequence inside", []).append(what)
        if row.finish_reason == "stop" and last not in ends:
            what = f"row {number} ends in '{token_text(last, tokenizer)}': the sampled end of sequence was dropped"
            faults.setdefault("stopped without an end of sequence", []).append(what)
        if row.finish_reason == "length" and last in ends:
            what = f"row {number} ends in '{token_text(last, tokenizer)}', at which the engine did not mean to stop"
            faults.setdefault("cut by length at an end of sequence", []).append(what)
    if faults:
        each = "; ".join(f"{fault} in {len(found)} of {len(rows)} rows ({found[0]})" for fault, found in faults.items())
        return Check(name=name, passed=False, detail=each)
    stopped = sum(row.finish_reason == "stop" for row in rows)
    detail = f"{stopped} rows end in an end of sequence, {len(rows) - stopped} are cut by length"
    return Check(name=name, passed=True, detail=detail)


def scored_tokens(rows: Sequence[AuditRow], batch: TrainBatch) -> Check:
    """Check that the trainer's batch holds every row from position 0 without a gap, and scores each sampled token once.

    Lockstep's batches are right-padded: position ids are the columns, and causal attention needs no mask if the mask of
    valid tokens has no hole and nothing stands before a row.

    Args:
        rows: the sampled rows.
        batch: the same rows in order, from `app.data.collate.collate`.
    """
    name = "attention mask and positions"

    def wrong(detail: str) -> Check:
        return Check(name=name, passed=False, detail=detail)

    if len(batch.mask) != len(rows):
        return wrong(f"{len(rows)} rows were sampled, {len(batch.mask)} are scored")
    for number, (row, mask) in enumerate(zip(rows, batch.mask.tolist(), strict=True)):
        prompt, sampled = len(row.prompt_ids), len(row.completion_ids)
        counted = batch.sampled_tokens[number]
        counts = (batch.lengths[number] - counted, counted)
        if counts != (prompt, sampled):
            return wrong(
                f"row {number}: prompt and completion have {prompt} + {sampled} tokens, the batch counts "
                f"{counts[0]} + {counts[1]}"
            )
        if sum(mask) != sampled:
            return wrong(f"row {number}: {sampled} tokens were sampled, {sum(mask)} are scored")
        if not all(mask[:sampled]):
            return wrong(f"row {number}: the mask has a hole at token {mask.index(False)}")
        if batch.positions[number, :sampled].tolist() != list(range(prompt, prompt + sampled)):
            return wrong(f"row {number}: the batch scores other columns than those of the sampled tokens")
        if tuple(batch.input_ids[number, : prompt + sampled].tolist()) != row.prompt_ids + row.completion_ids:
            return wrong(f"row {number}: the ids in the batch are not the row's from position 0 on")
    tokens = int(batch.mask.sum())
    return Check(name=name, passed=True, detail=f"{tokens} tokens sampled and scored; positions from 0 without a gap")


def _first_difference(
    a: Sequence[int], b: Sequence[int], tokenizer: PreTrainedTokenizerBase, name_a: str, name_b: str
) -> str:
    """The first place where two lists of ids differ, with the tokens' text."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def there(ids: Sequence[int]) -> str:
        return f"{ids[place]} '{token_text(ids[place], tokenizer)}'" if place < len(ids) else "its end"

    before = shortened(text(a[max(0, place - 20) : place], tokenizer), at_end=False)
    return f"first at token {place} after '{before}': {name_a} {there(a)}, {name_b} {there(b)}"


def _named(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{token} '{token_text(token, tokenizer)}'" for token in ids)
