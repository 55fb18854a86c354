from __future__ import annotations

import pytest
import torch

from app.engine.errors import EngineError
from app.engine.weight_layout import WeightLayout, check_shapes, checked
from app.sync.verify import SyncError, compare
from app.weights.names import hf_name


def test_compare_names_what_differs_lacks_and_is_extra() -> None:
    compare({"a": 1, "b": 2}, {"b": 2, "a": 1})
    with pytest.raises(SyncError, match=r"different bits in 1 of 3 parameters: b; the engine lacks .*: c; only .*: d"):
        compare({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": 4})


def test_compare_shortens_a_long_list() -> None:
    with pytest.raises(SyncError, match=r"different bits in 20 of 20 parameters: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"):
        compare({str(i): i for i in range(20)}, {str(i): -1 for i in range(20)})


@pytest.mark.parametrize(
    "wrapped",
    [
        "model.layers.0.mlp.up_proj.weight",
        "module.model.layers.0.mlp.up_proj.weight",
        "_forward_module.module.model.layers.0.mlp.up_proj.weight",
        "_orig_mod.model.layers.0.mlp.up_proj.weight",
        "model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "module._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.base_layer.weight",
        "module.base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
    ],
)
def test_wrappers_are_stripped(wrapped: str) -> None:
    assert hf_name(wrapped) == "model.layers.0.mlp.up_proj.weight"


LAYOUT = WeightLayout(
    shapes={"a": torch.Size([2, 3]), "b": torch.Size([4])},
    dtypes={"a": torch.float32, "b": torch.float32},
    opaque=("experts.",),
)


def test_check_shapes_accepts_the_full_set_and_opaque_names() -> None:
    check_shapes(LAYOUT, {"b": torch.Size([4]), "a": torch.Size([2, 3]), "experts.0.up": torch.Size([9])})


def test_check_shapes_names_every_fault() -> None:
    with pytest.raises(EngineError, match=r"missing a, b of shape \[5\], the engine has \[4\], unexpected c"):
        check_shapes(LAYOUT, {"b": torch.Size([5]), "c": torch.Size([1])})


def test_checked_stops_before_the_faulty_tensor_is_passed_on() -> None:
    weights = checked(LAYOUT, [("a", torch.zeros(2, 3)), ("c", torch.zeros(1)), ("b", torch.zeros(4))])
    assert next(weights)[0] == "a"
    with pytest.raises(EngineError, match="unexpected c"):
        next(weights)


def test_checked_misses_what_was_not_sent_and_sees_what_came_twice() -> None:
    with pytest.raises(EngineError, match="missing b"):
        list(checked(LAYOUT, [("a", torch.zeros(2, 3))]))
    with pytest.raises(EngineError, match="a twice"):
        list(checked(LAYOUT, [("a", torch.zeros(2, 3))] * 2))
