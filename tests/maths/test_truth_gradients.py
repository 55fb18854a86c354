"""Truth, not only parity: the corrections against policies whose every completion is known.

Notation: q is the rollout policy, p is train, y a completion of T tokens, rho_t = p / q of a token given its prefix,
A(y) a fixed advantage. The on-policy gradient of J = sum_y p(y) A(y) is

    g* = sum_y p(y) A(y) sum_t grad log p(y_t | y_<t).

A trainer ascends E_q[sum_t w_t A grad log p(y_t | y_<t)], with weights w from `correct`. Four facts follow.

1. w = rho_1 ... rho_T (level `sequence`, no bound): q(y) w = p(y). The gradient is exactly g*.
2. w = rho_t (level `token`, no bound): at prefix s, the weight turns the choice of the token from q into p, while the
   prefix was reached by q and the completion is continued, and so rewarded, by q:

       E[g] = sum_s d_q(s) sum_a p(a | s) grad log p(a | s) Q_q(s, a).

   That is the gradient of the local approximation of J around q (Kakade and Langford 2002; TRPO, arXiv 1502.05477).
   It equals g* for completions of one token; for longer ones it differs in the first order of the mismatch, as
   the uncorrected gradient does.
3. w = (rho_1 ... rho_T)^(1/T) (level `geometric`): q(y) w = q(y)^(1 - 1/T) p(y)^(1/T), halfway between the policies
   for two tokens and close to q for many. The gradient equals g* for one token only.
4. A bound, a mask or a rejection removes mass from these sums and nothing else: the bias is the sum of what is gone.

Expectations are sums over all completions and hold to rounding. Samples are judged by exact standard errors.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from app.maths.correction import PRESETS, CorrectionConfig, correct, preset
from app.maths.offpolicy import sequence_keep
from tests.benchmarks.bias_table import (
    CORRECTIONS,
    GEOMETRIC,
    MISMATCHES,
    NO_CORRECTION,
    OFF_POLICY_DELTA,
    SEQUENCE,
    TOKEN,
    UNBOUNDED,
    Weights,
    bias_table,
    corrected,
    markdown,
    off_policy_masked,
)
from tests.maths.closed_form import (
    Pair,
    chi2_train_rollout,
    close,
    distributions,
    expected_gradient,
    gradient_quality,
    gradient_variance,
    local_approximation_gradient,
    make_pair,
    per_token,
    row_weights,
    sample,
)

# --- gradients: where theory says exact ------------------------------------------------------------------------------


@pytest.mark.parametrize("control", ["truncate", "mask"])
@pytest.mark.parametrize("mismatch", [0.05, 0.5, 1.0])
def test_sequence_weights_give_the_on_policy_gradient(mismatch: float, control: Any) -> None:
    weights = corrected(CorrectionConfig(level="sequence", control=control, upper=UNBOUNDED))
    for seed in range(5):
        pair = make_pair(seed, mismatch)
        assert close(expected_gradient(pair, weights(pair)), pair.true_gradient)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_every_level_is_exact_for_one_token(level: Any) -> None:
    """One token has one ratio, and no prefix or continuation that could be the rollout's."""
    pair = make_pair(seed=0, mismatch=1.0, max_length=1)
    weights = corrected(CorrectionConfig(level=level, upper=UNBOUNDED))(pair)
    assert close(expected_gradient(pair, weights), pair.true_gradient)
    assert gradient_quality(pair, NO_CORRECTION(pair)).relative_bias > 0.1


@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_token_weights_give_the_gradient_of_the_local_approximation(max_length: int) -> None:
    """Fact 2: prefixes and continuations stay the rollout's, so the truth is missed from two tokens on."""
    for seed in range(5):
        pair = make_pair(seed, 0.5, max_length)
        gradient = expected_gradient(pair, TOKEN(pair))
        assert close(gradient, local_approximation_gradient(pair))
        assert close(gradient, pair.true_gradient) == (max_length == 1)


def test_geometric_weights_sum_over_a_bridge_between_the_policies(pair: Pair) -> None:
    """Fact 3: row y counts with q(y)^(1 - 1/T) p(y)^(1/T), T its own length."""
    share = 1 / pair.mask.sum(1).double()
    bridge = pair.rollout_probabilities ** (1 - share) * pair.train_probabilities**share
    assert close(expected_gradient(pair, GEOMETRIC(pair)), bridge @ pair.gradient_terms.sum(1))
    assert gradient_quality(pair, GEOMETRIC(pair)).relative_bias > 0.1


@pytest.mark.parametrize("weights", [TOKEN, GEOMETRIC, NO_CORRECTION], ids=["token", "geometric", "none"])
def test_other_weights_are_biased_in_the_first_order(weights: Weights) -> None:
    """Half the mismatch, half the bias: neither token nor geometric weights cancel the first order. A known limit."""
    for seed in range(5):
        full, half = (gradient_quality(pair, weights(pair)) for pair in (make_pair(seed, 0.01), make_pair(seed, 0.005)))
        assert full.relative_bias / half.relative_bias == pytest.approx(2, rel=0.05)


def test_no_correction_is_the_plain_sum(pair: Pair) -> None:
    """Level none: every row counts as often as the rollout samples it, whatever train thinks of it."""
    expected = torch.zeros_like(pair.true_gradient)
    for i, tokens in enumerate(pair.completions):
        for t in range(len(tokens)):
            expected += pair.rollout_probabilities[i] * pair.gradient_terms[i, t]
    assert close(expected_gradient(pair, NO_CORRECTION(pair)), expected)
    assert gradient_quality(pair, NO_CORRECTION(pair)).relative_bias > 0.1


# --- gradients: samples ----------------------------------------------------------------------------------------------


def sampled_gradient(pair: Pair, count: int, seed: int, config: CorrectionConfig) -> Tensor:
    """As a trainer does it: weights of the sampled batch, then autograd of the surrogate, divided by the rows."""
    drawn = sample(pair, count, seed)
    logprobs = pair.token_logprobs(pair.conditionals(pair.parameters)[0])[drawn]
    found = correct(logprobs.detach(), pair.rollout[drawn], pair.mask[drawn], config)
    loss = -(found.is_weights * found.mask * pair.advantages[drawn, None] * logprobs).sum() / count
    (gradient,) = torch.autograd.grad(loss, pair.parameters)
    return -gradient.flatten()


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_sampled_gradients_converge(level: Any) -> None:
    """The mean over many rows is within 5 standard errors of the truth (sequence) or of the local approximation."""
    pair, count = make_pair(seed=4, mismatch=0.5), 50_000
    config = CorrectionConfig(level=level, upper=UNBOUNDED)
    target = pair.true_gradient if level == "sequence" else local_approximation_gradient(pair)
    rows = torch.einsum("st,stk->sk", corrected(config)(pair), pair.gradient_terms)
    errors = (pair.rollout_probabilities @ (rows - target).square()).div(count).sqrt()
    scores = torch.stack([(sampled_gradient(pair, count, seed, config) - target) / errors for seed in range(8)])
    assert scores.abs().max() < 5
    assert 0.7 < scores.square().mean().sqrt() < 1.3
    if level == "token":
        assert ((target - pair.true_gradient) / errors).abs().max() > 10, "the bias would not show"


# --- gradients: the bias of bounds, masks and rejection --------------------------------------------------------------


@pytest.mark.parametrize("upper", [1.1, 1.5, 2.0, 3.0])
def test_truncation_removes_the_excess_and_nothing_else(pair: Pair, upper: float) -> None:
    """E[g] = g* - sum_y q(y) max(w - upper, 0) A grad log p: the bias is the gradient of the mass above the bound."""
    excess = (row_weights(pair) - upper).clamp(min=0)
    assert excess.max() > 0
    expected = pair.true_gradient - expected_gradient(pair, excess[:, None] * pair.mask)
    weights = corrected(CorrectionConfig(level="sequence", upper=upper))(pair)
    assert close(expected_gradient(pair, weights), expected)


def test_truncation_bias_fades_as_the_bound_rises() -> None:
    """|bias| is at most sum_y q(y) max(w - upper, 0) |A grad log p|, which only falls as `upper` rises, to 0.

    The norm itself need not fall at every step (the parts cancel in it), but does here. At a bound below every
    ratio all weights are equal, and the direction is that of no correction at all.
    """
    for seed in range(5):
        pair = make_pair(seed, 0.5)
        ratio, sizes = row_weights(pair), pair.gradient_terms.sum(1).norm(dim=1)
        ceilings, biases = [], []
        for upper in [1.0, 1.25, 1.5, 2.0, 3.0, float(ratio.max()) + 1e-9]:
            weights = corrected(CorrectionConfig(level="sequence", upper=upper))(pair)
            biases.append(float((expected_gradient(pair, weights) - pair.true_gradient).norm()))
            ceilings.append(float(pair.rollout_probabilities @ ((ratio - upper).clamp(min=0) * sizes)))
            assert biases[-1] <= ceilings[-1] + 1e-12
        assert ceilings == sorted(ceilings, reverse=True)
        assert biases == sorted(biases, reverse=True)
        assert biases[-1] == pytest.approx(0, abs=1e-12)
        low = float(ratio.min()) / 2
        lowest = expected_gradient(pair, corrected(CorrectionConfig(level="sequence", upper=low))(pair))
        assert close(lowest, low * expected_gradient(pair, NO_CORRECTION(pair)))


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
@pytest.mark.parametrize("control", ["truncate", "mask"])
def test_bounds_that_no_ratio_meets_change_nothing(level: Any, control: Any) -> None:
    pair = make_pair(seed=0, mismatch=0.05)
    bounded = corrected(CorrectionConfig(level=level, control=control, lower=0.5, upper=2.0))(pair)
    assert torch.equal(bounded, corrected(CorrectionConfig(level=level, upper=UNBOUNDED))(pair))


@pytest.mark.parametrize("upper", [1.1, 1.5, 3.0])
def test_a_sequence_mask_drops_the_train_mass_above_the_bound(pair: Pair, upper: float) -> None:
    """The mean weight is train's probability of the rows kept, and the bias the gradient of the rows dropped."""
    weights = corrected(preset("trl/sequence_mask", upper=upper))(pair)
    dropped = row_weights(pair) > upper
    kept_mass = pair.rollout_probabilities @ weights[:, 0]
    assert float(kept_mass) == pytest.approx(1 - float(pair.train_probabilities[dropped].sum()), rel=1e-12)
    terms = pair.train_probabilities[dropped] @ pair.gradient_terms[dropped].sum(1)
    assert close(expected_gradient(pair, weights), pair.true_gradient - terms)


@pytest.mark.parametrize("upper", [1.05, 1.2])
def test_a_geometric_bound_on_token_weights_drops_rows_of_the_local_approximation(pair: Pair, upper: float) -> None:
    """swift/sequence_mask: the bias to the local approximation is that of the rows whose geometric mean is above."""
    dropped = row_weights(pair) ** (1 / pair.mask.sum(1).double()) > upper
    assert 0 < dropped.sum() < len(dropped)
    lost = (pair.train - pair.rollout).exp() * (pair.mask & dropped[:, None])
    expected = local_approximation_gradient(pair) - expected_gradient(pair, lost)
    assert close(expected_gradient(pair, corrected(preset("swift/sequence_mask", upper=upper))(pair)), expected)


def test_rejection_drops_rows_whole_and_leaves_the_rest(pair: Pair) -> None:
    """verl/seq_is_rs: no row above 2 is left to truncate, so the bias is train's gradient over the rows rejected."""
    ratio = row_weights(pair)
    rejected = (ratio > 2) | (ratio < 0.5)
    terms = pair.train_probabilities[rejected] @ pair.gradient_terms[rejected].sum(1)
    weights = corrected(preset("verl/seq_is_rs"))(pair)
    assert close(expected_gradient(pair, weights), pair.true_gradient - terms)


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if not config.bypass])
def test_which_presets_are_unbiased(name: str) -> None:
    """Exact are those with sequence weights while no ratio meets a bound; every other preset is biased, always.

    `verl/bypass` has no weights: its loss divides by the rollout policy.
    """
    for seed in range(5):
        pair = make_pair(seed, mismatch=0.02)
        assert 0.5 < row_weights(pair).min() < row_weights(pair).max() < 2
        bias = gradient_quality(pair, corrected(PRESETS[name])(pair)).relative_bias
        if PRESETS[name].level == "sequence":
            assert bias < 1e-10
        else:
            assert bias > 1e-3


def test_what_the_off_policy_mask_does_to_the_gradient() -> None:
    """It drops only rows of negative advantage which the rollout likes more than train does.

    Bias = minus the gradient of the rows dropped. Under sequence weights they count little (w < exp(-delta T), as
    the mean of log q - log p is above delta); uncorrected, they count in full. What is left no longer has a mean
    advantage of 0: the update leans towards raising the probability of whatever was kept.
    """
    added: dict[str, list[float]] = {"sequence": [], "none": []}
    for seed in range(30):
        pair = make_pair(seed, MISMATCHES["larger"])
        q, length = pair.rollout_probabilities, pair.mask.sum(1)
        drift = (pair.rollout - pair.train).sum(1) / length
        dropped = (drift > OFF_POLICY_DELTA) & (pair.advantages < 0)
        keep = sequence_keep(pair.train, pair.rollout, pair.mask, pair.advantages, OFF_POLICY_DELTA)
        assert torch.equal(keep, ~dropped)
        assert (row_weights(pair)[dropped] < (-OFF_POLICY_DELTA * length[dropped]).exp()).all()
        assert float(q @ pair.advantages) == pytest.approx(0, abs=1e-14)
        assert float(q[keep] @ pair.advantages[keep]) > 0
        scale = pair.true_gradient.norm()
        for name, mass, weights in (("sequence", pair.train_probabilities, SEQUENCE), ("none", q, NO_CORRECTION)):
            lost = mass[dropped] @ pair.gradient_terms[dropped].sum(1)
            whole = expected_gradient(pair, weights(pair))
            masked = expected_gradient(pair, off_policy_masked(weights)(pair))
            assert (masked - (whole - lost)).norm() < 1e-10 * scale
            added[name].append(float(lost.norm() / scale))
    assert statistics.median(added["sequence"]) < statistics.median(added["none"])


# --- bias against variance -------------------------------------------------------------------------------------------


def test_the_variance_of_sequence_weights_grows_with_length_and_that_of_token_weights_does_not() -> None:
    """chi^2 of the completions rises with every token more that may follow; per token it stays below the worst prefix.

    By the chain rule E[w_1..T^2] = E[w_1..T-1^2 (1 + chi^2 at the prefix)], and chi^2 is never negative.
    """
    for seed in range(5):
        pairs = [make_pair(seed, 0.5, max_length) for max_length in (1, 2, 3, 4, 5)]
        by_row = [float(pair.rollout_probabilities @ row_weights(pair).square()) - 1 for pair in pairs]
        assert by_row == sorted(by_row)
        assert by_row[-1] > 1.5 * by_row[0]
        for pair in pairs:
            by_token = per_token(pair, chi2_train_rollout)
            assert by_token <= max(chi2_train_rollout(*both) for both in distributions(pair).values())


def test_sequence_weights_pay_for_no_bias_with_variance() -> None:
    """Exact variances: in the median pair, sequence weights are noisier than token weights and than on-policy rows."""
    ratios, against_on_policy = [], []
    for seed in range(30):
        pair = make_pair(seed, 1.0)
        sequence, token = (
            gradient_variance(pair, weights(pair), pair.rollout_probabilities) for weights in (SEQUENCE, TOKEN)
        )
        ratios.append(sequence / token)
        on_policy = gradient_variance(pair, pair.mask.double(), pair.train_probabilities)
        against_on_policy.append(sequence / on_policy)
    assert statistics.median(ratios) > 1.5
    assert statistics.median(against_on_policy) > 2


# --- the table of the documentation ----------------------------------------------------------------------------------


def test_the_bias_table() -> None:
    """Unbiased rows show 0 bias and no other does; with a larger mismatch, bounds cost bias and save variance."""
    table = bias_table(pairs=8)
    for qualities in table.values():
        assert qualities["sequence, unbounded"].relative_bias < 1e-10
        assert qualities["sequence, unbounded"].cosine == pytest.approx(1)
        for name in ("no correction", "token, unbounded", "geometric, unbounded"):
            assert qualities[name].relative_bias > 1e-3
    assert table["small"]["verl/seq_is"].relative_bias < 1e-10
    assert table["small"]["trl/sequence_mask"].relative_bias < 1e-10
    assert table["larger"]["verl/seq_is"].relative_bias > 1e-3
    larger = table["larger"]
    assert larger["verl/seq_is"].relative_variance < larger["sequence, unbounded"].relative_variance
    lines = markdown(table).splitlines()
    assert len(lines) == 2 + len(CORRECTIONS)
    assert {line.count("|") for line in lines} == {1 + 1 + 4 * len(MISMATCHES)}
