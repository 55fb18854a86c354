"""The tensors that are measured, checked once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows to be measured. Masked positions are never read, whatever stands there.

    Raises:
        ValueError: if a shape or dtype does not fit; the message names the tensor.
    """

    old_logprobs: Tensor
    """[B, T] nats, the trainer's at sampling time."""
    rollout_logprobs: Tensor
    """[B, T] nats, the engine's; NaN where one is missing."""
    mask: Tensor
    """[B, T] bool: the valid tokens."""
    rewards: Tensor | None = None
    """[B]; a row whose reward is not finite is left out of the correlation."""
    advantages: Tensor | None = None
    """[B]; only the sign is used."""
    off_policy_keep: Tensor | None = None
    """[B] bool: False where the off-policy sequence mask dropped the row."""
    policy_lag: Tensor | None = None
    """[B] weight versions between the policy that sampled a row and the one trained."""

    def __post_init__(self) -> None:
        shape = tuple(self.mask.shape)
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool [B, T], got {self.mask.dtype} {shape}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = shape if field.name.endswith("logprobs") else shape[:1]
            if field.name != "mask" and value is not None and tuple(value.shape) != wanted:
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}, expected {wanted} (mask: {shape}).")
        if self.off_policy_keep is not None and self.off_policy_keep.dtype != torch.bool:
            raise ValueError(f"off_policy_keep must be bool, got {self.off_policy_keep.dtype}.")
        for name in ("old_logprobs", "rollout_logprobs"):
            if (dtype := getattr(self, name).dtype) not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} must be float32 or float64, got {dtype}: rounded log-probabilities would show a mismatch "
                    f"that is not there; keep them out of mixed-precision casts."
                )

    @classmethod
    def of(
        cls,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor | None,
        mask: Tensor,
        rewards: Tensor | None,
        advantages: Tensor | None,
        off_policy_keep: Tensor | None,
        policy_lag: Tensor | float | None,
    ) -> Rows:
        """Take what `app.metrics.diagnose` takes: perhaps no rollout log-probabilities, one lag for all rows."""
        if policy_lag is not None and not isinstance(policy_lag, Tensor):
            policy_lag = torch.full(mask.shape[:1], float(policy_lag), dtype=torch.float64, device=mask.device)
        if rollout_logprobs is None:
            rollout_logprobs = old_logprobs.new_full((), torch.nan).expand_as(old_logprobs)
        return cls(
            old_logprobs=old_logprobs.detach(),
            rollout_logprobs=rollout_logprobs.detach(),
            mask=mask,
            rewards=rewards,
            advantages=advantages,
            off_policy_keep=off_policy_keep,
            policy_lag=policy_lag,
        )
