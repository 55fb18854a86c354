from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from app.weights.gather import full_shapes, named_full_parameters, tied_names
from tests.weights.test_lora import adapted


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.Parameter(torch.ones(3), requires_grad=False)
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed.weight


def test_every_parameter_once_tied_ones_too() -> None:
    model = Tied()
    names = [name for name, _ in named_full_parameters(model)]
    assert sorted(names) == ["embed.weight", "norm"]
    assert full_shapes(model) == {"embed.weight": torch.Size([5, 3]), "norm": torch.Size([3])}
    assert tied_names(model) == {"lm_head.weight": "embed.weight"}


def test_wrapped_models_give_the_same_names() -> None:
    compiled = torch.compile(Tied())
    assert {name for name, _ in named_full_parameters(compiled)} == {"embed.weight", "norm"}
    assert tied_names(compiled) == {"lm_head.weight": "embed.weight"}


def test_a_tensor_is_empty_once_the_next_one_is_asked_for() -> None:
    """Whoever keeps it would keep a partitioned weight's memory alive; the parameter itself is untouched."""
    model = Tied()
    kept = list(named_full_parameters(model))
    assert [tensor.numel() for _, tensor in kept] == [0, 0]
    assert [parameter.numel() for parameter in model.parameters()] == [3, 15]


class Partitioned:
    """Makes the parameters of a model look like ZeRO-3's and records which are gathered together."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[list[str]] = []
        self.gathered: set[str] = set()
        self.full: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}
        for number, (name, parameter) in enumerate(model.named_parameters()):
            self.full[name] = parameter.detach().clone()
            parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
            parameter.data = torch.empty(0)
            names[number] = name
        outer = self

        class GatheredParameters:
            def __init__(self, parameters: list[nn.Parameter], modifier_rank: int | None) -> None:
                assert modifier_rank is None
                self.parameters = parameters

            def __enter__(self) -> None:
                assert not outer.gathered
                outer.gathered |= {names[parameter.ds_id] for parameter in self.parameters}
                outer.groups.append([names[parameter.ds_id] for parameter in self.parameters])
                for parameter in self.parameters:
                    parameter.data = outer.full[names[parameter.ds_id]].clone()

            def __exit__(self, *_: object) -> None:
                outer.gathered.clear()
                for parameter in self.parameters:
                    assert torch.equal(parameter, outer.full[names[parameter.ds_id]]), "written to"
                    parameter.data = torch.empty(0)

        deepspeed = ModuleType("deepspeed")
        deepspeed.zero = SimpleNamespace(GatheredParameters=GatheredParameters)
        monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)


def layers(*widths: int) -> nn.Sequential:
    """Square linear layers without bias: 4 * width ** 2 bytes each."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))


@pytest.mark.parametrize(
    ("group_bytes", "groups"),
    [
        (1, [[0], [1], [2], [3], [4], [5]]),
        (31, [[0], [1], [2], [3], [4], [5]]),
        (32, [[0], [1], [2, 3], [4], [5]]),  # 16 + 16 bytes, then a larger one alone
        (80, [[0], [1, 2], [3, 4], [5]]),  # 64 + 16, 16 + 64
        (1 << 30, [[0], [1, 2, 3], [4], [5]]),  # never more than the largest weight's 100
    ],
)
def test_partitioned_parameters_are_gathered_in_bounded_groups(
    monkeypatch: pytest.MonkeyPatch, group_bytes: int, groups: list[list[int]]
) -> None:
    model = layers(5, 4, 2, 2, 4, 5)
    record = Partitioned(model, monkeypatch)
    assert full_shapes(model) == {name: tensor.shape for name, tensor in record.full.items()}
    for name, tensor in named_full_parameters(model, group_bytes=group_bytes):
        assert name in record.gathered
        assert torch.equal(tensor, record.full[name])
    assert record.groups == [[f"{i}.weight" for i in group] for group in groups]
    assert not record.gathered


def test_base_and_adapter_are_gathered_together_and_count_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 x 4 floats and an adapter of 2 x 4 twice: 128 bytes a layer."""
    model = adapted(layers(4, 4, 4), r=2)
    record = Partitioned(model, monkeypatch)
    names = [name for name, _ in named_full_parameters(model, group_bytes=255)]
    assert names == ["0.weight", "1.weight", "2.weight"]
    parts = ["base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"]
    assert record.groups == [[f"{i}.{part}" for part in parts] for i in range(3)]
    merged = {name: tensor.clone() for name, tensor in named_full_parameters(model)}
    for i in range(3):
        base, a, b = (record.full[f"{i}.{part}"].double() for part in parts)
        torch.testing.assert_close(merged[f"{i}.weight"].double(), base + 1.5 * b @ a, rtol=1e-6, atol=1e-6)
