"""Two language models so small that every completion can be written down: the truth that estimators are held against.

Vocabulary 0, 1, 2, 3; token 0 ends a completion, and so does the length limit of 3 tokens. That makes 40 completions
of 1 to 3 tokens. `train` is a softmax over bigram logits, its 16 parameters. `rollout` adds noise to the logits, drawn
for each of the 13 prefixes: like an engine's rounding, it is no setting of the parameters. The reward is 1 where the
tokens sum to 3, else 0.

Nothing here uses the application. Expectations are sums over all completions, never samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

END = 0
VOCABULARY = 4
MAX_K3 = 10.0
"""The diagnostics cap each token's k3 term here."""

Prefix = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """`train` and `rollout` with all their completions: S of them, padded to T tokens; float64, nats."""

    parameters: Tensor
    """[V, V] logits of train's next token (column) after the last token (row; row END: at the start). Needs grad."""
    noise: Tensor
    """[prefixes, V] what the rollout's logits have on top."""
    max_length: int
    """T."""

    @cached_property
    def prefixes(self) -> list[Prefix]:
        """Every context in which a token is sampled."""
        words = range(1, VOCABULARY)
        return [prefix for length in range(self.max_length) for prefix in itertools.product(words, repeat=length)]

    @cached_property
    def completions(self) -> list[Prefix]:
        """Every completion, END included where it was sampled."""
        every = [(*prefix, token) for prefix in self.prefixes for token in range(VOCABULARY)]
        return [tokens for tokens in every if tokens[-1] == END or len(tokens) == self.max_length]

    @cached_property
    def mask(self) -> Tensor:
        """[S, T] bool, the tokens of each completion."""
        lengths = torch.tensor([len(tokens) for tokens in self.completions])
        return torch.arange(self.max_length) < lengths[:, None]

    @cached_property
    def rewards(self) -> Tensor:
        """[S]."""
        return torch.tensor([float(sum(tokens) == 3) for tokens in self.completions], dtype=torch.float64)

    @cached_property
    def advantages(self) -> Tensor:
        """[S] reward minus its mean under the rollout policy: the group baseline of a very large group."""
        return self.rewards - self.rollout_probabilities @ self.rewards

    def conditionals(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [prefixes, V] of the next token under train, differentiable, and under rollout."""
        last = torch.tensor([prefix[-1] if prefix else END for prefix in self.prefixes])
        logits = parameters[last]
        return logits.log_softmax(-1), (logits.detach() + self.noise).log_softmax(-1)

    def token_logprobs(self, conditionals: Tensor) -> Tensor:
        """[S, T] log-probability of each token of each completion; 0 at padding."""
        row = {prefix: i for i, prefix in enumerate(self.prefixes)}
        steps = [[(row[tokens[:t]], tokens[t]) for t in range(len(tokens))] for tokens in self.completions]
        padded = [line + [(0, END)] * (self.max_length - len(line)) for line in steps]
        index = torch.tensor(padded)
        return torch.where(self.mask, conditionals[index[..., 0], index[..., 1]], 0.0)

    @cached_property
    def train(self) -> Tensor:
        """[S, T] train's token log-probabilities, without gradient."""
        return self.token_logprobs(self.conditionals(self.parameters)[0]).detach()

    @cached_property
    def rollout(self) -> Tensor:
        """[S, T] rollout's token log-probabilities."""
        return self.token_logprobs(self.conditionals(self.parameters)[1]).detach()

    @cached_property
    def train_probabilities(self) -> Tensor:
        """[S] of each completion under train."""
        return self.train.sum(1).exp()

    @cached_property
    def rollout_probabilities(self) -> Tensor:
        """[S] of each completion under rollout."""
        return self.rollout.sum(1).exp()

    @cached_property
    def gradient_terms(self) -> Tensor:
        """[S, T, parameters] A(y) grad log train(y_t | y_<t): what a weight multiplies. 0 at padding."""

        def logprobs(parameters: Tensor) -> Tensor:
            return self.token_logprobs(self.conditionals(parameters)[0])

        scores = torch.autograd.functional.jacobian(logprobs, self.parameters.detach()).flatten(2)
        return self.advantages[:, None, None] * scores

    @cached_property
    def true_gradient(self) -> Tensor:
        """[parameters] grad of J = sum_y train(y) A(y): the on-policy gradient, found without a score function."""
        probabilities = self.token_logprobs(self.conditionals(self.parameters)[0]).sum(1).exp()
        (gradient,) = torch.autograd.grad(probabilities @ self.advantages, self.parameters)
        return gradient.flatten()


def make_pair(seed: int, mismatch: float, max_length: int = 3) -> Pair:
    """A random pair; `mismatch` is the standard deviation of the noise on the rollout's logits."""
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
    prefixes = sum((VOCABULARY - 1) ** length for length in range(max_length))
    # one draw a prefix, so that policies of another length agree on the prefixes they share
    noise = [torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(prefixes)]
    return Pair(parameters=parameters.requires_grad_(), noise=mismatch * torch.stack(noise), max_length=max_length)


def sample(pair: Pair, count: int, seed: int) -> Tensor:
    """Indices [count] of completions drawn from the rollout policy."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(pair.rollout_probabilities, count, replacement=True, generator=generator)


# --- gradients -------------------------------------------------------------------------------------------------------


def expected_gradient(pair: Pair, weights: Tensor) -> Tensor:
    """[parameters] sum_y rollout(y) sum_t w A grad log train: what a trainer ascends on average. weights: [S, T]."""
    return torch.einsum("s,st,stk->k", pair.rollout_probabilities, weights, pair.gradient_terms)


def gradient_variance(pair: Pair, weights: Tensor, probabilities: Tensor) -> float:
    """Variance of one row's gradient, summed over the parameters, for rows drawn by `probabilities` [S]."""
    rows = torch.einsum("st,stk->sk", weights, pair.gradient_terms)
    mean = probabilities @ rows
    return float(probabilities @ (rows - mean).square().sum(1))


def local_approximation_gradient(pair: Pair) -> Tensor:
    """[parameters] grad of L = sum_s d_rollout(s) sum_a train(a | s) Q_rollout(s, a), by backward recursion.

    The local approximation of J around the rollout policy (Kakade and Langford 2002; TRPO, arXiv 1502.05477, eq. 3):
    d_rollout(s) is the probability that the rollout visits prefix s, Q_rollout(s, a) the expected advantage when the
    rollout completes s after a. Only the token itself is train's choice.
    """
    train, rollout = pair.conditionals(pair.parameters)
    row = {prefix: i for i, prefix in enumerate(pair.prefixes)}
    advantage = dict(zip(pair.completions, pair.advantages.tolist(), strict=True))

    def after(tokens: Prefix) -> float:
        """Expected advantage when the rollout continues `tokens`."""
        if tokens in advantage:
            return advantage[tokens]
        return sum(math.exp(rollout[row[tokens], a]) * after((*tokens, a)) for a in range(VOCABULARY))

    visits = reach(pair)
    objective = torch.zeros((), dtype=torch.float64)
    for prefix in pair.prefixes:
        for token in range(VOCABULARY):
            objective = objective + visits[prefix] * train[row[prefix], token].exp() * after((*prefix, token))
    (gradient,) = torch.autograd.grad(objective, pair.parameters)
    return gradient.flatten()


@dataclass(frozen=True, kw_only=True)
class GradientQuality:
    """How good the gradient under some weights is."""

    relative_bias: float
    """|E[g] - g*| / |g*|."""
    cosine: float
    """Of E[g] with g*; NaN where every row was dropped."""
    relative_variance: float
    """Variance of one row's gradient / that of a row drawn on-policy."""
    rows_used: float
    """Share of the sampled rows with a weight that is not 0."""


def gradient_quality(pair: Pair, weights: Tensor) -> GradientQuality:
    """The exact bias and variance under weights [S, T]; 0 where a token was dropped."""
    truth, mean = pair.true_gradient, expected_gradient(pair, weights)
    on_policy = gradient_variance(pair, pair.mask.double(), pair.train_probabilities)
    return GradientQuality(
        relative_bias=float((mean - truth).norm() / truth.norm()),
        cosine=float(mean @ truth / (mean.norm() * truth.norm())),
        relative_variance=gradient_variance(pair, weights, pair.rollout_probabilities) / on_policy,
        rows_used=float(pair.rollout_probabilities @ (weights != 0).any(1).double()),
    )


# --- divergences by definition: over prefixes, from the full distributions, in plain Python --------------------------


def log_softmax(logits: list[float]) -> list[float]:
    """Log-probabilities of a list of logits."""
    log_total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - log_total for logit in logits]


def distributions(pair: Pair) -> dict[Prefix, tuple[list[float], list[float]]]:
    """Of every prefix: log-probabilities of the next token under train and under rollout."""
    logits, noise = pair.parameters.tolist(), pair.noise.tolist()
    found = {}
    for prefix, extra in zip(pair.prefixes, noise, strict=True):
        own = logits[prefix[-1] if prefix else END]
        found[prefix] = log_softmax(own), log_softmax([a + b for a, b in zip(own, extra, strict=True)])
    return found


def reach(pair: Pair) -> dict[Prefix, float]:
    """Probability that the rollout samples a token after each prefix; their sum is the expected number of tokens."""
    table = distributions(pair)
    return {
        prefix: math.exp(sum(table[prefix[:t]][1][prefix[t]] for t in range(len(prefix)))) for prefix in pair.prefixes
    }


def per_token(pair: Pair, divergence: Callable[[list[float], list[float]], float]) -> float:
    """Mean over the rollout's tokens of divergence(train, rollout) between the two next-token distributions.

    The expected sum over a row divided by the expected number of tokens: the limit of a mean that pools all tokens.
    The mean of row means would weigh a token of a short row more.
    """
    visits, table = reach(pair), distributions(pair)
    return sum(visits[prefix] * divergence(*table[prefix]) for prefix in visits) / sum(visits.values())


def kl_rollout_train(train: list[float], rollout: list[float]) -> float:
    """KL(rollout || train) = sum q log(q / p), q the rollout."""
    return sum(math.exp(q) * (q - p) for p, q in zip(train, rollout, strict=True))


def kl_train_rollout(train: list[float], rollout: list[float]) -> float:
    """KL(train || rollout): the other direction, which no diagnostic means."""
    return kl_rollout_train(rollout, train)


def chi2_train_rollout(train: list[float], rollout: list[float]) -> float:
    """chi2(train || rollout) = sum p^2 / q - 1: the variance of the importance ratio."""
    return sum(math.exp(2 * p - q) for p, q in zip(train, rollout, strict=True)) - 1


def chi2_rollout_train(train: list[float], rollout: list[float]) -> float:
    """chi2(rollout || train): the other direction."""
    return chi2_train_rollout(rollout, train)


# --- what the diagnostics converge to: functionals of how often each completion occurs, in plain Python --------------


def limits(pair: Pair, probabilities: list[float]) -> dict[str, float]:
    """Each diagnostic (without a correction) if completion i made up a share probabilities[i] of endless rows."""
    pairs = zip(pair.train.tolist(), pair.rollout.tolist(), pair.mask.sum(1).tolist(), strict=True)
    rows = [(train[:length], rollout[:length]) for train, rollout, length in pairs]
    lengths = [float(len(train)) for train, _ in rows]
    reward = pair.rewards.tolist()
    ratio = [[math.exp(p - q) for p, q in zip(*row, strict=True)] for row in rows]
    total = [sum(train) - sum(rollout) for train, rollout in rows]  # of the log-ratios
    mean_l = [a / n for a, n in zip(total, lengths, strict=True)]
    log_ppl = [[-sum(side) / n for side in row] for row, n in zip(rows, lengths, strict=True)]

    def by_row(values: list[float]) -> float:
        return sum(share * value for share, value in zip(probabilities, values, strict=True))

    def by_token(value: Callable[[float, float], float]) -> float:
        return by_row([sum(value(p, q) for p, q in zip(*row, strict=True)) for row in rows]) / by_row(lengths)

    mean_ratio = [sum(values) / len(values) for values in ratio]
    ratio_mean, ratio_square = by_token(lambda p, q: math.exp(p - q)), by_token(lambda p, q: math.exp(2 * (p - q)))
    gap_mean = by_token(lambda p, q: abs(math.exp(p) - math.exp(q)))
    gap_square = by_token(lambda p, q: (math.exp(p) - math.exp(q)) ** 2)
    return {
        "kl": by_token(lambda p, q: q - p),
        "k3_kl": by_token(lambda p, q: min(math.exp(p - q) - 1 - (p - q), MAX_K3)),
        "chi2_token": ratio_square - 1,
        "chi2_seq": by_row([math.exp(2 * value) for value in mean_l]) - 1,
        "chi2_seq_product": by_row([math.exp(2 * value) for value in total]) - 1,
        "ess": ratio_mean**2 / ratio_square,
        "ess_exact": ratio_mean**2 / ratio_square,
        "ess_sequence": by_row(mean_ratio) ** 2 / by_row([value**2 for value in mean_ratio]),
        "is_weight_mean": ratio_mean,
        "is_weight_std": math.sqrt(ratio_square - ratio_mean**2),
        "raw_ratio_mean": ratio_mean,
        "training_ppl": by_row([math.exp(train) for train, _ in log_ppl]),
        "training_log_ppl": by_row([train for train, _ in log_ppl]),
        "rollout_ppl": by_row([math.exp(rollout) for _, rollout in log_ppl]),
        "rollout_log_ppl": by_row([rollout for _, rollout in log_ppl]),
        "log_ppl_diff": by_row([-value for value in mean_l]),
        "log_ppl_abs_diff": by_row([abs(value) for value in mean_l]),
        "ppl_ratio": by_row([math.exp(-value) for value in mean_l]),
        "logprob_abs_diff_mean": by_token(lambda p, q: abs(p - q)),
        "prob_diff_mean": gap_mean,
        "prob_diff_std": math.sqrt(gap_square - gap_mean**2),
        "prob_pearson": _correlation(lambda p, q: math.exp(p), lambda p, q: math.exp(q), by_token),
        "ratio_reward_corr": _row_correlation(mean_l, reward, by_row),
    }


def _correlation(x: Callable, y: Callable, mean: Callable) -> float:
    x_mean, y_mean = mean(x), mean(y)
    covariance = mean(lambda p, q: (x(p, q) - x_mean) * (y(p, q) - y_mean))
    variances = mean(lambda p, q: (x(p, q) - x_mean) ** 2) * mean(lambda p, q: (y(p, q) - y_mean) ** 2)
    return covariance / math.sqrt(variances)


def _row_correlation(x: list[float], y: list[float], mean: Callable) -> float:
    x_mean, y_mean = mean(x), mean(y)
    covariance = mean([(a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)])
    return covariance / math.sqrt(mean([(a - x_mean) ** 2 for a in x]) * mean([(b - y_mean) ** 2 for b in y]))


def spread(statistics: Callable[[list[float]], dict[str, float]], probabilities: list[float]) -> dict[str, float]:
    """Standard error times sqrt(rows) of each statistic of rows drawn by `probabilities`: the delta method, exactly.

    A statistic f of the observed shares has influence g(y) = d/dh f(shares + h (one row y - shares)); its variance
    from N rows is E[g^2] / N to first order. The derivative is a central difference.
    """
    step = 1e-5
    variances = dict.fromkeys(statistics(probabilities), 0.0)
    for i, probability in enumerate(probabilities):
        ends = []
        for h in (step, -step):
            mixed = [(1 - h) * p for p in probabilities]
            mixed[i] += h
            ends.append(statistics(mixed))
        for key in variances:
            variances[key] += probability * ((ends[0][key] - ends[1][key]) / (2 * step)) ** 2
    return {key: math.sqrt(variance) for key, variance in variances.items()}


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal to rounding, by norm."""
    return bool((actual - expected).norm() <= 1e-10 * expected.norm())


def row_weights(pair: Pair) -> Tensor:
    """[S] p(y) / q(y)."""
    return pair.train_probabilities / pair.rollout_probabilities
