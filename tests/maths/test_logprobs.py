from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.maths.logprobs import selected_logprobs

N, H, V = 23, 6, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(H, V, bias=True, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    hidden = torch.randn(N, H, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_a_plain_log_softmax(chunk_size, temperature) -> None:
    hidden, head, ids = inputs()
    logprobs, entropy = selected_logprobs(hidden, head, ids, temperature, chunk_size, with_entropy=True)
    assert entropy is not None
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    gradients = torch.autograd.grad((weights * logprobs).sum(), [hidden, *head.parameters()])

    plain = (head(hidden) / temperature).log_softmax(-1)
    expected = plain[torch.arange(N), ids]
    expected_gradients = torch.autograd.grad((weights * expected).sum(), [hidden, *head.parameters()])
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)


def test_entropy_carries_no_gradient_and_is_optional() -> None:
    hidden, head, ids = inputs()
    _, entropy = selected_logprobs(hidden, head, ids, 1.0, with_entropy=True)
    assert entropy is not None
    assert not entropy.requires_grad
    assert selected_logprobs(hidden, head, ids, 1.0)[1] is None


def test_entropy_of_an_impossible_token_is_not_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropy = selected_logprobs(torch.zeros(1, 1), lambda _: logits, torch.tensor([0]), 1.0, 4, True)
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.6931472)
    assert logprobs.item() == pytest.approx(-0.6931472)


@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_dtype_of_the_result(given, returned) -> None:
    hidden, head, ids = inputs(given)
    logprobs, entropy = selected_logprobs(hidden, head, ids, 0.9, 8, with_entropy=True)
    assert entropy is not None
    assert logprobs.dtype == entropy.dtype == returned


@pytest.mark.parametrize("grad", [True, False])
def test_no_rows(grad) -> None:
    hidden, head, ids = inputs()
    with torch.set_grad_enabled(grad):
        logprobs, entropy = selected_logprobs(hidden[:0], head, ids[:0], 1.0, with_entropy=True)
    assert entropy is not None
    assert logprobs.shape == entropy.shape == (0,)
    if grad:  # ZeRO-3: this rank takes part in the head's collectives like the others
        logprobs.sum().backward()
        assert head.weight.grad is not None
        assert (head.weight.grad == 0).all()


def test_the_head_is_called_as_often_as_asked_in_forward_and_backward() -> None:
    hidden, head, ids = inputs()
    calls: list[int] = []
    head.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    logprobs, _ = selected_logprobs(hidden, head, ids, 1.0, chunk_size=10, min_chunks=5)
    assert calls == [10, 10, 3, 0, 0]
    logprobs.sum().backward()
    assert sorted(calls) == sorted([10, 10, 3, 0, 0] * 2)
    assert logprobs.shape == (N,)


class LiveRows(TorchDispatchMode):
    """Rows of float storages shaped [n, V] that are alive at one time, and the most there ever were."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight.untyped_storage().data_ptr()  # its transpose is [H, V], but no logits
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.shape[1:] == (V,):
                self.watch(tensor)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in (self.weight, *self.alive):
            self.alive[storage.data_ptr()] = tensor.shape[0]
            weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)


def peak_rows(score, backward: bool) -> int:
    hidden, head, ids = inputs()
    head.requires_grad_(False)
    with LiveRows(head.weight) as rows, torch.set_grad_enabled(backward):
        logprobs = score(hidden, head, ids)
        if backward:
            logprobs.sum().backward()
    return rows.peak


def test_logits_of_one_chunk_at_most_are_alive() -> None:
    """An operation's input and output in forward; with the gradient three tensors in backward. Each a chunk's rows."""

    def plain(hidden, head, ids):
        return (head(hidden) / 0.7).log_softmax(-1)[torch.arange(N), ids]

    def chunked(hidden, head, ids):
        return selected_logprobs(hidden, head, ids, 0.7, chunk_size=2, with_entropy=True)[0]

    assert peak_rows(plain, backward=False) >= 2 * N
    assert peak_rows(chunked, backward=False) <= 2 * 2
    assert peak_rows(chunked, backward=True) <= 3 * 2


def test_nothing_of_the_size_of_the_logits_is_saved_for_backward() -> None:
    hidden, head, ids = inputs()
    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_logprobs(hidden, head, ids, 0.7, chunk_size=5)
        assert not [shape for shape in saved if shape[-1:] == (V,)]
        (head(hidden) / 0.7).log_softmax(-1)
        assert [shape for shape in saved if shape == (N, V)], "the hook sees what the plain form saves"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, r"hidden \(23, 6\) .* token_ids \(3,\)"),
    ],
)
def test_bad_input_is_named(changes, message) -> None:
    hidden, head, ids = inputs()
    arguments = {"hidden": hidden, "lm_head": head, "token_ids": ids, "temperature": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        selected_logprobs(**arguments)
