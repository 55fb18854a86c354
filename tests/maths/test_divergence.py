"""Over a small vocabulary the expectation of each estimator is a sum, and it must be the divergence in its name."""

from __future__ import annotations

import pytest
import torch

from app.maths import divergence

SAMPLER = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TARGET = torch.tensor([0.4, 0.25, 0.35], dtype=torch.float64)
LOG_RATIO = (TARGET / SAMPLER).log()
KL_SAMPLER_TARGET = (SAMPLER * (SAMPLER / TARGET).log()).sum().item()
KL_TARGET_SAMPLER = (TARGET * (TARGET / SAMPLER).log()).sum().item()


def test_direction_matters_here() -> None:
    assert abs(KL_SAMPLER_TARGET - KL_TARGET_SAMPLER) > 1e-3


@pytest.mark.parametrize("estimator", [divergence.kl_sampler_target_k1, divergence.kl_sampler_target_k3])
def test_k1_and_k3_are_unbiased_for_kl_of_sampler_and_target(estimator) -> None:
    assert (SAMPLER * estimator(LOG_RATIO)).sum().item() == pytest.approx(KL_SAMPLER_TARGET, rel=1e-12)


def test_chi_squared_is_unbiased_for_target_and_sampler() -> None:
    expected = (TARGET.square() / SAMPLER).sum().item() - 1
    actual = (SAMPLER * divergence.chi_squared_target_sampler(LOG_RATIO)).sum().item()
    assert actual == pytest.approx(expected, rel=1e-12)


def test_k2_by_hand_and_close_to_kl_for_near_policies() -> None:
    assert divergence.kl_sampler_target_k2(torch.tensor([-0.5, 0.0, 3.0])).tolist() == [0.125, 0.0, 4.5]
    near = (0.999 * SAMPLER + 0.001 * TARGET) / SAMPLER
    kl = -(SAMPLER * near.log()).sum().item()
    assert (SAMPLER * divergence.kl_sampler_target_k2(near.log())).sum().item() == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize("estimator", [divergence.kl_sampler_target_k2, divergence.kl_sampler_target_k3])
def test_k2_and_k3_are_never_negative(estimator) -> None:
    assert (estimator(torch.linspace(-20, 20, 4001)) >= 0).all()


def test_k3_keeps_its_digits_near_zero() -> None:
    log_ratio = torch.tensor(1e-6, dtype=torch.float64)
    assert divergence.kl_sampler_target_k3(log_ratio).item() == pytest.approx(5e-13, rel=1e-3)


def test_k2_as_a_penalty_has_the_gradient_of_the_kl() -> None:
    """E[grad k2] = grad KL(sampler || target) for a softmax sampler; E[grad k1] = 0 (arXiv 2506.09477)."""
    logits = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - TARGET.log())).sum()
    (true_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    weights = logp.exp().detach()
    k2 = (weights * divergence.kl_sampler_target_k2(TARGET.log() - logp)).sum()
    k1 = (weights * divergence.kl_sampler_target_k1(TARGET.log() - logp)).sum()
    (k2_gradient,) = torch.autograd.grad(k2, logits, retain_graph=True)
    (k1_gradient,) = torch.autograd.grad(k1, logits)
    torch.testing.assert_close(k2_gradient, true_gradient)
    torch.testing.assert_close(k1_gradient, torch.zeros_like(k1_gradient), atol=1e-15, rtol=0)
