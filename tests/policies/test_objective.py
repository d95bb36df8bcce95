"""The clipped surrogate against numbers worked out by hand: values, gradients, limits, aggregation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config.objective import ObjectiveOptions
from policies.objectives import sequence_coefficients
from tests.policies.objectives import grpo_losses

OPTIONS = ObjectiveOptions(clip_low=0.2, clip_high=0.28)


def surrogate(ratio: float, advantage: float, options: ObjectiveOptions = OPTIONS) -> tuple[float, float]:
    """(loss, d loss / d logprob) of one token."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    loss = grpo_losses(logp, old, torch.tensor([advantage], dtype=torch.float64), options).loss
    loss.sum().backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: minus the advantage, gradient -A
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),  # inside the band: -r A
        (1.5, 2.0, -2.56, 0.0),  # too high and good: clipped at 1.28, no gradient
        (0.5, 2.0, -1.0, -1.0),  # too low but good: not clipped, pulled back up
        (0.5, -2.0, 1.6, 0.0),  # too low and bad: clipped at 0.8, no gradient
        (1.5, -2.0, 3.0, 3.0),  # too high and bad: not clipped
        (2.9, -2.0, 5.8, 5.8),
        (3.1, -2.0, 6.0, 0.0),  # far too high and bad: bounded at 3 |A|, no gradient
        (3.1, 2.0, -2.56, 0.0),  # the bound is for bad tokens only
        (1.27, 1.0, -1.27, -1.27),  # the upper edge is 1.28, not 1.2
        (1.29, 1.0, -1.28, 0.0),
        (0.79, -1.0, 0.8, 0.0),
        (0.81, -1.0, 0.81, 0.81),
    ],
)
def test_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert surrogate(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-12)


def test_clip_fractions_count_the_tokens_without_gradient() -> None:
    logp = torch.tensor([1.5, 0.5, 0.5, 1.5, 1.0, 0.5]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 0.0])
    losses = grpo_losses(logp, torch.zeros(6), advantages, OPTIONS)
    assert losses.metrics["clip_fraction/high"].tolist() == [True, False, False, False, False, False]
    assert losses.metrics["clip_fraction/low"].tolist() == [False, False, True, False, False, False]
    assert not losses.metrics["clip_fraction/dual"].any()
    losses = grpo_losses(torch.tensor([4.0, 4.0, 2.0]).log(), torch.zeros(3), torch.tensor([-1.0, 1.0, -1.0]), OPTIONS)
    assert losses.metrics["clip_fraction/dual"].tolist() == [True, False, False]


def test_a_bound_out_of_reach_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(500, generator=generator) * 3
    advantages = torch.randn(500, generator=generator)
    drift = torch.randn(500, generator=generator).clamp(-1, 1)

    def computed(clip_dual: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        logp = (old + drift).requires_grad_()
        loss = grpo_losses(logp, old, advantages, ObjectiveOptions(clip_dual=clip_dual)).loss
        loss.sum().backward()
        assert logp.grad is not None
        return loss.detach(), logp.grad

    for bounded, unbounded in zip(computed(3.0), computed(None), strict=True):
        assert torch.equal(bounded, unbounded)


def test_kl_old_by_hand() -> None:
    losses = grpo_losses(torch.tensor([math.log(1.5)]), torch.zeros(1), torch.ones(1), OPTIONS)
    assert losses.metrics["kl_old"].item() == pytest.approx(0.5 - math.log(1.5), rel=1e-6)


def test_kl_term_is_added_with_its_coefficient() -> None:
    options = ObjectiveOptions(kl="k3", kl_coef=0.1)
    logp = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([math.log(0.25)], dtype=torch.float64)
    losses = grpo_losses(logp, logp.detach(), torch.zeros(1, dtype=torch.float64), options, reference)
    losses.loss.sum().backward()
    assert losses.loss.item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2)), rel=1e-9)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(0.1 * (1 - 0.5), rel=1e-9)  # d k3 / d logp = 1 - ref/pi
    assert losses.metrics["kl"].item() == pytest.approx(0.5 - 1 + math.log(2), rel=1e-9)
    with pytest.raises(ValueError, match=r"objective\.kl is k3"):
        grpo_losses(logp, logp.detach(), torch.zeros(1), options)


def test_absurd_ratios_stay_finite() -> None:
    logp = torch.tensor([0.0, -500.0], requires_grad=True)
    losses = grpo_losses(logp, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]), OPTIONS)
    losses.loss.sum().backward()
    assert torch.isfinite(losses.loss).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_aggregations_by_hand() -> None:
    x = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]

    def loss(weights: list[float], how: str) -> float:
        c = sequence_coefficients([3, 1], weights, how)
        return float(sum(cs * xs.sum() for cs, xs in zip(c, x, strict=True)))

    assert loss([1, 1], "token_mean") == pytest.approx(16 / 4)
    assert loss([1, 1], "seq_mean_token_mean") == pytest.approx((2 + 10) / 2)
    assert loss([2, 1], "token_mean") == pytest.approx((2 * 6 + 10) / 7)
    assert loss([2, 1], "seq_mean_token_mean") == pytest.approx((2 * 2 + 10) / 3)
    assert loss([0, 1], "token_mean") == pytest.approx(10)
    assert loss([1, 1], "seq_mean_token_sum") == pytest.approx((6 + 10) / 2)
    assert loss([2, 1], "seq_mean_token_sum") == pytest.approx((2 * 6 + 10) / 3)


def test_a_fixed_normaliser_divides_by_what_was_asked_for() -> None:
    """And so it adds up: two parts that stand for half of it each have the mean of the whole."""
    whole = sequence_coefficients([3, 1, 2], [2, 1, 5], "fixed_mean_token_sum_norm", 10.0, asked=8)
    assert whole.tolist() == pytest.approx([2 / 80, 1 / 80, 5 / 80])
    parts = [
        sequence_coefficients(lengths, weights, "fixed_mean_token_sum_norm", 10.0, asked=4)
        for lengths, weights in (([3, 1], [2, 1]), ([2], [5]))
    ]
    assert np.concatenate(parts) / 2 == pytest.approx(whole)
    alone = sequence_coefficients([3], [2], "fixed_mean_token_sum_norm", 10.0, asked=8)
    assert alone[0] == whole[0]  # whatever the others are


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 10)), min_size=1, max_size=40),
    st.sampled_from(["token_mean", "seq_mean_token_mean"]),
)
def test_a_constant_has_itself_as_mean(sequences: list[tuple[int, float]], how: str) -> None:
    lengths, weights = [t for t, _ in sequences], [w for _, w in sequences]
    c = sequence_coefficients(lengths, weights, how)
    assert float((c * np.array(lengths)).sum()) == pytest.approx(1.0)


def test_bad_mini_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has an empty response"):
        sequence_coefficients([3, 0], [1, 1], "token_mean")
    with pytest.raises(ValueError, match="not all zero"):
        sequence_coefficients([3, 1], [0, 0], "token_mean")
    with pytest.raises(ValueError, match="one weight for each"):
        sequence_coefficients([], [], "token_mean")
    for divisor, asked in ((None, 8), (10.0, None), (10.0, 0)):
        with pytest.raises(ValueError, match="responses asked for"):
            sequence_coefficients([3], [1], "fixed_mean_token_sum_norm", divisor, asked)
