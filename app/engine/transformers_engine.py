"""Sampling with transformers: slow, but the same code as the trained model, so there is no mismatch to correct."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from app.data.end_tokens import eos_token_ids
from app.engine.errors import EngineError
from app.engine.forced_decoding import ForcedRow, forced_rows
from app.engine.protocol import Engine, check_requests, constructor_arguments
from app.engine.router_logits import Place, RouterLogits
from app.engine.weight_layout import WeightLayout, checked
from app.maths.sampling import sampled_distribution
from app.types import Completion, Decoding, Request, SamplingConfig
from app.weights.checksum import checksum, with_tied
from app.weights.gather import full_shapes
from app.weights.names import routers


class TransformersEngine(Engine):
    """Samples with a second copy of the model in transformers: the on-policy baseline.

    Args:
        dtype: precision of the model: "float32", "bfloat16" or "float16".
        device: device of the model, e.g. "cpu" or "cuda:0"; "auto": the current GPU if there is one.
        max_model_len: longest prompt and completion together, in tokens; None: the model's own limit.
        batch_size: number of rows sampled at once.
        attn_implementation: "sdpa" or "eager".
    """

    def __init__(
        self,
        dtype: str = "float32",
        device: str = "auto",
        max_model_len: int | None = None,
        batch_size: int = 64,
        attn_implementation: str = "sdpa",
    ) -> None:
        self.arguments = constructor_arguments(locals())
        self.dtype = dtype
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.max_model_len = max_model_len
        self.batch_size = batch_size
        self.attn_implementation = attn_implementation
        self._model: Any = None
        self._incomplete = False

    def start(self, model_path: str, seed: int) -> None:
        """Load the model; `seed` is not used, since every request has its own.

        Raises:
            EngineError: if the model cannot be loaded.
        """
        from transformers import AutoModelForCausalLM

        try:
            self._eos = eos_token_ids(model_path)
            model: Any = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=getattr(torch, self.dtype), attn_implementation=self.attn_implementation
            )
        except Exception as error:
            raise EngineError(f"transformers could not load {model_path}: {error}") from error
        self._model = model.to(self.device).eval().requires_grad_(False)
        self._origin = (model_path, seed)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        """Sample one completion per request; see `Engine.generate`.

        Every request draws from its own generator, so its completion does not depend on the rest of the batch (up to
        rounding in the model's matrix products).

        Raises:
            ValueError: naming the request, if its prompt is empty, too long or holds an unknown id; or if `sampling`
                has a penalty, which this engine does not apply.
            EngineError: if not started, if weights are half-written, or if a log-probability is NaN.
        """
        limit = self._check_ready(sampling)
        check_requests(requests, limit, self._model.config.vocab_size)
        chunks = [requests[start : start + self.batch_size] for start in range(0, len(requests), self.batch_size)]
        return [completion for chunk in chunks for completion in self._generate_batch(chunk, sampling, limit)]

    def decode(
        self,
        requests: Sequence[Request],
        completions: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        top_k: int = 5,
        batch_size: int | None = None,
        read_prefix_cache: bool = True,
        router_logits: bool = False,
    ) -> list[Decoding]:
        """Decode forced tokens; see `Engine.decode`. Without a prefix cache `read_prefix_cache` has no effect."""
        limit = self._check_ready(sampling)
        rows = forced_rows(requests, completions, limit, self._model.config.vocab_size)
        size = min(batch_size or self.batch_size, self.batch_size)
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [done for chunk in chunks for done in self._decode_batch(chunk, sampling, top_k, router_logits)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Copy the full set of weights in place; see `Engine.load_weights`.

        Raises:
            EngineError: if a weight is missing, unexpected or of the wrong shape.
        """
        parameters = dict(self._started().named_parameters())
        self._incomplete = True
        with torch.no_grad():
            for name, tensor in checked(self.weight_layout(), weights):
                parameters[name].copy_(tensor)
        self._incomplete = False
        self.policy_version = policy_version

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every parameter, tied ones under each of their names."""
        model = self._started()
        return with_tied({name: checksum(parameter) for name, parameter in model.named_parameters()}, model)

    def weight_layout(self) -> WeightLayout:
        """Return the names, shapes and dtypes of the weights that `load_weights` needs."""
        model = self._started()
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        return WeightLayout(shapes=full_shapes(model), dtypes=dtypes)

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _started(self) -> Any:
        if self._model is None:
            raise EngineError("the engine is not running: call start first")
        return self._model

    def _check_ready(self, sampling: SamplingConfig) -> int:
        """Return the longest prompt and completion together, in tokens, after checking that the engine can sample."""
        model = self._started()
        if self._incomplete:
            raise EngineError("the last load_weights failed part-way: send the full set of weights before sampling")
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            raise ValueError("the transformers engine applies no penalties: leave them at 1, 0 and 0, or use vLLM")
        return self.max_model_len or model.config.max_position_embeddings

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[Request], sampling: SamplingConfig, limit: int) -> list[Completion]:
        generators = [torch.Generator(self.device).manual_seed(request.seed % 2**63) for request in requests]
        room = [min(sampling.max_tokens, limit - len(request.token_ids)) for request in requests]
        rows: list[list[tuple[int, float]]] = [[] for _ in requests]
        active = list(range(len(requests)))
        steps = self._steps(requests, sampling)
        logprobs = next(steps)
        while active:
            tokens = torch.zeros(len(requests), dtype=torch.int64)
            for row in active:
                token = _draw(logprobs[row], generators[row], sampling.temperature)
                tokens[row] = token
                rows[row].append((token, float(logprobs[row, token])))
            active = [row for row in active if rows[row][-1][0] not in self._eos and len(rows[row]) < room[row]]
            if active:
                logprobs = steps.send(tokens)
        return [self._completion(index, row) for index, row in enumerate(rows)]

    @torch.no_grad()
    def _decode_batch(
        self, rows: Sequence[ForcedRow], sampling: SamplingConfig, top_k: int, router_logits: bool
    ) -> list[Decoding]:
        length = max(len(forced.token_ids) for forced in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        for index, forced in enumerate(rows):
            tokens[index, : len(forced.token_ids)] = torch.tensor(forced.token_ids)
        modules = routers(self._model) if router_logits else {}
        where = _prompt_places(rows)
        with RouterLogits(modules, rows, lambda: where) as recorded:
            steps = self._steps([forced.request for forced in rows], sampling)
            logprobs = [next(steps)]
            for position in range(length - 1):
                where = [
                    Place(forced.row, len(forced.request.token_ids) + position, slice(index, index + 1))
                    for index, forced in enumerate(rows)
                ]
                logprobs.append(steps.send(tokens[:, position]))
        at = torch.stack(logprobs, dim=1).cpu()  # [B, T, V]
        values = at.gather(-1, tokens[:, :, None])[:, :, 0].tolist()
        top = at.topk(top_k)
        decodings = []
        for index, forced in enumerate(rows):
            count = len(forced.token_ids)
            _check_finite(forced.row, values[index][:count])
            decodings.append(
                Decoding(
                    prompt_ids=forced.request.token_ids,
                    logprobs=tuple(values[index][:count]),
                    top_ids=tuple(map(tuple, top.indices[index, :count].tolist())),
                    top_logprobs=tuple(map(tuple, top.values[index, :count].tolist())),
                    router_logits=recorded.of(forced.row),
                )
            )
        return decodings

    def _steps(self, requests: Sequence[Request], sampling: SamplingConfig) -> Generator[Tensor, Tensor, None]:
        """Yield the [B, V] log-probabilities of each position in turn; `send` the [B] tokens at that position."""
        input_ids, mask = self._left_padded(requests)
        cache = None
        while True:
            # Position ids count real tokens only: left padding must not shift a prompt's positions.
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            output = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            tokens = yield sampled_distribution(output.logits[:, -1], sampling)
            input_ids = tokens[:, None].to(self.device)
            mask = torch.cat((mask, mask.new_ones(len(requests), 1)), dim=1)

    def _left_padded(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        width = max(len(request.token_ids) for request in requests)
        input_ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            input_ids[row, width - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, width - len(request.token_ids) :] = 1
        return input_ids.to(self.device), mask.to(self.device)

    def _completion(self, index: int, row: list[tuple[int, float]]) -> Completion:
        tokens, logprobs = zip(*row, strict=True)
        _check_finite(index, logprobs)
        return Completion(
            token_ids=tokens, logprobs=logprobs, finish_reason="stop" if tokens[-1] in self._eos else "length"
        )


def _prompt_places(rows: Sequence[ForcedRow]) -> list[Place]:
    """Return the places of left-padded prompts in the first forward pass."""
    width = max(len(forced.request.token_ids) for forced in rows)
    ends = range(width, width * len(rows) + 1, width)
    return [
        Place(forced.row, 0, slice(end - len(forced.request.token_ids), end))
        for forced, end in zip(rows, ends, strict=True)
    ]


def _check_finite(index: int, logprobs: Iterable[float]) -> None:
    if any(value != value for value in logprobs):
        raise EngineError(f"batch row {index}: log-probabilities are NaN: the engine's weights are not finite")


def _draw(logprobs: Tensor, generator: torch.Generator, temperature: float) -> int:
    if temperature == 0:
        return int(logprobs.argmax())
    # argmax of log p - log E with E exponential is a draw from p (the Gumbel-max trick).
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    return int((logprobs - noise.log()).argmax())
