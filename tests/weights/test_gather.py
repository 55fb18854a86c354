from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from app.weights.gather import full_shapes, named_full_parameters, tied_names


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


def test_partitioned_parameters_are_gathered_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
    full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        parameter.ds_id, parameter.ds_shape, parameter.full = number, full[name].shape, full[name]
        parameter.data = torch.empty(0)
    gathered: list[nn.Parameter] = []

    class GatheredParameters:
        def __init__(self, parameters: list[nn.Parameter], modifier_rank: int | None) -> None:
            assert modifier_rank is None
            (self.parameter,) = parameters

        def __enter__(self) -> None:
            gathered.append(self.parameter)
            self.parameter.data = self.parameter.full

        def __exit__(self, *_: object) -> None:
            gathered.remove(self.parameter)
            self.parameter.data = torch.empty(0)

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    assert full_shapes(model) == {name: tensor.shape for name, tensor in full.items()}
    for name, tensor in named_full_parameters(model):
        assert len(gathered) == 1
        assert torch.equal(tensor, full[name])
    assert gathered == []
