"""The findings of an audit as text for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from app.audit.report.wording import (
    blame,
    causes,
    cured,
    explained,
    gate_line,
    number,
    percent,
    remedy,
    reported_metrics,
    round_title,
    shorten,
    times_the_floor,
    visible,
)
from app.audit.types import Audit, Bin, FactorResult, Round, WorstToken

LABEL = 13
"""Width of the first column in characters, as in the report of a replay."""
BAR = 10
"""Width of a bar in characters."""
WORST = 5
"""Number of worst tokens shown."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def terminal(audit: Audit, width: int = 100) -> str:
    """Return the findings as lines of text, without colour.

    Args:
        audit: the findings.
        width: columns to fill, at least 80. Only YAML may be wider, so that it can be copied.
    """
    width = max(width, 80)
    sections = (
        _overview(audit, width),
        _remedy(audit),
        *(_round(i, round_, audit, width) for i, round_ in enumerate(audit.rounds, start=1)),
        _noise(audit, width),
        _metrics(audit),
        _bins("position in the completion", audit.comparison.by_position),
        _bins("probability of the token", audit.comparison.by_probability),
        _worst(audit.comparison.worst[:WORST], width),
        _ending(audit, width),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)


def _overview(audit: Audit, width: int) -> Iterator[str]:
    distance, floor = audit.comparison.distance, audit.floor
    yield f"{'verdict':{LABEL}}{audit.verdict.upper()}, {audit.mode} audit of {distance.tokens} tokens"
    yield from _labelled("", audit.summary, width)
    times = times_the_floor(audit)
    beyond = "" if times is None else f"; {number(times)} times the noise floor (root mean squares)"
    size = f"mean |l| {number(distance.mean_abs)} nats, largest {number(distance.max_abs)}, k3 {number(distance.k3)}"
    yield from _labelled("mismatch", size + beyond, width)
    yield from _labelled("noise floor", f"mean |l| {number(floor.mean_abs)} nats, k3 {number(floor.k3)}", width)
    for i, (factor, part) in enumerate(blame(audit)):
        yield from _labelled("and then" if i else "cause", f"{_changed(factor)}; explains {part}", width)
    if (left := cured(audit)) is not None:
        yield from _labelled("left then", f"mean |l| {number(left.mean_abs)} nats, k3 {number(left.k3)}", width)
    for passed, label in ((False, "FAILED"), (None, "not checked")):
        for check in (check for check in audit.checks if check.passed is passed):
            yield from _labelled(label, f"{check.name}: {check.detail}", width)
    if good := [check.name for check in audit.checks if check.passed]:
        yield from _labelled("passed", ", ".join(good), width)
    for gate in audit.gates:
        yield from _labelled("gate" if gate.passed else "GATE FAILED", f"{gate.key} {gate_line(gate)}", width)


def _changed(factor: FactorResult) -> str:
    return f"{factor.title} ({factor.side}): {factor.change}"


def _round(index: int, round_: Round, audit: Audit, width: int) -> Iterator[str]:
    if not round_.factors:
        return
    start = round_.start
    yield f"{round_title(index, round_, audit)}: mean |l| {number(start.mean_abs)} nats, k3 {number(start.k3)}"
    head = f"  {'explains':{BAR + 7}}  {'left |l|':>8}  {'left k3':>8}  "
    yield head + "factor: change"
    for factor in round_.factors:
        left = f"{number(factor.left.mean_abs):>8}  {number(factor.left.k3):>8}"
        numbers = f"  {bar(factor.share)} {explained(factor.share):>6}  {left}  "
        yield from _hanging(numbers, _changed(factor), width)
        if factor.evidence:
            yield from _hanging(" " * len(head), factor.evidence, width)


def bar(share: float) -> str:
    """Return a bar of BAR columns, full at 1; empty below 0 or where there is no share."""
    eighths = round(8 * BAR * min(max(share, 0.0), 1.0)) if math.isfinite(share) else 0
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(BAR)


def _remedy(audit: Audit) -> Iterator[str]:
    if fragment := remedy(causes(audit)):
        yield "Remedy: save it as remedy.yaml and add --config remedy.yaml"
        yield from (f"  {line}" for line in visible(fragment, keep="\n").splitlines())
    elif audit.verdict == "mismatch" and audit.rounds:
        yield "Remedy: none of the factors explains half of it" + (
            "; the thorough mode tries more" if audit.mode == "quick" else ""
        )


def _noise(audit: Audit, width: int) -> Iterator[str]:
    if not audit.noise:
        return
    yield "Each side against itself"
    yield f"  {'mean |l|':>8}  {'largest':>8}  {'k3':>8}  {'in the floor':12}  side: changed"
    for source in audit.noise:
        far = source.distance
        numbers = "".join(f"  {number(value):>8}" for value in (far.mean_abs, far.max_abs, far.k3))
        counts = "yes" if source.in_floor else "no"
        yield from _hanging(f"{numbers}  {counts:12}  ", f"{source.side}: {source.name}", width)


def _metrics(audit: Audit) -> Iterator[str]:
    metrics = [
        metric
        for metric in reported_metrics(audit.comparison.metrics)
        if metric.info is not None and metric.info.when == "every step"
    ]
    comparison = audit.comparison
    if metrics:
        yield "Core metrics"
    for metric in metrics:
        info = metric.info
        healthy = "" if info is None or info.healthy is None else f"healthy: {info.healthy}"
        mark = {"outside": "OUTSIDE", "alarm": "ALARM"}.get(metric.state, "")
        yield f"  {metric.key:38}{number(metric.value):>9}  {healthy:20}  {mark}".rstrip()
    for name, value in (
        ("same likeliest token", percent(comparison.top1_agreement)),
        ("shared among the likeliest tokens", percent(comparison.topk_overlap)),
        ("mean |l| of those shared", number(comparison.topk_drift)),
    ):
        yield f"  {name:38}{value:>9}"


def _bins(title: str, bins: Sequence[Bin]) -> Iterator[str]:
    if not bins:
        return
    yield f"By {title}"
    largest = max((each.mean_abs for each in bins if math.isfinite(each.mean_abs)), default=0.0)
    label = max(len(each.label) for each in bins)
    yield f"  {'':{label}}  {'tokens':>7}  {'mean |l|':>8}  {'k3':>8}"
    for each in bins:
        numbers = f"{each.tokens:>7}  {number(each.mean_abs):>8}  {number(each.k3):>8}"
        yield f"  {each.label:{label}}  {numbers}  {bar(each.mean_abs / largest if largest else 0.0)}".rstrip()


def _worst(worst: Sequence[WorstToken], width: int) -> Iterator[str]:
    if worst:
        yield "Worst tokens, in ⟦ ⟧"
    for token in worst:
        beside = f"engine {number(token.engine)}, trainer {number(token.trainer)}"
        place = f"row {token.row}, token {token.position} (id {token.token_id})"
        yield from _hanging("  ", f"{place}: {beside}, l {number(token.trainer - token.engine)} nats", width)
        text = f"{visible(token.before)[-30:]}⟦{shorten(visible(token.token), 40)}⟧"
        yield from _hanging("    ", f"{text}{visible(token.after)[:20]}", width)


def _ending(audit: Audit, width: int) -> Iterator[str]:
    for key, value in audit.settings.items():
        yield from _labelled(key, value, width)
    stages = [f"{name} {seconds:.1f}" for name, seconds in audit.seconds.items()]
    yield from _labelled("seconds", f"{sum(audit.seconds.values()):.1f}: {', '.join(stages)}", width)
    for note in audit.notes:
        yield from _labelled("note", note, width)


def _labelled(label: str, text: str, width: int) -> list[str]:
    """The text beside a label, wrapped under itself."""
    return _hanging(f"{label:{LABEL - 1}} ", text, width)


def _hanging(first: str, text: str, width: int) -> list[str]:
    """The text after `first`, its further lines under its own beginning."""
    return textwrap.wrap(
        visible(text),
        width,
        initial_indent=first,
        subsequent_indent=" " * (LABEL if len(first) < LABEL else len(first)),
        break_on_hyphens=False,
    ) or [first.rstrip()]
