"""The weights that a vLLM model computes with, split into Hugging Face names.

Nothing here imports vLLM: layers are recognised by the attributes that they have in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.engine.errors import EngineError
from app.engine.weight_layout import WeightLayout, checked
from app.weights.checksum import checksum

PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Names of the `layer.quant_method` classes that compute with the weight as it was loaded."""
PROBE_ROWS = 256
"""Identity rows multiplied at a time when a packed weight is recovered."""


@dataclass(frozen=True, kw_only=True)
class EngineWeight:
    """One tensor of a vLLM model, and the Hugging Face weights stacked in its rows."""

    as_used: Callable[[], Tensor]
    """Returns the tensor that the engine computes with, [rows, ...]."""
    parts: dict[str, slice]
    """Rows of each weight by Hugging Face name; rows that pad a vocabulary belong to none."""
    shape: torch.Size
    """Shape of the whole tensor, [rows, ...]."""
    dtype: torch.dtype
    """Dtype of the parameter in the engine."""
    tied: bool
    """Whether the same parameter was yielded before under another name."""
    packed: bool
    """Whether vLLM computes with a packed copy of the parameter, which loading in place does not change."""


def engine_weights(model: nn.Module) -> Iterator[EngineWeight]:
    """Yield the weights of a vLLM model, fused layers split; opaque layers are left out.

    Fused layers are named by the model's `packed_modules_mapping` and split at the layer's `output_sizes`. Where vLLM
    packed a linear layer for the CPU, the weight comes from the layer's own matrix product: generation uses the packed
    copy, and the parameter may be older.
    """
    seen: set[int] = set()
    opaque = opaque_prefixes(model)
    for prefix, layer in model.named_modules(remove_duplicate=False):
        names = _hf_names(model, prefix)
        if f"{prefix}.".startswith(opaque) or _is_opaque(layer, names):
            continue
        for leaf, parameter in layer.named_parameters(recurse=False):
            packed = leaf == "weight" and _is_packed(layer, prefix)
            yield EngineWeight(
                as_used=partial(recover_weight, layer) if packed else parameter.detach,
                parts=_parts(layer, [f"{name}.{leaf}" for name in names]),
                shape=_full_shape(layer) if packed else parameter.shape,
                dtype=parameter.dtype,
                tied=id(parameter) in seen,
                packed=packed,
            )
            seen.add(id(parameter))


def opaque_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the Hugging Face name prefixes of layers that store their weights in a form unknown here."""
    layers = ((_hf_names(model, prefix), layer) for prefix, layer in model.named_modules())
    opaque = [name for names, layer in layers if _is_opaque(layer, names) for name in names]
    # vLLM nests its fused experts deeper than Hugging Face does: everything below "experts" belongs to them.
    return tuple(f"{before}{experts}." for before, experts, _ in (name.partition(".experts") for name in opaque))


def engine_checksums(model: nn.Module) -> dict[str, int]:
    """Return the checksum of every weight that is not opaque, copying at most one layer's weight at a time."""
    sums: dict[str, int] = {}
    for weight in engine_weights(model):
        tensor = weight.as_used()
        sums |= {name: checksum(tensor[rows]) for name, rows in weight.parts.items()}
    return sums


def engine_weight_layout(model: nn.Module, lossy: bool) -> WeightLayout:
    """Return the weights that the engine must be sent; `lossy` is passed on."""
    shapes: dict[str, torch.Size] = {}
    dtypes: dict[str, torch.dtype] = {}
    for weight in engine_weights(model):
        for name, rows in {} if weight.tied else weight.parts.items():
            shapes[name] = torch.Size((len(range(*rows.indices(weight.shape[0]))), *weight.shape[1:]))
            dtypes[name] = weight.dtype
    return WeightLayout(shapes=shapes, dtypes=dtypes, opaque=opaque_prefixes(model), lossy=lossy)


def write_weights(model: Any, weights: Iterable[tuple[str, Tensor]], layout: WeightLayout) -> None:
    """Write the full set of weights into a vLLM model in place, each checked against `layout` first.

    Raises:
        EngineError: if a weight is missing, unexpected or of the wrong shape, or if vLLM fails.
    """
    try:
        with torch.no_grad():
            # vLLM's loaders do not notice a missing weight, and some ignore an unknown one.
            model.load_weights(checked(layout, weights))
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM failed to load the weights: {error}") from error
    _repack_experts(model)


def _repack_experts(model: nn.Module) -> None:
    """Renew the packed copy of fused experts that vLLM computes with on a CPU; it is made at the first load only."""
    if torch.cuda.is_available():
        return
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def recover_weight(layer: Any) -> Tensor:
    """Return the [out, in] weight of a packed linear layer, exact to the bit.

    A row of the identity yields w·1 plus zeros, so each product is one column of the weight, without rounding. A
    weight that is NaN or infinite becomes NaN along its whole row (0·inf), so it changes the checksum.
    """
    weight = torch.empty(_full_shape(layer), dtype=layer.params_dtype)
    columns = weight.shape[1]
    for start in range(0, columns, PROBE_ROWS):
        probe = torch.zeros(min(PROBE_ROWS, columns - start), columns, dtype=layer.params_dtype)
        probe[:, start:].fill_diagonal_(1)
        weight[:, start : start + len(probe)] = layer.cpu_linear(probe, layer.weight, None).t()
    return weight


def _hf_names(model: nn.Module, prefix: str) -> list[str]:
    """Return the Hugging Face names of the layers that vLLM fused into the one at `prefix`, or just `prefix`."""
    stem, _, last = prefix.rpartition(".")
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return [f"{stem}.{name}" for name in fused.get(last, [])] or [prefix]


def _is_opaque(layer: nn.Module, names: list[str]) -> bool:
    if next(layer.parameters(recurse=False), None) is None:
        return False
    method = getattr(layer, "quant_method", None)
    fits = len(names) == 1 or len(names) == len(getattr(layer, "output_sizes", ()))
    return not fits or (method is not None and type(method).__name__ not in PLAIN_METHODS)


def _is_packed(layer: nn.Module, prefix: str) -> bool:
    # An embedding looks its rows up in the parameter; only as a head does it go through the matrix product.
    looks_up = hasattr(layer, "embedding_dim") and prefix.rpartition(".")[2] != "lm_head"
    return getattr(layer, "cpu_linear", nn.functional.linear) is not nn.functional.linear and not looks_up


def _full_shape(layer: Any) -> torch.Size:
    if hasattr(layer, "embedding_dim"):
        return torch.Size((layer.num_embeddings_padded, layer.embedding_dim))
    return torch.Size((layer.output_size, layer.input_size))


def _parts(layer: nn.Module, names: list[str]) -> dict[str, slice]:
    if len(names) == 1:
        return {names[0]: slice(getattr(layer, "org_vocab_size", None))}
    ends = list(accumulate(cast(list[int], layer.output_sizes)))
    return {name: slice(start, end) for name, start, end in zip(names, [0, *ends], ends, strict=False)}
