"""What a run reports: accumulated exactly over micro-batches and ranks, reduced when it is logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from app.maths.masking import masked_mean, masked_sum
from app.maths.objective import LossParts
from app.metrics import MismatchMetrics, RunningStatistics
from app.metrics.drawing import Histogram
from app.metrics.state import VectorMetric, fused_sync
from app.rollout.steps import RolloutReport
from app.training.step_correction import CorrectedBatch
from app.types import Sample, TrainBatch
from app.world import World


class StepMeters:
    """Mismatch diagnostics, policy statistics and rollout statistics of a log interval.

    A plain object: what is saved of it is every rank's part, which Lightning would not gather.
    """

    def __init__(self, reward_names: Sequence[str]) -> None:
        """Declare the statistics; the names must be equal on all ranks."""
        self.mismatch = MismatchMetrics()
        self.policy = RunningStatistics(
            ratios=[
                "policy/loss",
                "policy/kl_loss",
                "policy/approx_kl",
                "policy/ref_kl",
                "policy/entropy",
                "policy/clip_fraction_low",
                "policy/clip_fraction_high",
                "policy/grad_norm",
                "policy/learning_rate",
                "policy/trained_token_fraction",
                "policy/overlong_filtered_fraction",
                "policy/low_entropy_fraction",
                "policy/skipped_update_fraction",
                "policy/non_finite_update_fraction",
                "rollout/truncated_fraction",
                "rollout/frac_reward_zero_std",
                "rollout/resampled_group_fraction",
            ],
            spreads=[
                "rollout/reward",
                "rollout/length",
                "rollout/kl_penalty",
                *(f"rollout/reward/{name}" for name in reward_names),
            ],
            maxima=["rollout/length_max"],
        )

    def to(self, device: torch.device) -> StepMeters:
        """Move the sums to `device`: a collective over GPUs takes nothing else. They stay float64."""
        self.mismatch.to(device)
        self.policy.to(device)
        return self

    def update(
        self,
        batch: TrainBatch,
        corrected: CorrectedBatch,
        entropy: Tensor,
        parts: LossParts,
        *,
        step: int,
        detailed: bool,
    ) -> None:
        """Add a micro-batch.

        Args:
            batch: its rows.
            corrected: what the loss took of them.
            entropy: [B, T] nats.
            parts: its share of the loss.
            step: optimiser steps done: the version of the weights that are trained.
            detailed: whether the mismatch is measured in full.
        """
        self.mismatch.update(
            corrected.old_logprobs,
            batch.rollout_logprobs,
            batch.mask,
            rewards=batch.rewards,
            advantages=batch.advantages,
            off_policy_keep=None if corrected.off_policy is None else corrected.off_policy.keep,
            policy_lag=_policy_lag(batch, step),
            correction=corrected.correction if corrected.correctable else None,
            detailed=detailed,
        )
        tokens = parts.token_count
        share = sum(batch.sampled_tokens) / batch.totals.tokens  # a step's shares add up to one step
        ratios: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "policy/loss": (parts.policy_loss, share),
            "policy/approx_kl": (parts.approx_kl_sum, tokens),
            "policy/entropy": (masked_sum(entropy, batch.mask), tokens),
            "policy/clip_fraction_low": (parts.clipped_low.sum(), tokens),
            "policy/clip_fraction_high": (parts.clipped_high.sum(), tokens),
            "policy/trained_token_fraction": (parts.surrogate_tokens, tokens),
        }
        if batch.ref_logprobs is not None:
            ratios["policy/ref_kl"] = (parts.ref_kl_sum, tokens)
            ratios["policy/kl_loss"] = (parts.kl_loss, share)
        self.policy.update(ratios=ratios)

    def optimiser_step(self, grad_norm: Tensor, learning_rate: float, nothing_left: bool, non_finite: bool) -> None:
        """Add one optimiser step, on one rank: its gradient's norm before clipping, its rate, why it was left out."""
        finite = grad_norm.isfinite()
        self.policy.update(
            ratios={
                "policy/grad_norm": (torch.where(finite, grad_norm, 0.0), finite.double()),
                "policy/learning_rate": (learning_rate, 1),
                "policy/skipped_update_fraction": (nothing_left, 1),
                "policy/non_finite_update_fraction": (non_finite, 1),
            }
        )

    def rollout(self, report: RolloutReport) -> None:
        """Add a new rollout of this rank."""
        samples = report.samples
        groups = report.groups
        lengths = torch.tensor([len(sample.completion.token_ids) for sample in samples])
        cut = sum(sample.completion.finish_reason == "length" for sample in samples)
        spreads = {f"rollout/reward/{name}": values for name, values in _rewards_by_name(samples).items()}
        spreads["rollout/reward"] = _scored([sample.reward for sample in samples])
        spreads["rollout/length"] = lengths
        if report.reward_penalty is not None:
            spreads["rollout/kl_penalty"] = report.reward_penalty
        self.policy.update(
            ratios={
                "rollout/truncated_fraction": (cut, len(samples)),
                "rollout/frac_reward_zero_std": (report.zero_std_groups, groups),
                "rollout/resampled_group_fraction": (report.resampled_groups, groups),
                "policy/overlong_filtered_fraction": (report.overlong_rows, len(samples)),
                "policy/low_entropy_fraction": (report.low_entropy_tokens, int(lengths.sum())),
            },
            spreads=spreads,
            maxima={"rollout/length_max": lengths},
        )

    def local_state(self) -> dict[str, Tensor]:
        """Return a copy of this rank's sums, on their device: it is taken at every step and seldom saved."""
        return {name: metric.vector.clone() for name, metric in self._members().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Add sums that `local_state` gave. Those of a run with other settings, whose form differs, are left out."""
        for name, metric in self._members().items():
            if name in state and state[name].shape == metric.vector.shape:
                metric.add(state[name])

    def _members(self) -> dict[str, VectorMetric]:
        core, detailed = self.mismatch.members()
        return {"core": core, "detailed": detailed, "policy": self.policy}

    def compute_and_reset(self) -> tuple[dict[str, float], dict[str, Histogram]]:
        """Return every value and histogram over all ranks since the last call. All ranks must call it together."""
        with fused_sync(self._members().values()):
            values = {**self.mismatch.compute(), **self.policy.compute()}
            histograms = self.mismatch.histograms()
        self.mismatch.reset()
        self.policy.reset()
        return values, histograms


class EvalMeters:
    """Means over validation samples of all ranks: each reward function, their sum, length and truncated share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._samples: list[Sample] = []

    def update(self, samples: list[Sample]) -> None:
        """Add samples of this rank."""
        self._samples += samples

    def compute_and_reset(self, prefix: str) -> dict[str, float]:
        """Return `<prefix>/<name>` means over all ranks. All ranks must call it together."""
        mine: dict[str, list[float]] = {
            **{name: values.tolist() for name, values in _rewards_by_name(self._samples).items()},
            "reward": [sample.reward for sample in self._samples if not math.isnan(sample.reward)],
            "completion_length": [len(sample.completion.token_ids) for sample in self._samples],
            "truncated_fraction": [sample.completion.finish_reason == "length" for sample in self._samples],
        }
        self._samples = []
        pooled: dict[str, list[float]] = {}
        for rank in self.world.gather(mine):
            for name, values in rank.items():
                pooled.setdefault(name, []).extend(values)
        return {f"{prefix}/{name}": math.fsum(values) / len(values) for name, values in pooled.items() if values}


def _policy_lag(batch: TrainBatch, step: int) -> Tensor:
    """Mean over each row's tokens [B] of the optimiser steps since they were sampled."""
    return masked_mean((step - batch.policy_versions).double(), batch.mask, dim=1)


def _rewards_by_name(samples: Sequence[Sample]) -> dict[str, Tensor]:
    names = samples[0].rewards if samples else ()
    return {name: _scored([sample.rewards[name] for sample in samples]) for name in names}


def _scored(values: Sequence[float | None]) -> Tensor:
    """The rewards of rows that have one."""
    return torch.tensor([v for v in values if v is not None and not math.isnan(v)], dtype=torch.float64)
