from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from app.weights import lora
from app.weights.checksum import checksum
from app.weights.gather import full_shapes, named_full_parameters, tied_names
from app.weights.lora import weights


def adapted(model: nn.Module, r: int = 2, **settings: object) -> nn.Module:
    """`model` with random float32 adapters of scale 1.5 in every linear layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(**{"r": r, "lora_alpha": 1.5 * r, "target_modules": names, **settings})
    inject_adapter_in_model(config, model)
    for _, layer in lora.lora_layers(model):
        layer.lora_A.float()
        layer.lora_B.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 24), nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 33, bias=False))
    return model.to(dtype)


def by_hand(model: nn.Module, name: str, scale: float) -> Tensor:
    """W + scale B A, element by element, in float64."""
    layer = model.get_submodule(name)
    w, a, b = (
        p.detach().double() for p in (layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight)
    )
    merged = w.clone()
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            merged[i, j] += scale * sum(b[i, k] * a[k, j] for k in range(a.shape[0]))
    return merged


@pytest.mark.parametrize("tile_bytes", [1, 1000, 1 << 22], ids=["row by row", "uneven tiles", "at once"])
def test_merged_weights_are_base_plus_scaled_product(monkeypatch: pytest.MonkeyPatch, tile_bytes: int) -> None:
    monkeypatch.setattr(lora, "TILE_BYTES", tile_bytes)
    model = adapted(net(), r=3)
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(model)}
    for name in ("1", "3"):
        torch.testing.assert_close(sent[f"{name}.weight"].double(), by_hand(model, name, 1.5), rtol=1e-6, atol=1e-6)


def test_rank_stabilised_scale() -> None:
    """lora_alpha / √r (arXiv:2312.03732)."""
    model = adapted(net(), r=4, lora_alpha=6, use_rslora=True)
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(model)}
    torch.testing.assert_close(sent["1.weight"].double(), by_hand(model, "1", 6 / 2), rtol=1e-6, atol=1e-6)


def test_names_shapes_and_all_other_weights_are_those_of_the_model_without_adapters() -> None:
    plain, model = net(), adapted(net())
    assert full_shapes(model) == full_shapes(plain)
    assert tied_names(model) == {}
    other = dict(plain.named_parameters())
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(model)}
    assert list(sent) == list(other)
    for name in ("0.weight", "1.bias", "2.weight", "2.bias"):
        assert torch.equal(sent[name], other[name])
    assert not torch.equal(sent["1.weight"], other["1.weight"])


def test_the_sum_is_rounded_once_to_the_engines_dtype() -> None:
    """Bfloat16 base, float32 adapters: first rounding B A or the sum of rounded parts gives other bits."""
    model = adapted(net(torch.bfloat16))
    exact = by_hand(model, "1", 1.5)
    for wanted in (torch.bfloat16, torch.float16, torch.float32):
        sent = {name: tensor.clone() for name, tensor in named_full_parameters(model, {"1.weight": wanted})}
        assert sent["1.weight"].dtype == wanted
        step = torch.finfo(wanted).eps / 2 if wanted != torch.float32 else 1e-6
        assert ((sent["1.weight"].double() - exact).abs() <= step * exact.abs() * 1.001 + 1e-7).all()
    assert {name: tensor.dtype for name, tensor in named_full_parameters(model)}["1.weight"] == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        sent = {name: tensor.clone() for name, tensor in named_full_parameters(model, {"1.weight": torch.float32})}
    torch.testing.assert_close(sent["1.weight"].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_thousand_syncs_leave_base_and_adapters_bit_identical() -> None:
    model = adapted(net(torch.bfloat16))
    before = [checksum(parameter) for parameter in model.parameters()]
    sums = set()
    for _ in range(1000):
        sums.add(tuple(checksum(tensor) for _, tensor in named_full_parameters(model)))
    assert [checksum(parameter) for parameter in model.parameters()] == before
    assert len(sums) == 1
    layer = model.get_submodule("1")
    layer.merge()  # what must not be done: rounding does not let it be taken out again
    layer.unmerge()
    assert [checksum(parameter) for parameter in model.parameters()] != before


def test_an_adapter_merged_in_place_is_refused() -> None:
    model = adapted(net())
    model.get_submodule("3").merge()
    with pytest.raises(ValueError, match="3: its adapter was merged into the weight in place"):
        weights(model)
