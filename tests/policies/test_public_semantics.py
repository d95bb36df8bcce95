"""What public trainers compute, restated as numbers worked out by hand: the semantics that are accepted here.

Each test names who computes it. What they do otherwise, and why it is not done here, is in docs/concepts/learning.md.
"""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from config.objective import ObjectiveOptions
from policies.advantages import group_advantages
from policies.kl import kl_penalty, kl_values
from policies.objectives import sequence_coefficients
from tests.policies.objectives import grpo_losses

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
PPO = ObjectiveOptions(clip_low=0.2, clip_high=0.2, clip_dual=None)


def losses(ratios: list[float], advantages: list[float], options: ObjectiveOptions) -> Tensor:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    wanted = torch.tensor(advantages, dtype=torch.float64)
    return grpo_losses(logprobs, torch.zeros_like(logprobs), wanted, options).loss


@pytest.mark.parametrize(
    ("clip_dual", "expected"),
    [
        (3.0, [-0.5, 1.0, 12.0]),  # SkyRL, NeMo-RL: sum 12.5, mean 4.1667
        (None, [-0.5, 1.0, 40.0]),  # plain PPO: sum 40.5
    ],
)
def test_dual_clip_of_skyrl_and_nemo(clip_dual: float | None, expected: list[float]) -> None:
    options = PPO.model_copy(update={"clip_dual": clip_dual})
    assert losses([0.5, 1.0, 10.0], [1.0, -1.0, -4.0], options).tolist() == pytest.approx(expected)


def test_dual_clip_of_slime_and_verl() -> None:
    slime = PPO.model_copy(update={"clip_dual": 1.5})
    assert losses([2.0], [-2.0], slime).item() == pytest.approx(3.0)
    assert losses([math.exp(1.5)], [-1.0], ObjectiveOptions()).item() == pytest.approx(3.0)  # verl's default, and ours
    assert losses([math.exp(1.5)], [-1.0], PPO).item() == pytest.approx(4.4817, rel=1e-4)


def test_log_ratios_are_cut_at_twenty_as_in_verl() -> None:
    assert losses([math.exp(30)], [-1.0], PPO).item() == pytest.approx(math.exp(20))
    assert losses([math.exp(30)], [-1.0], ObjectiveOptions()).item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("aggregation", "divisor", "expected"),
    [
        ("token_mean", None, -6.4505228 / 4),  # verl token-mean; TRL bnpo, dapo; SkyRL token_mean
        (
            "seq_mean_token_mean",
            None,
            -(5.2505228 / 3 + 1.2) / 2,
        ),  # verl seq-mean-token-mean; TRL grpo; SkyRL sequence_mean
        ("seq_mean_token_sum", None, -(5.2505228 + 1.2) / 2),  # verl seq-mean-token-sum
        ("seq_mean_token_sum_norm", 4.0, -(5.2505228 / 4 + 1.2 / 4) / 2),  # TRL dr_grpo; SkyRL seq_mean_token_sum_norm
    ],
)
def test_reductions_of_two_sequences_of_three_tokens_and_one(
    aggregation: Aggregation, divisor: float | None, expected: float
) -> None:
    """SkyRL's masked example: ratios e^-.5, e^.5, e^-.2 with A = 2, and e^.2 with A = 1, clip 0.2."""
    each = losses([math.exp(x) for x in (-0.5, 0.5, -0.2, 0.2)], [2.0, 2.0, 2.0, 1.0], PPO)
    assert each.tolist() == pytest.approx([-1.2130613, -2.4, -1.6374615, -1.2])
    factors = np.repeat(sequence_coefficients([3, 1], [1, 1], aggregation, divisor), [3, 1])
    assert float((factors * each.numpy()).sum()) == pytest.approx(expected, rel=1e-6)


def test_dr_grpo_weighs_a_token_alike_in_any_batch() -> None:
    """With the constant normaliser a token's factor depends neither on its own response's length nor on others'."""
    alone = sequence_coefficients([7, 3], [1, 1], "seq_mean_token_sum_norm", 100)
    longer = sequence_coefficients([70, 3], [1, 1], "seq_mean_token_sum_norm", 100)
    assert alone.tolist() == longer.tolist() == [0.005, 0.005]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-1.0, 14.0, 29.0]),  # NeMo-RL without clamps
        ("k2", [0.5, 98.0, 420.5]),
        ("k3", [0.7183, 10.0, 10.0]),  # NeMo-RL, verl, SkyRL, OpenRLHF: log ratio cut at 20, value at 10
    ],
)
def test_kl_values_of_nemo(estimator: Literal["k1", "k2", "k3"], expected: list[float]) -> None:
    logprobs, reference = torch.full((3,), -1.0), torch.tensor([0.0, -15.0, -30.0])
    assert kl_values(logprobs, reference, estimator).tolist() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("d", [-25.0, -20.1, 25.0])
def test_k3_is_bounded_as_in_verl(d: float) -> None:
    logprobs = torch.tensor([d], requires_grad=True)
    value = kl_penalty(logprobs, torch.zeros(1), "k3")
    value.sum().backward()
    assert value.item() == 10.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2"])
@pytest.mark.parametrize("d", [-25.0, -200.0, 30.0])
def test_k1_and_k2_pull_back_the_tokens_that_drifted_farthest(estimator: Literal["k1", "k2"], d: float) -> None:
    logprobs = torch.tensor([d], requires_grad=True)
    value = kl_penalty(logprobs, torch.zeros(1), estimator)
    value.sum().backward()
    assert value.item() == (d if estimator == "k1" else d * d / 2)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == d


def test_the_gradient_of_k2_is_what_nemo_adds_to_k3() -> None:
    """NeMo-RL's k3 carries the score term: value + pathwise gradient, (e^-d - 1 + d) + (1 - e^-d) = d, as k2 has it."""
    logprobs = torch.tensor([-1.2, -0.7], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.9, -1.1], dtype=torch.float64)
    (0.3 / 2 * kl_penalty(logprobs, reference, "k2")).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.0450, 0.0600], abs=1e-12)
    k3 = torch.tensor([-1.2, -0.7], dtype=torch.float64, requires_grad=True)
    (0.3 / 2 * kl_penalty(k3, reference, "k3")).sum().backward()
    assert k3.grad is not None
    assert k3.grad.tolist() == pytest.approx([-0.052479, 0.049452], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "normalize", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], True, [1.5, -0.5, -0.5, -0.5]),  # verl, TRL, OpenRLHF: std with n - 1
        ([1.0, 0.0, 0.0, 0.0], False, [0.75, -0.25, -0.25, -0.25]),  # Dr. GRPO; prime-rl's default
        ([0.7], True, [0.0]),  # prime-rl; verl would give the reward itself, 0.7
        ([1.0, 1.0], True, [0.0, 0.0]),
    ],
)
def test_advantages(rewards: list[float], normalize: bool, expected: list[float]) -> None:
    got = group_advantages(rewards, normalize_std=normalize).advantages
    assert got.tolist() == pytest.approx(expected, rel=1e-5)
