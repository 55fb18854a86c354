"""A vLLM engine with one fault, planted by a switch, as the audit must find it."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from app.engine.vllm.engine import VLLMEngine
from app.types import Completion, Request, SamplingConfig
from app.weights.names import routers

Plant = Literal[
    "none",
    "raw_logprobs",
    "top_p",
    "top_k",
    "stale_prefix_cache",
    "batch_noise",
    "older_weights",
    "repeated_first_token",
    "cut_prompt",
    "router_noise",
]


class PlantedEngine(VLLMEngine):
    """vLLM with a fault in its code, which its variants have too.

    Args:
        plant: what is wrong.
            raw_logprobs: the log-probabilities reported are of temperature T^(1 - strength), not of the T sampled at.
            top_p, top_k: a filter with the strength as its value that nobody asked for.
            stale_prefix_cache: `generate` and the `decode` after it read prompt blocks that were cached under older
                weights; `load_weights` resets the cache as it should.
            batch_noise: normal noise of so many nats on the logits wherever more than one request is decoded.
            older_weights: `load_weights` takes older tensors for the parameters in `names`.
            repeated_first_token: the prompt's first token (its beginning of sequence) comes so many times more.
            cut_prompt: so many of the prompt's last tokens are lost.
            router_noise: normal noise of so many units on the logits of mixture-of-experts routers.
        strength: see there; older weights differ by normal noise of so many standard deviations of the tensor.
        names: regular expression on Hugging Face names, searched for.
        faulty_syncs: how many calls of `load_weights` are faulty, from the first one on; None: all.
        **kwargs: of VLLMEngine.
    """

    def __init__(
        self,
        plant: Plant = "none",
        strength: float = 1.0,
        names: str = "",
        faulty_syncs: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        own = {"plant": plant, "strength": strength, "names": names, "faulty_syncs": faulty_syncs}
        self.arguments = {**self.arguments, **own}
        self.plant = plant
        self.strength = strength
        self.names = names
        self.faulty_syncs = faulty_syncs
        self._syncs = 0
        self._stale = False

    def start(self, model_path: str, seed: int) -> None:
        """Start vLLM and put the fault into its sampler and its routers, where it waits for its switch."""
        super().start(model_path, seed)
        sampler = self._runner().sampler
        sample = sampler.sample
        sampler.sample = lambda logits, metadata: self._sample(sample, logits, metadata)
        for router in routers(self._model()).values():
            router.register_forward_hook(self._disturb)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Sample, with older weights' blocks in the cache if that is the fault."""
        if self.plant == "stale_prefix_cache":
            self._stale = False
            with self._older_weights():
                self._call(requests, [self._params(request, sampling, max_tokens=1) for request in requests])
            self._stale = True
        return super().generate(requests, sampling)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Load the weights, older ones where that is the fault."""
        self._syncs += 1
        if self.plant == "older_weights" and (self.faulty_syncs is None or self._syncs <= self.faulty_syncs):
            weights = ((name, self._older(name, tensor)) for name, tensor in weights)
        super().load_weights(weights, policy_version)
        self._stale = False

    def _reset_cache(self) -> None:
        if not self._stale:
            super()._reset_cache()

    def _call(self, requests: Sequence[Request], params: list[Any]) -> list[Any]:
        return super()._call(
            [replace(request, token_ids=self._sent(request.token_ids)) for request in requests], params
        )

    def _params(self, request: Request, sampling: SamplingConfig, **changed: Any) -> Any:
        if self.plant == "top_p":
            sampling = replace(sampling, top_p=self.strength)
        elif self.plant == "top_k":
            sampling = replace(sampling, top_k=int(self.strength))
        return super()._params(request, sampling, **changed)

    def _sent(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        if self.plant == "repeated_first_token":
            return prompt[:1] * int(self.strength) + prompt
        if self.plant == "cut_prompt":
            return prompt[: -int(self.strength)] or prompt[:1]
        return prompt

    def _sample(self, sample: Any, logits: Tensor, metadata: Any) -> Any:
        if self.plant == "raw_logprobs":
            temperature = torch.ones(len(logits)) if metadata.temperature is None else metadata.temperature
            reported = (logits / temperature[:, None] ** (1 - self.strength)).log_softmax(-1)
            return sample(logits, metadata)[0], reported  # Computed before: vLLM divides the logits in place.
        if self.plant == "batch_noise" and len(logits) > 1:
            runner = self._runner()
            for row, request_id in enumerate(runner.input_batch.req_ids[: len(logits)]):
                state = runner.requests[request_id]
                # Equal for equal contexts, so that sampling and decoding agree.
                context = [*state.prompt_token_ids, *state.output_token_ids]
                logits[row] += self.strength * _noise(str(context), logits[row])
        return sample(logits, metadata)

    def _disturb(self, _module: Any, _inputs: Any, output: Any) -> Any:
        if self.plant != "router_noise":
            return output
        logits, *rest = output if isinstance(output, tuple) else (output,)
        # A function of the logits themselves, nearly normal: reproducible whatever the batch is.
        waves = torch.stack([torch.cos(logits.float() * factor) for factor in (997.0, 1409.0, 2003.0, 2819.0)]).sum(0)
        disturbed = (logits + self.strength * waves / 2**0.5).to(logits.dtype)
        return (disturbed, *rest) if isinstance(output, tuple) else disturbed

    def _older(self, name: str, tensor: Tensor) -> Tensor:
        if not re.search(self.names, name):
            return tensor
        return tensor + self.strength * tensor.float().std().to(tensor.dtype) * _noise(name, tensor)

    @contextlib.contextmanager
    def _older_weights(self) -> Iterator[None]:
        parameters = dict(self._model().named_parameters())
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self._older(name, kept[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(kept[name])


def _noise(name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).to(like)
