from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.audit.attribution.compare import compare, histogram, shortened, text, token_text
from app.audit.types import AuditRow, TokenScores
from app.data.tokenizer import load_tokenizer
from tests.data.character_tokenizer import EOS, VOCABULARY, character_tokenizer, ids

NAN = math.nan


def row(prompt: str, completion: str, end: str | None = EOS) -> AuditRow:
    sampled = ids(completion, bos=False) + ((VOCABULARY[end],) if end else ())
    return AuditRow(prompt_ids=ids(prompt), completion_ids=sampled, finish_reason="stop" if end else "length")


def scores(
    logprobs: list[float], top: list[list[int]] | None = None, of: list[list[float]] | None = None
) -> TokenScores:
    return TokenScores(
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        top_ids=None if top is None else torch.tensor(top),
        top_logprobs=None if of is None else torch.tensor(of, dtype=torch.float64),
    )


def both(engine: list[float], trainer: list[float], **options: int):
    """Compared, all tokens in one row of digits."""
    rows = [row("1+", "7" * len(engine), end=None)]
    return compare(rows, scores(engine), scores(trainer), character_tokenizer(), **options)


def test_metrics_are_those_of_training_by_its_keys() -> None:
    rows = [row("1+1=", "2"), row("1+1=", "345")]  # 2 and 4 tokens, the end of sequence included
    engine = [-0.5, -1.0, -0.1, -2.0, NAN, -3.0]
    trainer = [-0.4, -1.5, -0.1, -1.0, -1.0, -3.5]
    found = compare(rows, scores(engine), scores(trainer), character_tokenizer())
    log_ratios = [0.1, -0.5, 0.0, 1.0, -0.5]
    prefix = "rollout_correction/"
    assert found.metrics[prefix + "missing_logprob_fraction"] == pytest.approx(1 / 6)
    assert found.metrics[prefix + "kl"] == pytest.approx(-sum(log_ratios) / 5)
    k3 = sum(math.exp(x) - 1 - x for x in log_ratios) / 5
    assert found.metrics[prefix + "k3_kl"] == pytest.approx(k3)
    assert found.metrics[prefix + "log_ppl_diff_max"] == pytest.approx((0.5 - 0.1) / 2)  # a mean of the first row
    assert "rollout_correction/clipped_frac" not in found.metrics  # no correction is configured
    assert found.distance.tokens == 5
    assert found.distance.k3 == pytest.approx(k3)
    assert found.distance.mean_abs == pytest.approx(sum(map(abs, log_ratios)) / 5)


def test_missing_and_infinite_tokens_are_left_out_everywhere() -> None:
    found = both([NAN, -2.0, -math.inf, -1.0], [-1.0, NAN, -1.0, -1.0])
    assert found.distance.tokens == 1
    assert [(part.label, part.tokens) for part in found.by_position] == [("2-3", 1)]
    assert sum(part.tokens for part in found.by_probability) == 1
    assert [token.position for token in found.worst] == [3]
    assert found.scatter == ((-1.0, -1.0),)
    assert sum(tokens for _, _, tokens in found.histogram) == 1
    assert found.metrics["rollout_correction/missing_logprob_fraction"] == 0.25
    assert found.metrics["rollout_correction/nonfinite_logprob_fraction"] == 0.5


def test_without_any_token_there_is_nothing_to_show() -> None:
    found = both([NAN, NAN], [-1.0, -1.0])
    assert (found.by_position, found.by_probability, found.worst, found.scatter, found.histogram) == ((),) * 5
    assert found.distance.tokens == 0


def test_top_tokens() -> None:
    engine = scores([-1.0] * 3, [[5, 6], [5, 6], [7, 8]], [[-0.1, -3.0], [-0.2, -2.0], [-0.5, -math.inf]])
    trainer = scores([-1.0] * 3, [[5, 9], [6, 5], [8, 4]], [[-0.3, -4.0], [-0.9, -1.0], [-0.5, -1.5]])
    found = compare([row("1+", "234", end=None)], engine, trainer, character_tokenizer())
    assert found.top1_agreement == pytest.approx(1 / 3)
    assert found.topk_overlap == pytest.approx((1 / 2 + 2 / 2 + 1 / 2) / 3)
    # 5: |-0.3 + 0.1|; 6: |-0.9 + 2.0| and 5: |-1.0 + 0.2|; 8 has no probability in the engine
    assert found.topk_drift == pytest.approx((0.2 + 1.1 + 0.8) / 3)


def test_top_tokens_of_different_depth_are_compared_to_the_smaller_and_only_where_the_token_counts() -> None:
    engine = scores([-1.0, NAN], [[5], [9]], [[-0.1], [-9.0]])
    trainer = scores([-1.0, -1.0], [[5, 6], [5, 6]], [[-0.1, -2.0], [-0.1, -2.0]])
    found = compare([row("1+", "23", end=None)], engine, trainer, character_tokenizer())
    assert (found.top1_agreement, found.topk_overlap, found.topk_drift) == (1.0, 1.0, 0.0)


def test_top_tokens_are_absent_where_a_side_gives_none() -> None:
    found = compare([row("1", "2", end=None)], scores([-1.0]), scores([-1.0], [[5]], [[0.0]]), character_tokenizer())
    assert (found.top1_agreement, found.topk_overlap, found.topk_drift) == (None, None, None)
    nothing_shared = compare(
        [row("1", "2", end=None)], scores([-1.0], [[4]], [[0.0]]), scores([-1.0], [[5]], [[0.0]]), character_tokenizer()
    )
    assert (nothing_shared.topk_overlap, nothing_shared.topk_drift) == (0.0, None)


def test_by_position_in_the_buckets_of_training_and_equal_to_its_metrics() -> None:
    rows = [row("1", "0123456", end=None), row("1", "01", end=None)]
    gaps = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.1, 1.2]
    found = compare(rows, scores([-2.0] * 9), scores([gap - 2 for gap in gaps]), character_tokenizer())
    expected = {"0": [0.1, 1.1], "1": [0.2, 1.2], "2-3": [0.3, 0.4], "4-7": [0.5, 0.6, 0.7]}
    assert {part.label: part.tokens for part in found.by_position} == {name: len(x) for name, x in expected.items()}
    for part in found.by_position:
        inside = expected[part.label]
        assert part.mean_abs == pytest.approx(sum(inside) / len(inside))
        assert part.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in inside) / len(inside))
        key = f"rollout_correction/abs_diff_at_position/{int(part.label.split('-')[0]):06d}"
        assert found.metrics[key] == pytest.approx(part.mean_abs)


def test_by_probability_of_the_geometric_mean() -> None:
    pairs = [(0.9, 0.8), (0.5, 0.5), (0.9, 0.1), (0.09, 0.09), (1e-2, 1e-2), (5e-3, 5e-3), (2e-4, 2e-4), (1e-5, 1e-5)]
    engine, trainer = ([math.log(pair[side]) for pair in pairs] for side in (0, 1))
    found = both(engine, trainer)
    assert [(part.label, part.tokens) for part in found.by_probability] == [
        ("≥0.5", 2),
        ("0.1-0.5", 1),  # sqrt(0.9 * 0.1) = 0.3
        ("0.01-0.1", 2),
        ("0.001-0.01", 1),
        ("0.0001-0.001", 1),
        ("<0.0001", 1),
    ]
    assert found.by_probability[1].mean_abs == pytest.approx(math.log(9))


def test_k3_of_a_bin_is_bounded_like_the_metric() -> None:
    found = both([-50.0], [-1.0])
    assert found.by_position[0].k3 == 10.0
    assert found.by_position[0].mean_abs == 49.0


def test_worst_tokens_come_first_with_their_context() -> None:
    rows = [row("1+1=", "2"), row("a\nb", "c\td")]
    engine = [-0.1, -0.1, -0.5, -0.5, -2.0, -0.1]
    trainer = [-0.1, -0.4, -0.5, -0.5, -1.0, -0.1]
    first, second = compare(rows, scores(engine), scores(trainer), character_tokenizer(), worst=2).worst
    assert (first.row, first.position, first.token_id, first.token) == (1, 2, VOCABULARY["d"], "d")
    assert (first.before, first.after) == (r"<s> a \n b c \t", "</s>")
    assert (first.engine, first.trainer) == (-2.0, -1.0)
    assert (second.row, second.position, second.token) == (0, 1, "</s>")
    assert (second.before, second.after) == ("<s> 1 + 1 = 2", "")


def test_context_is_shortened_on_the_outer_side() -> None:
    assert shortened("x" * 60, at_end=True) == "x" * 60
    assert shortened("a" + "x" * 60, at_end=False) == "…" + "x" * 59
    assert shortened("x" * 60 + "a", at_end=True) == "x" * 59 + "…"
    found = both([-1.0] * 100, [-1.0] * 50 + [-2.0] + [-1.0] * 49, worst=1).worst[0]
    assert (len(found.before), found.before[0], len(found.after), found.after[-1]) == (60, "…", 60, "…")


def test_text_shows_special_tokens_and_names_ids_without_text() -> None:
    tokenizer = load_tokenizer("lockstep/addition-1m")
    assert text([1, 5, 14, 2], tokenizer) == "<bos>1+<eos>"
    assert token_text(2, tokenizer) == "<eos>"
    assert token_text(999, tokenizer) == "<id 999>"


def test_scatter_holds_the_worst_and_repeats_itself_by_seed() -> None:
    draw = random.Random(0)
    engine = [-draw.random() for _ in range(500)]
    trainer = [value + draw.gauss(0, 0.1) for value in engine]
    found = both(engine, trainer, worst=10, scatter=50, seed=1)
    assert len(set(found.scatter)) == 50
    assert {(token.engine, token.trainer) for token in found.worst} <= set(found.scatter)
    assert set(found.scatter) <= set(zip(engine, trainer, strict=True))
    assert found.scatter == both(engine, trainer, worst=10, scatter=50, seed=1).scatter
    assert found.scatter != both(engine, trainer, worst=10, scatter=50, seed=2).scatter
    assert both(engine, trainer, scatter=1000).scatter == tuple(zip(engine, trainer, strict=True))


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=300))
def test_histogram_counts_each_token_once_in_bins_that_join(values: list[float]) -> None:
    found = histogram(torch.tensor(values, dtype=torch.float64))
    lows, highs, counts = zip(*found, strict=True)
    assert sum(counts) == len(values)
    assert lows[1:] == highs[:-1]
    assert lows[0] == pytest.approx(-highs[-1])
    assert max(map(abs, values)) <= highs[-1] or set(values) == {0.0}
    for low, high, count in found:  # up to the edges themselves
        inside = sum(low < value < high for value in values)
        assert inside <= count <= sum(low <= value <= high for value in values)


def test_histogram_is_linear_within_the_percentile_and_open_beyond() -> None:
    values = torch.cat([torch.linspace(-1, 1, 999, dtype=torch.float64), torch.tensor([-8.0])])
    found = histogram(values)
    assert found[0][0] == -8.0
    assert found[0][2] >= 1
    widths = [high - low for low, high, _ in found[1:-1]]
    assert len(widths) == 61
    assert widths == pytest.approx([widths[0]] * 61)
    assert found[-2][1] < 1.0001  # the outlier does not widen them
    low, high, _ = found[31]
    assert low == pytest.approx(-high)  # the middle one is centred on 0


def test_histogram_of_equal_sides_and_of_nothing() -> None:
    assert histogram(torch.zeros(0, dtype=torch.float64)) == ()
    found = histogram(torch.zeros(7, dtype=torch.float64))
    assert [count for _, _, count in found] == [0] * 30 + [7] + [0] * 30
    mostly = histogram(torch.tensor([0.0] * 999 + [2.0], dtype=torch.float64))  # the percentile itself is 0
    assert (mostly[0][0], mostly[-1][1], mostly[-1][2]) == (-2.0, 2.0, 1)


def test_a_side_with_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.logprobs has shape \(2,\), expected \(3,\)"):
        compare([row("1", "234", end=None)], scores([-1.0] * 3), scores([-1.0] * 2), character_tokenizer())
