"""Faults planted on the trainer's side of the audit, each with its strength.

Wiring: a scoring function goes into `TrainerSide(scoring=...)`, a context manager is entered around everything that the
audit does with the policy, and weights go into the engine (`Engine.load_weights`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from app.audit.sides.trainer_side import Scoring
from app.data.collate import split_by_tokens
from app.maths.logprobs import selected_logprobs
from app.policy.scoring import output_head, sampled_logprobs
from app.types import TrainBatch
from app.weights.lora import lora_layers, weights

PLANTED = "planted"
"""Name of the attention kernel with an error."""


def scoring_at(factor: float) -> Scoring:
    """Training scores at `factor` times the temperature that it is given; 1 is healthy."""

    def scoring(
        policy: PreTrainedModel, batch: TrainBatch, *, temperature: float, max_tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        return sampled_logprobs(policy, batch, temperature=temperature * factor, max_tokens=max_tokens)

    return scoring


def padded_scoring(*, columns: int = 0, completion_shift: int = 0) -> Scoring:
    """Training pads on the left; 0 and 0 are healthy.

    Args:
        columns: of padding before every row, which no attention mask hides.
        completion_shift: added to the position ids of completions. (A shift of whole rows would change nothing: rotary
            embeddings see differences of positions alone.)
    """

    def scoring(
        policy: PreTrainedModel, batch: TrainBatch, *, temperature: float, max_tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        lengths = batch.lengths
        hidden, ids = [], []
        for run in split_by_tokens(lengths, max_tokens):
            rows = list(range(len(lengths)))[run]
            found = _left_padded(policy, batch, rows, max(lengths[run]), columns, completion_shift)
            for row, states in zip(rows, found, strict=True):
                count = batch.sampled_tokens[row]
                hidden.append(states[-count - 1 : -1])
                ids.append(batch.input_ids[row, lengths[row] - count : lengths[row]])
        flat, _ = selected_logprobs(torch.cat(hidden), output_head(policy), torch.cat(ids), temperature)
        logprobs = flat.new_zeros(batch.mask.shape)
        logprobs[batch.mask] = flat
        return logprobs, torch.zeros_like(logprobs)

    return scoring


def _left_padded(
    policy: PreTrainedModel, batch: TrainBatch, rows: list[int], width: int, columns: int, shift: int
) -> Tensor:
    ids = torch.zeros(len(rows), width + columns, dtype=torch.int64)
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for place, row in enumerate(rows):
        completion = batch.sampled_tokens[row]
        prompt = batch.lengths[row] - completion
        start = width + columns - prompt - completion
        ids[place, start:] = batch.input_ids[row, : prompt + completion]
        mask[place, start - columns :] = 1
        positions[place, start - columns :] = torch.arange(columns + prompt + completion)
        positions[place, start + prompt :] += shift
    device = batch.input_ids.device
    return policy.base_model(
        input_ids=ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device), use_cache=False
    ).last_hidden_state


@contextmanager
def wrong_attention(
    policy: PreTrainedModel, *, scale_error: float = 0.0, probabilities: torch.dtype = torch.float32
) -> Iterator[None]:
    """The policy's configured attention kernel is wrong; 0 and float32 are healthy. Other kernels are right.

    Args:
        policy: of a family that takes its kernel from transformers' interface.
        scale_error: relative error of the factor on the products of queries and keys.
        probabilities: what the softmax is rounded to before it meets the values, e.g. torch.bfloat16.
    """

    def kernel(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3)).float() * scaling * (1 + scale_error)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1).to(probabilities).to(value.dtype)
        return (weights @ value).transpose(1, 2).contiguous(), None

    own = policy.config._attn_implementation
    AttentionInterface.register(PLANTED, kernel)
    AttentionMaskInterface.register(PLANTED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    policy.set_attn_implementation(PLANTED)
    try:
        yield
    finally:
        policy.set_attn_implementation(own)
        del AttentionInterface._global_mapping[PLANTED], AttentionMaskInterface._global_mapping[PLANTED]


def spread_adapters(policy: nn.Module, size: float, seed: int = 0) -> None:
    """Give the adapters of `policy`, which change nothing at first, a B with values of standard deviation `size`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in lora_layers(policy):
            for part in layer.lora_B.values():
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * size)


def merged_weights(policy: nn.Module, factor: float = 1.0, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The weights to put into the engine: with the adapters `factor` times, 0 for the base, 2 for merged twice.

    `dtype`, e.g. torch.bfloat16, rounds those that carry adapters; 1 and None are healthy. The strength is the size of
    the adapters, see `spread_adapters`.
    """
    found = {}
    for weight in weights(policy):
        full = dataclasses.replace(weight, scale=weight.scale * factor).full()
        if weight.adapter is not None and dtype is not None:
            full = full.to(dtype).to(full.dtype)
        found[weight.name] = full.clone()
    return found


@contextmanager
def wrong_router(policy: nn.Module, *, noise: float = 0.0, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """The policy's routers, of a mixture of experts, form other logits; 0 and float32 are healthy.

    Args:
        policy: whose routers' classes have names that end in Router.
        noise: added to the logits: noise times a wild function of the logit, so that it does not depend on the batch.
        dtype: what the logits are rounded to.
    """
    with ExitStack() as hooks:
        for module in policy.modules():
            if type(module).__name__.lower().endswith("router"):
                hook = _WrongProducts(noise, dtype).hook
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


class _WrongProducts(TorchFunctionMode):
    def __init__(self, noise: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.noise, self.dtype = noise, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not nn.functional.linear:
            return result
        return (result + self.noise * torch.sin(100 * result)).to(self.dtype).to(result.dtype)

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        with self:
            return module.forward(*args, **kwargs)
