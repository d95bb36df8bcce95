"""k1, k2, k3 by enumeration: over a small vocabulary an expectation is a finite sum, so nothing is sampled."""

import math
from typing import Literal

import pytest
import torch

from policies.kl import kl_penalty, kl_values

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")


def distributions(spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of pi (leaf) and log-probs of the reference, float64 [7]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(logits + spread * torch.randn(7, generator=generator, dtype=torch.float64), -1)
    return logits.requires_grad_(), reference


def true_kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    return (logp.exp() * (logp - logq)).sum()


def expected_gradient(estimator: Estimator) -> torch.Tensor:
    """E_{x ~ pi} [grad of the loss term at x]: the sampling probabilities are constants, as in training."""
    logits, reference = distributions()
    logp = torch.log_softmax(logits, -1)
    (logp.detach().exp() * kl_penalty(logp, reference, estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_by_hand() -> None:
    logp, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_values(logp, ref, "k1").item() == pytest.approx(math.log(2), rel=1e-6)
    assert kl_values(logp, ref, "k2").item() == pytest.approx(math.log(2) ** 2 / 2, rel=1e-6)
    assert kl_values(logp, ref, "k3").item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: Estimator) -> None:
    logits, reference = distributions()
    logp = torch.log_softmax(logits, -1).detach()
    expected = (logp.exp() * kl_values(logp, reference, estimator)).sum()
    assert expected.item() == pytest.approx(true_kl(logp, reference).item(), rel=1e-12)


def test_k2_is_biased_but_not_near_the_reference() -> None:
    def error(spread: float) -> float:
        logits, reference = distributions(spread)
        logp = torch.log_softmax(logits, -1).detach()
        truth = true_kl(logp, reference)
        return abs(((logp.exp() * kl_values(logp, reference, "k2")).sum() / truth - 1).item())

    assert error(1.0) > 0.05
    assert error(0.01) < 0.01


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_never_negative_and_vanish_at_equality(estimator: Estimator) -> None:
    d = torch.linspace(-8, 8, 161, dtype=torch.float64)
    assert (kl_values(d, torch.zeros_like(d), estimator) >= 0).all()
    assert kl_values(d, d, estimator).abs().max() == 0


def test_k3_has_less_variance_than_k1() -> None:
    logits, reference = distributions(0.3)
    logp = torch.log_softmax(logits, -1).detach()

    def variance(estimator: Estimator) -> float:
        values = kl_values(logp, reference, estimator)
        mean = (logp.exp() * values).sum()
        return float((logp.exp() * (values - mean) ** 2).sum())

    assert variance("k3") < 0.2 * variance("k1")


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_loss_gradient_of_k1_and_k2_is_that_of_the_kl(estimator: Estimator) -> None:
    logits, reference = distributions()
    true_kl(torch.log_softmax(logits, -1), reference).backward()
    assert logits.grad is not None
    torch.testing.assert_close(expected_gradient(estimator), logits.grad, rtol=1e-10, atol=1e-12)


def test_loss_gradient_of_k3_is_that_of_the_other_direction() -> None:
    logits, reference = distributions()
    true_kl(reference, torch.log_softmax(logits, -1)).backward()
    assert logits.grad is not None
    torch.testing.assert_close(expected_gradient("k3"), logits.grad, rtol=1e-10, atol=1e-12)


def test_the_naive_gradient_of_k1_vanishes() -> None:
    """The pitfall that kl_penalty avoids."""
    logits, reference = distributions()
    logp = torch.log_softmax(logits, -1)
    (logp.detach().exp() * kl_values(logp, reference, "k1")).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_differences_stay_finite(estimator: Estimator) -> None:
    logp = torch.tensor([-200.0, 0.0], requires_grad=True)
    penalty = kl_penalty(logp, torch.tensor([0.0, -200.0]), estimator)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
