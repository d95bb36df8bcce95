"""Optimizer steps and schedules against numbers worked out by hand, and against torch used alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from actors.training.optimizer import Optimizers, clip_gradients, gradient_norm, lr_factor
from config.learner import OptimizerOptions


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("embed", nn.Parameter(torch.randn(5, 4, generator=generator))),
        ("block.qkv", nn.Parameter(torch.randn(12, 4, generator=generator))),
        ("block.norm", nn.Parameter(torch.ones(4))),
    ]


def set_gradients(named: list[tuple[str, nn.Parameter]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=generator)


def test_first_adamw_step_by_hand() -> None:
    p = nn.Parameter(torch.tensor([[2.0, -1.0]]))
    optimizers = Optimizers([("w", p)], [], OptimizerOptions(lr=0.1, weight_decay=0.5, eps=1e-8), 1)
    p.grad = torch.tensor([[0.3, -4.0]])
    assert optimizers.step() == 0.1
    # Decay first: w * (1 - 0.1 * 0.5); then m / sqrt(v) is the sign of the gradient after bias correction.
    assert p.detach().tolist() == [pytest.approx([2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1], rel=1e-6)]


def test_second_adamw_step_by_hand() -> None:
    p = nn.Parameter(torch.tensor([1.0]))
    optimizers = Optimizers([("b", p)], [], OptimizerOptions(lr=0.1, weight_decay=0.5, betas=(0.9, 0.95)), 2)
    for gradient in (1.0, 3.0):
        p.grad = torch.tensor([gradient])
        optimizers.step()
    m = (0.1 * (0.9 * 1 + 3)) / (1 - 0.9**2)
    v = (0.05 * (0.95 * 1 + 9)) / (1 - 0.95**2)
    assert p.item() == pytest.approx(1.0 - 0.1 - 0.1 * m / math.sqrt(v), rel=1e-6)  # a vector: no decay


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    ours, theirs = parameters(), parameters()
    options = OptimizerOptions(name="muon", lr=0.02, weight_decay=0.1)
    optimizers = Optimizers(ours, [ours[1][1]], options, 3)
    muon = torch.optim.Muon([theirs[1][1]], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(
        [{"params": [theirs[0][1]], "weight_decay": 0.1}, {"params": [theirs[2][1]], "weight_decay": 0.0}],
        lr=0.02,
        betas=options.betas,
        eps=options.eps,
    )
    for seed in range(3):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        optimizers.step()
        muon.step()
        adam.step()
    for (name, got), (_, expected) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_muon_update_is_nearly_orthogonal_with_the_size_of_adams() -> None:
    p = nn.Parameter(torch.zeros(64, 16))
    optimizers = Optimizers(
        [("w", p), ("b", nn.Parameter(torch.zeros(1)))], [p], OptimizerOptions(name="muon", lr=1.0), 1
    )
    p.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    optimizers.step()
    singular = torch.linalg.svdvals(p.detach()) / (0.2 * 64**0.5)
    assert singular.min() > 0.5  # Newton-Schulz as published brings singular values into about 0.7 .. 1.2
    assert singular.max() < 1.3
    assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_state_is_whole_before_the_first_step_and_exact_after_copying() -> None:
    options = OptimizerOptions(name="muon", lr=0.02)
    ours, copied = parameters(), parameters()
    first, second = (Optimizers(named, [named[1][1]], options, 9) for named in (ours, copied))
    assert set(first.state()) == {
        "embed.step", "embed.exp_avg", "embed.exp_avg_sq", "block.norm.step", "block.norm.exp_avg",
        "block.norm.exp_avg_sq", "block.qkv.momentum_buffer",
    }  # fmt: skip
    set_gradients(ours, 0)
    first.step()
    with torch.no_grad():
        for (_, a), (_, b) in zip(copied, ours, strict=True):
            a.copy_(b)
        for name, tensor in second.state().items():
            tensor.copy_(first.state()[name])
    for named, optimizers in ((ours, first), (copied, second)):
        set_gradients(named, 1)
        optimizers.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, copied, strict=True))


def test_schedules_by_hand() -> None:
    def factors(total: int, **options: object) -> list[float]:
        return [round(lr_factor(i, OptimizerOptions(**options), total), 6) for i in range(total)]

    assert factors(4, warmup_steps=0, schedule="constant") == [1, 1, 1, 1]
    assert factors(5, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1, 1]
    assert factors(4, warmup_steps=0, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert factors(6, warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert factors(8, warmup_steps=2, schedule="linear_half") == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]


@given(
    st.integers(1, 300),
    st.integers(0, 400),
    st.sampled_from(["constant", "linear", "linear_half"]),
    st.integers(0, 500),
)
def test_factors_stay_between_zero_and_one(total: int, warmup: int, schedule: str, step: int) -> None:
    options = OptimizerOptions(warmup_steps=warmup, schedule=schedule)
    assert 0 <= lr_factor(step, options, total) <= 1
    if schedule != "constant":
        assert lr_factor(total, options, total) == 0


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the number of optimizer steps"):
        Optimizers(parameters(), [], OptimizerOptions(schedule="linear"), 0)


def test_clipping_is_global() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert gradient_norm([a, b]) == 5.0
    clip_gradients([a, b], 5.0, 10.0)
    assert (a.grad.item(), b.grad.item()) == (3.0, 4.0)
    clip_gradients([a, b], 5.0, 1.0)
    assert (a.grad.item(), b.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-5)
