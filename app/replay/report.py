"""The findings of a replay as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.replay.replay import Replay, RowFinding

LONGEST_TEXT = 40
"""Most characters shown from the end of a prompt, and from the beginning of a completion."""
MOST_PARAMETERS = 5
"""Number of parameters that are named: those with the largest gradients, or the first that are not finite."""


def report(replay: Replay, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the findings as lines: the step, what differs from it, the rows, layers, gradients, and a verdict.

    Args:
        replay: the findings.
        settings: settings of the replay, to compare with the step's, see `GRPOModule.loss_settings`.
        tokenizer: decodes the rows.
    """
    header = replay.header
    norm = "" if header.gradient_norm is None else f", gradient norm {_number(header.gradient_norm)}"
    differences_then_now = [row.then_now for row in replay.rows if row.then_now is not None]
    shown = next((row for row in replay.rows if not row.finite), replay.rows[0])
    layers = ", ".join(f"{name} {_number(value)}" for name, value in shown.passage.largest.items())
    bad = [f"{name} ({count})" for name, count in replay.bad_weights.items()]
    sampled_by = {version for row in replay.rows for version in row.recorded.row.policy_versions}
    versions = ", ".join(map(str, sorted(sampled_by)))
    lines = [
        f"step         {header.step}, rank {header.rank}: the {header.reason} was not finite{norm}; "
        f"{len(replay.rows)} of the rank's {header.rows_on_rank} rows, sampled by policy version {versions}",
        *(f"setting      {line}" for line in differences(header.settings, settings)),
        f"weights      {'all finite' if not bad else 'values that are not finite: ' + _some(bad)}",
        f"then - now   {_then_now(differences_then_now)}",
        "",
        *table([row_cells(i, row, tokenizer) for i, row in enumerate(replay.rows, start=1)]),
        "",
        f"largest |output| by layer, row {replay.rows.index(shown) + 1}: {layers}",
        f"together     loss {_number(replay.together.loss)}, gradient norm {_number(replay.together.norm)}; "
        f"{_parameters(replay)}",
        f"verdict      {verdict(replay, tokenizer)}",
    ]
    return "\n".join(lines)


def verdict(replay: Replay, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one line: whether the fault happened again, and where to look."""
    if replay.finite:
        return (
            "all finite in float32: the step's weights were others (see `then - now`), or its precision was too narrow "
            "(model.dtype, trainer.precision)"
        )
    bad = [(i, row) for i, row in enumerate(replay.rows, start=1) if not row.finite]
    causes = [f"weights, first {next(iter(replay.bad_weights))}"] if replay.bad_weights else []
    if bad:
        number, row = bad[0]
        rows = f"row{'s' * (len(bad) > 1)} {_some([str(i) for i, _ in bad])}"
        if row.first_bad_token is not None:
            where = f", row {number} first at {_fault(row, tokenizer)}" if row.passage.fault else ""
            causes.append(f"log-probabilities of {rows}{where}")
        elif row.bad_numbers:
            causes.append(f"{', '.join(row.bad_numbers)} of {rows}, which no policy can fix")
        elif not math.isfinite(row.gradient.loss):
            causes.append(f"the loss of {rows}, whose numbers are all finite: their product or sum overflows")
        else:
            causes.append(f"only the gradient of {rows}, nearest to the loss in {row.gradient.broken[-1]}")
    elif not replay.together.finite:
        causes.append("only all rows together: no row alone")
    return "NOT FINITE: " + "; ".join(causes)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting that is not as it was in the step; mappings are compared entry by entry."""
    then, now = (json.loads(json.dumps(settings)) for settings in (then, now))  # tuples become lists, as in the file
    lines = []
    for key in sorted(then.keys() | now.keys()):
        old, new = then.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += [f"{key}.{line}" for line in differences(old, new)]
        elif old != new:
            lines.append(f"{key}={json.dumps(new)}, in the step {json.dumps(old)}")
    return lines


def row_cells(number: int, row: RowFinding, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the cells of a row, by column."""
    own = row.recorded.row
    token = row.first_bad_token
    return {
        "row": str(number),
        "tokens": str(own.sampled_count),
        "advantage": _number(own.advantage),
        "reward": _number(own.reward),
        "loss": _number(row.gradient.loss),
        "|gradient|": _number(row.gradient.norm),
        "first bad log-probability": "" if token is None else f"{token} {tokenizer.decode([own.sampled_ids[token]])!r}",
        "first bad output": _fault(row, tokenizer),
        "bad numbers": ", ".join(row.bad_numbers),
        "prompt": repr(str(tokenizer.decode(list(own.prompt_ids)))[-LONGEST_TEXT:]),
        "completion": repr(str(tokenizer.decode(list(own.completion_ids)))[:LONGEST_TEXT]),
    }


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return lines with aligned columns; columns without a value are left out."""
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    cells = [dict(zip(columns, columns, strict=True)), *rows]
    return ["  ".join(line[name].ljust(widths[name]) for name in columns).rstrip() for line in cells]


def _then_now(values: Sequence[float]) -> str:
    """How far the weights of the step are from those of the replay."""
    if not values:
        return "no log-probability is finite both in the step and in this replay"
    return (
        f"at most {_number(max(values))} nats between the log-probabilities of the step and of this replay: about 0 if "
        f"the weights are the same"
    )


def _fault(row: RowFinding, tokenizer: PreTrainedTokenizerBase) -> str:
    """The module of the row's first bad output, and the token it was at; empty without one."""
    fault = row.passage.fault
    if fault is None or fault.column is None:
        return str(fault or "")
    token = row.recorded.row.token_ids[fault.column]
    return f"{fault} at position {fault.column} {tokenizer.decode([token])!r}"


def _parameters(replay: Replay) -> str:
    if broken := replay.together.broken:
        return f"not finite in {len(broken)} of {len(replay.together.norms)} parameters: {_some(broken)}"
    ranked = sorted(replay.together.norms.items(), key=lambda item: -item[1])[:MOST_PARAMETERS]
    return "largest in " + ", ".join(f"{name} {_number(norm)}" for name, norm in ranked)


def _some(names: Sequence[str]) -> str:
    more = len(names) - MOST_PARAMETERS
    return ", ".join(names[:MOST_PARAMETERS]) + (f" and {more} more" if more > 0 else "")


def _number(value: float) -> str:
    return f"{value:.4g}"
