"""The rows of a skipped step computed once more, one by one in float32, to find the row, token and module at fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.data.collate import collate
from app.guards.row_file import RecordedRow, RowFileHeader
from app.policy.scoring import sampled_logprobs
from app.replay.probe import Passage, probe
from app.training.module import GRPOModule
from app.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Loss and gradient of some rows of a step."""

    loss: float
    """Share of these rows in the loss of the step; all shares on all ranks add up to it, except under bnpo."""
    norms: dict[str, float]
    """L2 norm of each parameter's gradient, by name."""

    @property
    def norm(self) -> float:
        """L2 norm over all parameters."""
        return math.hypot(*self.norms.values())

    @property
    def broken(self) -> list[str]:
        """Parameters whose gradient is not finite, in the order of the model."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return math.isfinite(self.loss) and not self.broken


@dataclass(frozen=True, kw_only=True)
class RowFinding:
    """What the replay found for one row."""

    recorded: RecordedRow
    """The row as recorded in the file."""
    gradient: Gradient
    """Loss and gradient of the row alone."""
    passage: Passage
    """What the probe observed in the row's forward pass."""
    bad_numbers: tuple[str, ...]
    """Fields of the row with values that are not finite; a NaN in rollout_logprobs is a missing value and allowed."""
    first_bad_token: int | None
    """Index, among the sampled tokens, of the first whose log-probability is not finite; None: no such token."""
    then_now: float | None
    """Largest |log-probability then - now| over tokens where both are finite, nats: 0 for the same weights. None: no
    such token."""

    @property
    def finite(self) -> bool:
        """Whether loss, gradient and log-probabilities are finite."""
        return self.gradient.finite and self.first_bad_token is None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Everything that a replay found."""

    header: RowFileHeader
    """Header of the file with the rows."""
    bad_weights: dict[str, int]
    """Number of values that are not finite, by parameter of the policy."""
    together: Gradient
    """Loss and gradient of all rows as one micro-batch."""
    rows: tuple[RowFinding, ...]
    """Findings for each row, in the order of the file."""

    @property
    def finite(self) -> bool:
        """Whether weights, losses and gradients are finite."""
        return not self.bad_weights and self.together.finite and all(row.finite for row in self.rows)


def replay_rows(
    module: GRPOModule, header: RowFileHeader, rows: Sequence[RecordedRow], device: torch.device | str = "cpu"
) -> Replay:
    """Compute log-probabilities, correction, loss and gradient of rows in float32, all at once and one by one.

    Args:
        module: the training module, set up with the weights to use and the settings of the loss.
        header: header of the rows' file.
        rows: the rows to compute.
        device: device to compute on; the policy is moved there.
    """
    policy: PreTrainedModel = module.policy.to(device).float()  # type: ignore[arg-type]
    together, _ = _gradient(module, _batch(header, rows, device))
    return Replay(
        header=header,
        bad_weights={
            name: count for name, value in policy.named_parameters() if (count := int((~value.isfinite()).sum()))
        },
        together=together,
        rows=tuple(_replay_row(module, header, recorded, device) for recorded in rows),
    )


def _replay_row(
    module: GRPOModule, header: RowFileHeader, recorded: RecordedRow, device: torch.device | str
) -> RowFinding:
    policy = module.policy
    batch = _batch(header, [recorded], device)
    with probe(policy, policy.get_input_embeddings(), policy.get_output_embeddings()) as passage, torch.no_grad():
        _logprobs(module, batch)
    gradient, new = _gradient(module, batch)
    now = new[0].tolist()
    both = [
        abs(a - b) for a, b in zip(recorded.new_logprobs, now, strict=True) if math.isfinite(a) and math.isfinite(b)
    ]
    return RowFinding(
        recorded=recorded,
        gradient=gradient,
        passage=passage,
        bad_numbers=_bad_numbers(recorded),
        first_bad_token=next((t for t, value in enumerate(now) if not math.isfinite(value)), None),
        then_now=max(both, default=None),
    )


def _batch(header: RowFileHeader, rows: Sequence[RecordedRow], device: torch.device | str) -> TrainBatch:
    return collate(
        [recorded.row for recorded in rows],
        pad_token_id=0,
        totals=header.totals,
        correctable=header.correctable,
    ).to(device)


def _logprobs(module: GRPOModule, batch: TrainBatch) -> Tensor:
    return sampled_logprobs(module.policy, batch, temperature=module.temperature, max_tokens=module.micro_batch_tokens)[
        0
    ]


def _gradient(module: GRPOModule, batch: TrainBatch) -> tuple[Gradient, Tensor]:
    """The gradient of a micro-batch, and its log-probabilities [B, T] without one."""
    module.policy.zero_grad(set_to_none=True)
    new = _logprobs(module, batch)
    _, parts = module.step_correction.objective(batch, new)
    parts.loss.backward()
    named = [(name, p.grad) for name, p in module.policy.named_parameters() if p.grad is not None]
    # in float64: squares of large, finite values must not overflow
    norms = {name: float(gradient.double().norm()) for name, gradient in named}
    module.policy.zero_grad(set_to_none=True)
    return Gradient(loss=float(parts.loss.detach()), norms=norms), new.detach()


def _bad_numbers(recorded: RecordedRow) -> tuple[str, ...]:
    row = recorded.row
    bad = [name for name in ("advantage",) if not math.isfinite(getattr(row, name))]
    for name in ("old_logprobs", "ref_logprobs"):
        if not all(map(math.isfinite, getattr(row, name) or ())):
            bad.append(name)
    if any(map(math.isinf, row.rollout_logprobs or ())):
        bad.append("rollout_logprobs")
    return tuple(bad)
