"""Surrogates against loops over plain floats, and against each other."""

from __future__ import annotations

import math

import pytest
import torch

from app.maths.losses import Surrogate, cispo, gspo, gspo_token, ppo_clip, reinforce, sapo

NEW = torch.tensor([[-1.0, -2.0, -0.5, 9.0], [-0.7, -1.1, 9.0, 9.0], [-0.4, -1.0, -3.0, -2.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.3, -1.5, -0.5, 9.0], [-0.2, -1.6, 9.0, 9.0], [-0.4, -2.5, -1.0, -2.1]], dtype=torch.float64)
MASK = NEW < 9
ADVANTAGES = torch.tensor([1.5, -0.5, -2.0], dtype=torch.float64)
VALID = MASK.nonzero().tolist()
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
SURROGATES = {
    "ppo_clip": lambda new, old, mask, adv: ppo_clip(new, old, mask, adv, **CLIP),
    "gspo": lambda new, old, mask, adv: gspo(new, old, mask, adv, **CLIP),
    "gspo_token": lambda new, old, mask, adv: gspo_token(new, old, mask, adv, **CLIP),
    "cispo": lambda new, old, mask, adv: cispo(new, old, mask, adv, **CLIP),
    "sapo": lambda new, old, mask, adv: sapo(new, old, mask, adv, temperature_pos=1.0, temperature_neg=1.05),
    "reinforce": lambda new, old, mask, adv: reinforce(new, mask, adv),
}


def ratio(row: int, token: int) -> float:
    return math.exp(NEW[row, token].item() - OLD[row, token].item())


def assert_losses(surrogate: Surrogate, expected) -> None:
    """`expected(row, token)` at valid tokens, exactly 0 elsewhere."""
    values = torch.zeros_like(NEW)
    for row, token in VALID:
        values[row, token] = expected(row, token)
    torch.testing.assert_close(surrogate.loss, values, rtol=1e-12, atol=0)


def gradient(name: str, new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    new = new.clone().requires_grad_()
    (result,) = torch.autograd.grad(SURROGATES[name](new, old, mask, ADVANTAGES).loss.sum(), new)
    return result


def test_ppo_clip() -> None:
    def expected(row: int, token: int) -> float:
        r, a = ratio(row, token), ADVANTAGES[row].item()
        return -min(r * a, min(max(r, 0.8), 1.28) * a)

    surrogate = ppo_clip(NEW, OLD, MASK, ADVANTAGES, **CLIP)
    assert_losses(surrogate, expected)
    # ratios: 1.35, 0.61, 1 | 0.61, 1.65 | 1, 4.48, 0.14, 1.11; only the pessimistic side is clipped
    assert surrogate.clipped_high.nonzero().tolist() == [[0, 0]]
    assert surrogate.clipped_low.nonzero().tolist() == [[1, 0], [2, 2]]


def test_ppo_clip_takes_the_gradient_of_exactly_the_clipped_tokens() -> None:
    zero = gradient("ppo_clip", NEW, OLD) == 0
    assert zero.nonzero().tolist() == sorted([[0, 0], [1, 0], [2, 2], *(~MASK).nonzero().tolist()])


def test_delta_is_dual_clip() -> None:
    """Ye et al. write it as min(max(-r A, -clip(r) A), -c A) for A < 0."""

    def expected(row: int, token: int) -> float:
        r, a = ratio(row, token), ADVANTAGES[row].item()
        loss = max(-r * a, -min(max(r, 0.8), 1.28) * a)
        return min(loss, -3.0 * a) if a < 0 else loss

    assert_losses(ppo_clip(NEW, OLD, MASK, ADVANTAGES, **CLIP, delta=3.0), expected)
    assert ratio(2, 1) > 3.0, "otherwise delta is not tested"


def row_ratio(row: int) -> float:
    tokens = [token for other, token in VALID if other == row]
    return math.exp(sum(NEW[row, t].item() - OLD[row, t].item() for t in tokens) / len(tokens))


@pytest.mark.parametrize("surrogate", [gspo, gspo_token])
def test_gspo(surrogate) -> None:
    clip = {"epsilon_low": 0.02, "epsilon_high": 0.03}

    def expected(row: int, token: int) -> float:
        s, a = row_ratio(row), ADVANTAGES[row].item()
        return -min(s * a, min(max(s, 0.98), 1.03) * a)

    result = surrogate(NEW, OLD, MASK, ADVANTAGES, **clip)
    assert_losses(result, expected)
    # s: 0.936 with A > 0, 1 and 0.905 with A < 0: only the last is clipped on its pessimistic side
    assert result.clipped_low.any(dim=1).tolist() == [False, False, True]
    assert not result.clipped_high.any()


def test_gspo_and_gspo_token_have_one_gradient_for_row_advantages() -> None:
    torch.testing.assert_close(gradient("gspo", NEW, OLD), gradient("gspo_token", NEW, OLD), rtol=1e-12, atol=1e-15)


def test_cispo_weighs_with_a_clipped_ratio_and_keeps_every_gradient() -> None:
    def weight(row: int, token: int) -> float:
        return min(max(ratio(row, token), 0.8), 1.28) * ADVANTAGES[row].item()

    surrogate = cispo(NEW, OLD, MASK, ADVANTAGES, **CLIP)
    assert_losses(surrogate, lambda row, token: -weight(row, token) * NEW[row, token].item())
    slopes = gradient("cispo", NEW, OLD)
    for row, token in VALID:
        assert slopes[row, token].item() == pytest.approx(-weight(row, token))
    assert surrogate.clipped_high.nonzero().tolist() == [[0, 0], [1, 1], [2, 1]]
    assert surrogate.clipped_low.nonzero().tolist() == [[0, 1], [1, 0], [2, 2]]


def test_sapo() -> None:
    def expected(row: int, token: int) -> float:
        a = ADVANTAGES[row].item()
        tau = 1.0 if a > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (ratio(row, token) - 1))) * a

    assert_losses(SURROGATES["sapo"](NEW, OLD, MASK, ADVANTAGES), expected)


def test_reinforce() -> None:
    assert_losses(reinforce(NEW, MASK, ADVANTAGES), lambda row, token: -ADVANTAGES[row].item() * NEW[row, token].item())


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_has_the_gradient_of_reinforce(name) -> None:
    expected = -torch.where(MASK, ADVANTAGES[:, None], 0.0)
    torch.testing.assert_close(gradient(name, NEW, NEW), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1e10])
def test_poison_under_the_mask_is_never_read(name, poison) -> None:
    new, old = torch.where(MASK, NEW, poison), torch.where(MASK, OLD, -poison)
    clean = SURROGATES[name](NEW, OLD, MASK, ADVANTAGES).loss
    assert torch.equal(SURROGATES[name](new, old, MASK, ADVANTAGES).loss, clean)
    assert torch.equal(gradient(name, new, old), gradient(name, NEW, OLD))


def test_an_empty_row_may_have_an_undefined_advantage() -> None:
    mask, advantages = MASK & torch.tensor([[True], [True], [False]]), torch.tensor([1.0, -1.0, math.nan])
    for surrogate in SURROGATES.values():
        new = NEW.clone().requires_grad_()
        loss = surrogate(new, OLD, mask, advantages).loss
        loss.sum().backward()
        assert (loss[2] == 0).all()
        assert new.grad is not None
        assert new.grad.isfinite().all()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"new_logprobs \(3, 4\) and old_logprobs \(3, 3\) differ"):
        ppo_clip(NEW, OLD[:, :3], MASK, ADVANTAGES, **CLIP)
    with pytest.raises(ValueError, match=r"advantages \(2,\) must be \[B\]"):
        reinforce(NEW, MASK, ADVANTAGES[:2])
