"""The trainer's side of the audit: the same tokens scored under one condition after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.audit.attribution.fits import fit_support, fit_temperature
from app.audit.sides.condition import SamplingSupport, TrainerCondition
from app.audit.sides.scores import LogitStatistics, Row, left_padded, score_rows, single_rows
from app.audit.sides.support_mass import SupportMass
from app.audit.sides.variants import attention_kernel, copy_in, scaled_adapters
from app.audit.types import AuditRow, TokenScores
from app.data.collate import collate, row_to_score
from app.errors import LockstepError
from app.policy.loading import Dtype
from app.policy.routing import replaced_routing
from app.policy.scoring import sampled_logprobs
from app.types import Decoding, SamplingConfig, TrainBatch
from app.weights.lora import lora_layers

WITH_STATISTICS = TrainerCondition(arrangement="single_rows")
"""The condition whose pass also computes the statistics for the fits."""


class Scoring(Protocol):
    """The scoring function of training, see `app.policy.scoring.sampled_logprobs`."""

    def __call__(
        self, policy: PreTrainedModel, batch: TrainBatch, *, temperature: float, max_tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, each [B, T]."""


class TrainerSide:
    """Scores audited rows with the trainer's policy, once under each condition.

    Attention kernel, adapters, dtype and hooks of the policy are restored afterwards. At most one copy of it, in
    another dtype, exists at a time.

    Args:
        policy: on `device`, in evaluation mode; it may carry LoRA adapters.
        rows: the rows to score; at least one.
        temperature: the trainer's temperature.
        micro_batch_tokens: the trainer's budget for a forward pass, in padded tokens; None: no limit.
        pad_token_id: id that fills padded rows.
        autocast: context for the trainer's forward passes, `precision_plugin.forward_context`.
        device: where to compute.
        top_k: how many of the likeliest tokens to return for each position.
        scoring: the scoring function of training.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        rows: Sequence[AuditRow],
        *,
        temperature: float,
        micro_batch_tokens: int | None,
        pad_token_id: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        device: torch.device | str,
        top_k: int = 5,
        scoring: Scoring = sampled_logprobs,
    ) -> None:
        self._policy = policy
        self._sent = [Row(prompt=row.prompt_ids, completion=row.completion_ids) for row in rows]
        self._consumed: list[Row] | None = None
        self._decodings: Sequence[Decoding] | None = None
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._pad_token_id = pad_token_id
        self._autocast = autocast
        self._device = torch.device(device)
        self._top_k = top_k
        self._scoring = scoring
        self._scores: dict[TrainerCondition, TokenScores] = {}
        self._statistics: LogitStatistics | None = None
        self._copy: tuple[Dtype, PreTrainedModel] | None = None

    def routing(self, decodings: Sequence[Decoding]) -> None:
        """Store the router logits that the engine recorded, for `engine_routing`; one decoding per row."""
        self._decodings = decodings
        self._forget(lambda condition: condition.engine_routing)

    def consumed(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Store the prompts that the engine consumed, for `consumed_prompts`; one per row."""
        self._consumed = [
            Row(prompt=tuple(ids), completion=row.completion) for ids, row in zip(prompt_ids, self._sent, strict=True)
        ]
        self._forget(lambda condition: condition.consumed_prompts)

    def measure(self, condition: TrainerCondition) -> TokenScores:
        """Score every completion token, in the order of the rows.

        Only `single_rows` and `left_padded` also return the likeliest tokens.

        Raises:
            LockstepError: if the condition contradicts itself or the model, or needs something that the engine did not
                record.
        """
        condition = self._shortest(condition)
        if condition not in self._scores:
            self._check(condition)
            self._scores[condition] = self._score(condition)
        return self._scores[condition]

    def fit_temperature(self, scores: TokenScores) -> float:
        """Return the temperature at which the policy's logits come closest to `scores`, see `fits.fit_temperature`.

        For the engine's scores it is the temperature that the trainer should use. For the trainer's own,
        `measure(TrainerCondition())`, it is the configured one, unless training uses another.
        """
        return fit_temperature(self._logit_statistics(), scores.logprobs, self._temperature)

    def fit_support(self) -> tuple[SamplingSupport, ...]:
        """Return the smallest sampling supports that hold every audited token, see `app.audit.attribution.fits`."""
        statistics = self._logit_statistics()
        return fit_support(statistics, statistics.logits.shape[-1])

    def _logit_statistics(self) -> LogitStatistics:
        self.measure(WITH_STATISTICS)
        assert self._statistics is not None
        return self._statistics

    def _forget(self, stale: Callable[[TrainerCondition], bool]) -> None:
        self._scores = {condition: scores for condition, scores in self._scores.items() if not stale(condition)}

    def _shortest(self, condition: TrainerCondition) -> TrainerCondition:
        """The same condition with None for every setting that is as configured, so that it is measured once."""
        as_configured: dict[str, Any] = {}
        if condition.temperature == self._temperature:
            as_configured["temperature"] = None
        if condition.support == SamplingSupport():
            as_configured["support"] = None
        if condition.attention == self._policy.config._attn_implementation:
            as_configured["attention"] = None
        if condition.micro_batch_tokens == self._micro_batch_tokens or condition.arrangement != "micro_batches":
            as_configured["micro_batch_tokens"] = None
        return dataclasses.replace(condition, **as_configured)

    def _check(self, condition: TrainerCondition) -> None:
        if condition.adapters != 1 and not any(True for _ in lora_layers(self._policy)):
            raise LockstepError("the trainer's policy has no LoRA adapters to switch off or scale")
        if condition.consumed_prompts and self._consumed is None:
            raise LockstepError("the prompts that the engine consumed are not known: it has not decoded the rows again")
        if not condition.engine_routing:
            return
        if condition.arrangement != "single_rows":
            raise LockstepError(f"the engine's routing fits unpadded rows, not the arrangement {condition.arrangement}")
        if not self._decodings or not all(decoding.router_logits for decoding in self._decodings):
            raise LockstepError("the engine's router logits are not known: it has not recorded them")
        for index, (decoding, row) in enumerate(zip(self._decodings, self._rows(condition), strict=True)):
            for name, logits in decoding.router_logits.items():
                if len(logits) != row.tokens - 1:
                    raise LockstepError(
                        f"row {index}: the engine recorded the routing of {len(logits)} tokens in {name}, the trainer "
                        f"has {row.tokens - 1}: it consumed another prompt, or took cached blocks"
                    )

    def _rows(self, condition: TrainerCondition) -> list[Row]:
        if not condition.consumed_prompts:
            return self._sent
        assert self._consumed is not None
        return self._consumed

    @torch.no_grad()
    def _score(self, condition: TrainerCondition) -> TokenScores:
        model = self._policy if condition.dtype is None else self._copied(condition.dtype)
        precision = self._autocast() if condition.dtype is None else nullcontext()
        with attention_kernel(model, condition.attention), scaled_adapters(model, condition.adapters), precision:
            if condition.arrangement == "micro_batches":
                return self._as_trained(model, condition)
            return self._by_row(model, condition)

    def _copied(self, dtype: Dtype) -> PreTrainedModel:
        if self._copy is None or self._copy[0] != dtype:
            self._copy = None  # before the next is made
            self._copy = (dtype, copy_in(self._policy, dtype))
        return self._copy[1]

    def _sampling(self, condition: TrainerCondition) -> SamplingConfig:
        support = condition.support or SamplingSupport()
        temperature = self._temperature if condition.temperature is None else condition.temperature
        return SamplingConfig(temperature=temperature, top_k=support.top_k, top_p=support.top_p)

    def _as_trained(self, model: PreTrainedModel, condition: TrainerCondition) -> TokenScores:
        """Score with the scoring function of training, on rows sorted by length as training sorts them."""
        rows = self._rows(condition)
        order = sorted(range(len(rows)), key=lambda i: rows[i].tokens)
        batch = collate(
            [row_to_score(rows[i].prompt, rows[i].completion) for i in order], pad_token_id=self._pad_token_id
        ).to(self._device)
        sampling = self._sampling(condition)
        budget = self._micro_batch_tokens if condition.micro_batch_tokens is None else condition.micro_batch_tokens
        ids = torch.tensor([token for i in order for token in rows[i].completion], device=self._device)
        with SupportMass(model, ids, sampling) if condition.support else nullcontext() as mass:
            logprobs, _ = self._scoring(model, batch, temperature=sampling.temperature, max_tokens=budget)
        values = logprobs[batch.mask].double()
        if mass is not None:
            values = values - mass.log_mass()
        parts = dict(zip(order, values.cpu().split([len(rows[i].completion) for i in order]), strict=True))
        return TokenScores(logprobs=torch.cat([parts[i] for i in range(len(rows))]))

    def _by_row(self, model: PreTrainedModel, condition: TrainerCondition) -> TokenScores:
        """Score from the logits of one row after the other."""
        rows = self._rows(condition)
        if condition.arrangement == "left_padded":
            logits = left_padded(
                model, rows, self._device, pad_token_id=self._pad_token_id, max_tokens=self._micro_batch_tokens
            )
        else:
            logits = single_rows(model, rows, self._device)
        if condition.engine_routing:
            logits = self._routed(model, rows)
        scores, statistics = score_rows(
            logits, rows, self._sampling(condition), self._top_k, statistics=condition == WITH_STATISTICS
        )
        if statistics is not None:
            self._statistics = statistics
        return scores

    def _routed(self, model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[tuple[int, Tensor]]:
        """As `single_rows`, with each row routed as in the engine."""
        assert self._decodings is not None
        for index, (row, decoding) in enumerate(zip(rows, self._decodings, strict=True)):
            with replaced_routing(model, decoding.router_logits):
                yield from ((index, logits) for _, logits in single_rows(model, [row], self._device))
