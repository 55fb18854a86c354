"""The splitting of fused layers, on stand-ins that carry the attributes vLLM gives its layers."""

from __future__ import annotations

import torch
from torch import nn

from app.engine.vllm.weights import engine_checksums, engine_weights, opaque_prefixes
from app.weights.checksum import checksum


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


class Linear(nn.Module):
    def __init__(self, out_sizes: list[int], in_size: int, method: object | None = None, bias: bool = False) -> None:
        super().__init__()
        self.output_sizes, self.output_size, self.input_size = out_sizes, sum(out_sizes), in_size
        self.params_dtype = torch.float32
        self.quant_method = method or UnquantizedLinearMethod()
        self.weight = nn.Parameter(torch.randn(sum(out_sizes), in_size))
        if bias:
            self.bias = nn.Parameter(torch.randn(sum(out_sizes)))

    def pack(self) -> None:
        """As vLLM on a CPU: compute with a private copy and empty the parameter."""
        private = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ private.t()
        self.weight = nn.Parameter(torch.empty(0))


class Embedding(nn.Module):
    def __init__(self, rows: int, padded: int, dim: int) -> None:
        super().__init__()
        self.org_vocab_size, self.num_embeddings_padded, self.embedding_dim = rows, padded, dim
        self.params_dtype = torch.float32
        self.weight = nn.Parameter(torch.randn(padded, dim))


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012 (as in vLLM)

    def __init__(self, method: object | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = Embedding(rows=5, padded=8, dim=6)
        self.attn = nn.Module()
        self.attn.qkv_proj = Linear([6, 2, 2], 6, method, bias=True)
        self.attn.o_proj = Linear([6], 6)
        self.norm = nn.LayerNorm(6, bias=False)
        self.lm_head = Embedding(rows=5, padded=8, dim=6)
        self.lm_head.weight = self.embed_tokens.weight


def _by_hand(model: Model) -> dict[str, torch.Tensor]:
    fused, bias = model.attn.qkv_proj.weight.detach().clone(), model.attn.qkv_proj.bias.detach()
    return {
        "embed_tokens.weight": model.embed_tokens.weight[:5].detach(),
        "attn.q_proj.weight": fused[:6],
        "attn.k_proj.weight": fused[6:8],
        "attn.v_proj.weight": fused[8:],
        "attn.q_proj.bias": bias[:6],
        "attn.k_proj.bias": bias[6:8],
        "attn.v_proj.bias": bias[8:],
        "attn.o_proj.weight": model.attn.o_proj.weight.detach().clone(),
        "norm.weight": model.norm.weight.detach(),
        "lm_head.weight": model.embed_tokens.weight[:5].detach(),
    }


def test_fused_layers_are_split_and_padding_is_left_out() -> None:
    model = Model()
    assert engine_checksums(model) == {name: checksum(tensor) for name, tensor in _by_hand(model).items()}


def test_packed_layers_are_recovered_exactly_through_their_product() -> None:
    model = Model()
    expected = {name: checksum(tensor) for name, tensor in _by_hand(model).items()}
    model.attn.qkv_proj.pack()
    model.attn.o_proj.pack()
    assert engine_checksums(model) == expected
    assert [name for weight in engine_weights(model) if weight.packed for name in weight.parts] == [
        "attn.q_proj.weight",
        "attn.k_proj.weight",
        "attn.v_proj.weight",
        "attn.o_proj.weight",
    ]


def test_a_stale_packed_head_is_seen_though_its_parameter_is_fresh() -> None:
    model = Model()
    stale = model.embed_tokens.weight.detach().clone()
    model.lm_head.cpu_linear = lambda x, weight, bias: x @ stale.t()
    with torch.no_grad():
        model.embed_tokens.weight += 1
    sums = engine_checksums(model)
    assert sums["lm_head.weight"] == checksum(stale[:5])
    assert sums["embed_tokens.weight"] == checksum(stale[:5] + 1)


def test_one_module_under_two_names_counts_as_head_and_as_table() -> None:
    model = Model()
    model.lm_head = model.embed_tokens  # Some vLLM models tie this way.
    stale = torch.zeros(8, 6)
    model.embed_tokens.cpu_linear = lambda x, weight, bias: x @ stale.t()
    sums = engine_checksums(model)
    assert sums["lm_head.weight"] == checksum(stale[:5])
    assert sums["embed_tokens.weight"] == checksum(model.embed_tokens.weight[:5])


def test_quantised_layers_are_opaque_under_their_unfused_names() -> None:
    model = Model(method=Fp8LinearMethod())
    assert opaque_prefixes(model) == ("attn.q_proj.", "attn.k_proj.", "attn.v_proj.")
    assert set(engine_checksums(model)) == {
        "embed_tokens.weight",
        "attn.o_proj.weight",
        "norm.weight",
        "lm_head.weight",
    }


def test_a_fused_layer_without_its_sizes_is_opaque() -> None:
    model = Model()
    del model.attn.qkv_proj.output_sizes
    assert opaque_prefixes(model) == ("attn.q_proj.", "attn.k_proj.", "attn.v_proj.")
