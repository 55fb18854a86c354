"""Truth, not only parity: the diagnostics against policies whose every completion is known.

Expectations are sums over all completions and hold to rounding; samples are judged by exact standard errors.
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from app.maths.correction import CorrectionConfig, RejectionRule, preset
from app.maths.divergence import chi_squared_target_sampler, kl_sampler_target_k1, kl_sampler_target_k3
from app.metrics import diagnose
from tests.benchmarks.bias_table import (
    UNBOUNDED,
)
from tests.maths.closed_form import (
    MAX_K3,
    Pair,
    chi2_rollout_train,
    chi2_train_rollout,
    distributions,
    kl_rollout_train,
    kl_train_rollout,
    limits,
    make_pair,
    per_token,
    row_weights,
    sample,
    spread,
)

SEEDS = range(20)


def exact(pair: Pair) -> dict[str, float]:
    return limits(pair, pair.rollout_probabilities.tolist())


def standard_errors(pair: Pair, count: int) -> dict[str, float]:
    def found(shares: list[float]) -> dict[str, float]:
        return limits(pair, shares)

    return {key: value / math.sqrt(count) for key, value in spread(found, pair.rollout_probabilities.tolist()).items()}


def diagnosed(pair: Pair, count: int, seed: int, config: CorrectionConfig | None = None) -> dict[str, float]:
    """The application's diagnostics of `count` sampled rows, keys without their prefix."""
    drawn = sample(pair, count, seed)
    found = diagnose(pair.train[drawn], pair.rollout[drawn], pair.mask[drawn], config, rewards=pair.rewards[drawn])
    return {key.removeprefix("rollout_correction/"): value for key, value in found.items()}


# --- the yardstick itself --------------------------------------------------------------------------------------------


def test_the_enumeration_is_complete(pair: Pair) -> None:
    assert len(pair.completions) == len(set(pair.completions)) == 1 + 3 + 3 * 3 * 4
    assert pair.mask.sum(1).tolist() == [len(tokens) for tokens in pair.completions]
    for logprobs, side in ((pair.train, 0), (pair.rollout, 1)):
        assert logprobs.sum(1).exp().sum().item() == pytest.approx(1, abs=1e-14)
        table = distributions(pair)  # in plain Python
        for tokens, row in zip(pair.completions, logprobs.tolist(), strict=True):
            expected = [table[tokens[:t]][side][tokens[t]] for t in range(len(tokens))]
            assert row[: len(tokens)] == pytest.approx(expected, abs=1e-14)


def test_the_limits_are_the_divergences(pair: Pair) -> None:
    """Sums over sampled completions equal the definitions, which know the full distribution at every prefix."""
    found = exact(pair)
    assert found["kl"] == pytest.approx(per_token(pair, kl_rollout_train), rel=1e-12)
    assert found["k3_kl"] == pytest.approx(per_token(pair, kl_rollout_train), rel=1e-12)
    assert found["chi2_token"] == pytest.approx(per_token(pair, chi2_train_rollout), rel=1e-12)
    assert found["ess_exact"] == pytest.approx(1 / (1 + per_token(pair, chi2_train_rollout)), rel=1e-12)
    assert found["raw_ratio_mean"] == pytest.approx(1, rel=1e-12)
    # chi^2 between the two distributions of whole completions
    chi2 = sum((a - b) ** 2 / b for a, b in zip(pair.train_probabilities, pair.rollout_probabilities, strict=True))
    assert found["chi2_seq_product"] == pytest.approx(float(chi2), rel=1e-12)
    # the chain rule: KL of whole completions is KL per token times the expected number of tokens
    q, length = pair.rollout_probabilities, pair.mask.sum(1).double()
    whole = float(q @ (q.log() - pair.train_probabilities.log()))
    assert found["kl"] * float(q @ length) == pytest.approx(whole, rel=1e-12)


def test_the_standard_error_of_a_row_mean(pair: Pair) -> None:
    """The delta method gives the textbook value for a plain mean, and for a ratio of means its linearisation."""
    q, mean_l = pair.rollout_probabilities, (pair.rollout - pair.train).sum(1) / pair.mask.sum(1)
    textbook = math.sqrt(float(q @ mean_l.square()) - float(q @ mean_l) ** 2)
    found = standard_errors(pair, count=1)
    assert found["log_ppl_diff"] == pytest.approx(textbook, rel=1e-6)
    length = pair.mask.sum(1).double()
    residual = (pair.rollout - pair.train).sum(1) - exact(pair)["kl"] * length
    assert found["kl"] == pytest.approx(math.sqrt(float(q @ residual.square())) / float(q @ length), rel=1e-6)


# --- diagnostics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2_000, 32_000])
@pytest.mark.parametrize(("seed", "mismatch"), [(4, 1.0), (6, 0.5), (3, 0.05)])
def test_diagnostics_converge_to_the_exact_values(seed: int, mismatch: float, count: int) -> None:
    """Over 20 samples, errors are within 5 standard errors and as large as they should be.

    The standard error is exact and falls as 1 / sqrt(count): errors of its size at both counts shrink by that law. An
    inconsistent estimator would leave it as the count grows.
    """
    pair = make_pair(seed, mismatch)
    truth, errors = exact(pair), standard_errors(pair, count)
    found = [diagnosed(pair, count, draw) for draw in SEEDS]
    for key, value in truth.items():
        scores = [(run[key] - value) / errors[key] for run in found]
        assert max(map(abs, scores)) < 5, f"{key}: {scores}"
        assert 0.5 < math.sqrt(statistics.fmean(score**2 for score in scores)) < 1.7, f"{key}: {scores}"


def test_mistaken_definitions_would_show(pair: Pair) -> None:
    """What the diagnostics are not: another direction, a mean of row means, a perplexity of the mean, an inverse."""
    count, truth = 100_000, exact(pair)
    inverse_square = limits_of_inverse_ratio(pair)
    mistakes = [
        ("kl", -truth["kl"]),
        ("kl", per_token(pair, kl_train_rollout)),
        ("kl", truth["log_ppl_diff"]),  # exactly the mean of row means of rollout - old
        ("k3_kl", per_token(pair, kl_train_rollout)),
        ("k3_kl", truth["log_ppl_diff"]),
        ("chi2_token", per_token(pair, chi2_rollout_train)),
        ("chi2_seq_product", truth["chi2_seq"]),
        ("chi2_seq", truth["chi2_token"]),
        ("ess_exact", inverse_square),
        ("ess_sequence", truth["ess_exact"]),
        ("training_ppl", math.exp(truth["training_log_ppl"])),
        ("training_ppl", truth["rollout_ppl"]),
        ("log_ppl_diff", truth["kl"]),
        ("ppl_ratio", truth["training_ppl"] / truth["rollout_ppl"]),
    ]
    errors = standard_errors(pair, count)
    for draw in range(3):
        found = diagnosed(pair, count, draw)
        for key, mistaken in mistakes:
            assert abs(found[key] - truth[key]) < 5 * errors[key]
            assert abs(found[key] - mistaken) > 10 * errors[key], f"{key} would pass as {mistaken}"


def limits_of_inverse_ratio(pair: Pair) -> float:
    """Kish's ratio of q / p over the rollout's tokens."""
    tokens = pair.rollout_probabilities[:, None] * pair.mask
    tokens = tokens / tokens.sum()
    inverse = (pair.rollout - pair.train).exp()
    return float((tokens * inverse).sum() ** 2 / (tokens * inverse.square()).sum())


def test_the_cap_makes_k3_an_underestimate() -> None:
    """Where a token's k3 exceeds 10, `k3_kl` no longer estimates KL: it converges to less. `kl` (k1) still does."""
    pair, count = make_pair(seed=1, mismatch=1.0), 100_000
    log_ratio = (pair.train - pair.rollout)[pair.mask]
    assert (log_ratio.exp() - 1 - log_ratio).max() > MAX_K3
    truth, errors, kl = exact(pair), standard_errors(pair, count), per_token(pair, kl_rollout_train)
    for draw in range(3):
        found = diagnosed(pair, count, draw)
        assert abs(found["k3_kl"] - truth["k3_kl"]) < 5 * errors["k3_kl"]
        assert abs(found["kl"] - kl) < 5 * errors["kl"]
        assert found["k3_kl"] < kl - 5 * errors["k3_kl"]


def test_divergence_estimators_are_unbiased(pair: Pair) -> None:
    """The expectation of each estimator under q is its divergence; with l = log p - log q, at every prefix alone."""
    for train, rollout in distributions(pair).values():
        log_ratio = torch.tensor(train, dtype=torch.float64) - torch.tensor(rollout, dtype=torch.float64)
        q = torch.tensor(rollout, dtype=torch.float64).exp()
        kl, chi2 = kl_rollout_train(train, rollout), chi2_train_rollout(train, rollout)
        assert float(q @ kl_sampler_target_k1(log_ratio)) == pytest.approx(kl, rel=1e-11)
        assert float(q @ kl_sampler_target_k3(log_ratio)) == pytest.approx(kl, rel=1e-11)
        assert float(q @ chi_squared_target_sampler(log_ratio)) == pytest.approx(chi2, rel=1e-11)


def test_the_geometric_chi2_is_no_divergence() -> None:
    """`chi2_seq` is negative for many pairs of policies that differ: it measures no distance, `chi2_seq_product` does.

    Among rows of T tokens E[(rho_1 ... rho_T)^(2/T)] is at most P(T)^(2/T), P(T) the ratio of the two probabilities of
    that length, by Jensen's inequality for T >= 2. So rows of one length T > 2 can only give a value below 0.
    """
    negative = 0
    for seed in range(12):
        pair = make_pair(seed, 0.5)
        q, length = pair.rollout_probabilities, pair.mask.sum(1).double()
        squares = row_weights(pair) ** (2 / length)
        for rows in (length == 2, length == 3):
            mass, train_mass = float(q[rows].sum()), float(pair.train_probabilities[rows].sum())
            ceiling = (train_mass / mass) ** (2 / float(length[rows][0]))
            assert float(q[rows] @ squares[rows]) / mass <= ceiling + 1e-12
        found = diagnosed(pair, 50_000, seed)
        assert found["chi2_seq_product"] > 0
        negative += found["chi2_seq"] < -5 * standard_errors(pair, 50_000)["chi2_seq"]
    assert negative >= 6


def test_sequence_weights_have_the_ess_of_the_product(pair: Pair) -> None:
    """Kish's ratio of unbounded sequence weights is 1 / (1 + chi^2 of the completions)."""
    config, count = CorrectionConfig(level="sequence", upper=UNBOUNDED), 100_000
    ratio = row_weights(pair)
    expected = 1 / float(pair.rollout_probabilities @ ratio.square())
    # Kish's influence: with E[w] = 1 and E[w^2] = m, (2 w - w^2 / m - 1) / m
    influence = (2 * ratio - expected * ratio.square() - 1) * expected
    error = math.sqrt(float(pair.rollout_probabilities @ influence.square()) / count)
    for draw in range(3):
        assert abs(diagnosed(pair, count, draw, config)["ess_sequence"] - expected) < 5 * error


def test_dropped_shares_are_the_rollout_mass_dropped(pair: Pair) -> None:
    """`clipped_frac` and `rejected_sequence_fraction` estimate how often the rollout samples a row that is dropped."""
    count, ratio, q = 30_000, row_weights(pair), pair.rollout_probabilities
    masked = preset("trl/sequence_mask", upper=1.5)
    rejecting = CorrectionConfig(rejection=(RejectionRule(level="sequence", lower=0.5, upper=2.0),))
    cases = [
        ("clipped_frac", masked, float(q[ratio > 1.5].sum())),
        ("rejected_sequence_fraction", rejecting, float(q[(ratio > 2) | (ratio < 0.5)].sum())),
    ]
    for key, config, mass in cases:
        assert 0.05 < mass < 0.95
        for draw in range(3):
            found = diagnosed(pair, count, draw, config)[key]
            assert abs(found - mass) < 5 * math.sqrt(mass * (1 - mass) / count)
