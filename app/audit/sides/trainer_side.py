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
from app.audit.sides.scores import Row, Survey, left_padded, read, single_rows
from app.audit.sides.support_mass import SupportMass
from app.audit.sides.variants import attention_kernel, copy_in, scaled_adapters
from app.audit.types import AuditRow, TokenScores
from app.data.collate import collate, row_to_score
from app.errors import LockstepError
from app.policy.loading import Dtype
from app.policy.routing import replaced_routing
from app.policy.scoring import completion_logprobs
from app.types import Decoding, SamplingConfig, TrainBatch
from app.weights.lora import lora_layers

SURVEYED = TrainerCondition(layout="single_rows")
"""The condition whose pass also gives ranks and a sample of logits."""


class Scoring(Protocol):
    """The function that training scores with: see `app.policy.scoring.completion_logprobs`."""

    def __call__(
        self, policy: PreTrainedModel, batch: TrainBatch, *, temperature: float, max_tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, each [B, T]."""


class TrainerSide:
    """Scores audited rows with the trainer's policy; each condition once.

    The policy is left as it was found: attention kernel, adapters, dtype and hooks. At most one copy of it, in another
    dtype, is alive.

    Args:
        policy: on `device`, in evaluation mode; it may carry LoRA adapters.
        rows: to score; at least one.
        temperature: the trainer's.
        micro_batch_tokens: the trainer's budget of a forward pass; None: no limit.
        pad_token_id: fills up padded rows.
        autocast: the context of the trainer's forward passes, `precision_plugin.forward_context`.
        device: where to compute.
        top_k: likeliest tokens kept of each position.
        scoring: the function that training scores with.
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
        scoring: Scoring = completion_logprobs,
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
        self._survey: Survey | None = None
        self._copy: tuple[Dtype, PreTrainedModel] | None = None

    def routing(self, decodings: Sequence[Decoding]) -> None:
        """Take in the router logits that the engine had, for `engine_routing`; one decoding per row."""
        self._decodings = decodings
        self._forget(lambda condition: condition.engine_routing)

    def consumed(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Take in the prompts that the engine consumed, for `consumed_prompts`; one per row."""
        self._consumed = [
            Row(prompt=tuple(ids), completion=row.completion) for ids, row in zip(prompt_ids, self._sent, strict=True)
        ]
        self._forget(lambda condition: condition.consumed_prompts)

    def measure(self, condition: TrainerCondition) -> TokenScores:
        """Score every completion token, in the order of the rows.

        `single_rows` and `left_padded` also give the likeliest tokens, `micro_batches` does not.

        Raises:
            LockstepError: if the condition contradicts itself, the model, or what is known of the engine.
        """
        condition = self._shortest(condition)
        if condition not in self._scores:
            self._check(condition)
            self._scores[condition] = self._score(condition)
        return self._scores[condition]

    def fit_temperature(self, scores: TokenScores) -> float:
        """Return the temperature at which the policy's logits give about `scores` (see `app.audit.attribution.fits`).

        Of the engine's scores it is the temperature that the trainer should have. Of the trainer's own,
        `measure(TrainerCondition())`, it is the configured one, unless training scores with another.
        """
        return fit_temperature(self._surveyed(), scores.logprobs, self._temperature)

    def fit_support(self) -> tuple[SamplingSupport, ...]:
        """Return the smallest sampling supports that hold every audited token, see `app.audit.attribution.fits`."""
        survey = self._surveyed()
        return fit_support(survey, survey.logits.shape[-1])

    def _surveyed(self) -> Survey:
        self.measure(SURVEYED)
        assert self._survey is not None
        return self._survey

    def _forget(self, stale: Callable[[TrainerCondition], bool]) -> None:
        self._scores = {condition: scores for condition, scores in self._scores.items() if not stale(condition)}

    def _shortest(self, condition: TrainerCondition) -> TrainerCondition:
        """The same condition with None for whatever is as configured, so that it is measured once."""
        as_configured: dict[str, Any] = {}
        if condition.temperature == self._temperature:
            as_configured["temperature"] = None
        if condition.support == SamplingSupport():
            as_configured["support"] = None
        if condition.attention == self._policy.config._attn_implementation:
            as_configured["attention"] = None
        if condition.micro_batch_tokens == self._micro_batch_tokens or condition.layout != "micro_batches":
            as_configured["micro_batch_tokens"] = None
        return dataclasses.replace(condition, **as_configured)

    def _check(self, condition: TrainerCondition) -> None:
        if condition.adapters != 1 and not any(True for _ in lora_layers(self._policy)):
            raise LockstepError("the trainer's policy has no LoRA adapters to switch off or scale")
        if condition.consumed_prompts and self._consumed is None:
            raise LockstepError("the prompts that the engine consumed are not known: it has not decoded the rows again")
        if not condition.engine_routing:
            return
        if condition.layout != "single_rows":
            raise LockstepError(f"the engine's routing fits unpadded rows, not the layout {condition.layout}")
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
            if condition.layout == "micro_batches":
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
        """Score with the function that training uses, all rows sorted by length as it sorts them."""
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
        """Score from logits of one row after the other."""
        rows = self._rows(condition)
        if condition.layout == "left_padded":
            logits = left_padded(
                model, rows, self._device, pad_token_id=self._pad_token_id, max_tokens=self._micro_batch_tokens
            )
        else:
            logits = single_rows(model, rows, self._device)
        if condition.engine_routing:
            logits = self._routed(model, rows)
        survey_too = condition == SURVEYED
        scores, survey = read(logits, rows, self._sampling(condition), self._top_k, survey=survey_too)
        if survey_too:
            self._survey = survey
        return scores

    def _routed(self, model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[tuple[int, Tensor]]:
        """As `single_rows`, each row routed as the engine routed it."""
        assert self._decodings is not None
        for index, (row, decoding) in enumerate(zip(rows, self._decodings, strict=True)):
            with replaced_routing(model, decoding.router_logits):
                yield from ((index, logits) for _, logits in single_rows(model, [row], self._device))
