"""TBPO against its formula written out: which responses teach, with which gradient, and what is told of it.

For a response with advantage A, s = exp(mean_t log(pi / pi_old)) and w = clip(exp(mean_t log(pi_old / pi_s)), 1/2, 2):
its loss is -w min(s A, min(s, 1 + clip_high) A), and 0 where A < 0 and s is out of 1 - band_low to 1 + band_high.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.objective import ObjectiveOptions
from policies.objectives import TokenLosses, sequence_coefficients, token_losses
from tests.policies.objectives import inputs

TBPO = ObjectiveOptions(name="tbpo", clip_high=0.04, band_low=0.03, band_high=0.07)
WIDE = ObjectiveOptions(name="tbpo", clip_high=1e9, band_low=1 - 1e-12, band_high=1e9)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_defaults_are_those_of_the_paper() -> None:
    options = ObjectiveOptions(name="tbpo")
    assert (options.clip_low, options.clip_high, options.clip_dual) == (None, 4e-4, None)
    assert (options.band_low, options.band_high) == (3e-4, 7e-4)
    correction = options.sampler_correction
    assert (correction.weights, correction.floor, correction.truncate, correction.mask) == ("geometric", 0.5, 2, "none")


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient", "told"),
    [
        (0.00, 2.0, -2.0, -2.0, None),
        (0.03, 2.0, -2 * math.exp(0.03), -2 * math.exp(0.03), None),
        (0.05, 2.0, -2 * 1.04, 0.0, "high"),  # good and already likelier: clipped, as by PPO
        (-0.9, 2.0, -2 * math.exp(-0.9), -2 * math.exp(-0.9), None),  # good and less likely: never clipped
        (0.06, -2.0, 2 * math.exp(0.06), 2 * math.exp(0.06), None),  # beyond clip_high, and within the band
        (-0.02, -2.0, 2 * math.exp(-0.02), 2 * math.exp(-0.02), None),
        (-0.04, -2.0, 0.0, 0.0, "band_low"),
        (0.08, -2.0, 0.0, 0.0, "band_high"),  # PPO would push it down with all the weight of its ratio
    ],
)
def test_a_response_by_hand(log_ratio: float, advantage: float, loss: float, gradient: float, told: str | None) -> None:
    """Two tokens, of which one moved up by 1 more than the mean and one down by 1: only the mean counts."""
    old = tensor(-3.0, -4.0)
    logp = (old + tensor(log_ratio + 1, log_ratio - 1)).requires_grad_()
    found = token_losses(inputs(logp, old, tensor(advantage, advantage)), TBPO)
    assert found.loss.tolist() == pytest.approx([loss] * 2)
    (got,) = torch.autograd.grad(found.loss.sum(), logp)
    assert got.tolist() == pytest.approx([gradient] * 2)
    shares = {name.removeprefix("clip_fraction/"): v for name, v in found.metrics.items() if "clip_fraction/" in name}
    assert {name for name, values in shares.items() if values.any()} == ({told} if told else set())
    assert found.metrics["clip_fraction"].tolist() == [told is not None] * 2


def test_the_sign_of_a_tokens_own_advantage_decides() -> None:
    """KL in the reward gives tokens their own advantages: a response out of the band keeps its good tokens."""
    logp = tensor(-0.5, -0.5).requires_grad_()
    found = token_losses(inputs(logp, tensor(0.0, 0.0), tensor(1.0, -1.0)), TBPO)
    assert found.loss.tolist() == pytest.approx([-math.exp(-0.5), 0.0])


Case = tuple[list[int], Tensor, Tensor, Tensor, Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """(lengths, logprobs, old, sampler, advantages of responses): ratios in and out of every bound."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.0, 0.02, 0.1, 3.0]))

    def of_tokens(each: float, together: float) -> Tensor:
        noise = rng.normal(0, each, sum(lengths)) + np.repeat(rng.normal(0, together, len(lengths)), lengths)
        return torch.from_numpy(noise)

    old = -of_tokens(2.0, 1.0).abs() - 1
    advantages = torch.tensor(draw(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 1.5]), min_size=5, max_size=5)))
    return lengths, old + of_tokens(scale, scale), old, old + of_tokens(0.1, 0.5), advantages[: len(lengths)].double()


def computed(case: Case, options: ObjectiveOptions, first: int = 0, last: int | None = None) -> TokenLosses:
    lengths, logp, old, sampler, advantages = case
    bounds = [0, *np.cumsum(lengths).tolist()]
    part = slice(bounds[first], bounds[len(lengths) if last is None else last])
    spread = advantages.repeat_interleave(torch.tensor(lengths))
    given = inputs(logp[part], old[part], spread[part], lengths=lengths[first:last], sampler_logprobs=sampler[part])
    return token_losses(given, options)


def gradients(case: Case, options: ObjectiveOptions) -> list[float]:
    """Of the loss of the mini-batch, by token."""
    lengths, logp, *rest = case
    leaf = logp.clone().requires_grad_()
    factors = torch.from_numpy(
        sequence_coefficients(lengths, [1.0] * len(lengths), options.aggregation).repeat(lengths)
    )
    loss = (computed((lengths, leaf, *rest), options).loss * factors).sum()
    (found,) = torch.autograd.grad(loss, leaf)
    values: list[float] = found.tolist()
    return values


def written_out(case: Case) -> list[float]:
    """The gradient of -1/S sum_s w_s s_s A_s / T_s, response by response."""
    lengths, logp, old, sampler, advantages = case
    found, start = [], 0
    for length, advantage in zip(lengths, advantages.tolist(), strict=True):
        part = slice(start, start + length)
        s = math.exp(float((logp[part] - old[part]).mean()))
        w = min(max(math.exp(float((old[part] - sampler[part]).mean())), 0.5), 2.0)
        teaches = s <= 1.04 if advantage > 0 else 0.97 <= s <= 1.07
        found += [-w * s * advantage / length / len(lengths) if teaches else 0.0] * length
        start += length
    return found


@settings(max_examples=200, deadline=None)
@given(cases())
def test_gradients_are_those_of_the_formula(case: Case) -> None:
    assert gradients(case, TBPO) == pytest.approx(written_out(case), rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_is_left_out_has_no_gradient_and_changes_none_of_the_others(case: Case) -> None:
    """The denominators are those of all responses: the rest learn with the weights that they have without any band."""
    left_out = computed(case, TBPO).metrics["clip_fraction"].tolist()
    found, unbounded = gradients(case, TBPO), gradients(case, WIDE)
    assert found == [0.0 if out else g for out, g in zip(left_out, unbounded, strict=True)]
    for start, length in zip(np.cumsum([0, *case[0]])[:-1], case[0], strict=True):
        assert len(set(left_out[start : start + length])) == 1  # whole responses


@settings(max_examples=50, deadline=None)
@given(cases(), st.integers(0, 5))
def test_micro_batches_and_ranks_find_the_same_losses_and_metrics(case: Case, cut: int) -> None:
    whole, cut = computed(case, TBPO), min(cut, len(case[0]))
    parts = [computed(case, TBPO, 0, cut), computed(case, TBPO, cut)]
    assert torch.equal(torch.cat([part.loss for part in parts]), whole.loss)
    for name, values in whole.metrics.items():
        assert torch.equal(torch.cat([part.metrics[name] for part in parts]), values), name


def test_a_nan_is_never_left_out() -> None:
    """It must reach the check that stops the run, whatever the sign of the advantage."""
    for advantage in (1.0, -1.0):
        given = inputs(tensor(math.nan, -1.0), tensor(-1.0, -1.0), tensor(advantage, advantage))
        assert token_losses(given, TBPO).loss.isnan().all()


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"name": "tbpo", "clip_low": 3e-4}, "clip_low"),
        ({"name": "tbpo", "clip_high": None}, "clip_high"),
        ({"name": "tbpo", "clip_dual": 3.0}, "clip_dual"),
        ({"name": "tbpo", "band_low": None}, "band_low"),
        ({"name": "tbpo", "band_high": None}, "band_high"),
        ({"name": "gspo", "band_high": 7e-4}, "band_high"),
        ({"band_low": 3e-4}, "band_low"),
        ({"sampler_correction": {"floor": 0.5}}, "sampler_correction.floor"),
        ({"name": "tbpo", "sampler_correction": {"truncate": 0.5}}, "sampler_correction.floor"),
    ],
)
def test_a_bound_that_would_be_ignored_or_is_missing_is_a_fault(written: dict[str, Any], key: str) -> None:
    assert [fault.key for fault in ObjectiveOptions(**written).contradictions()] == [key]


@pytest.mark.parametrize(
    "written",
    [
        {"sampler_correction": {"weights": "none"}},
        {"sampler_correction": {"weights": "token"}},
        {"sampler_correction": {"mask": "geometric"}},
        {"loss": "sequence_clip"},
    ],
)
def test_what_is_written_beside_the_name_takes_its_defaults_with_it(written: dict[str, Any]) -> None:
    options = ObjectiveOptions(name="tbpo", **written)
    assert list(options.contradictions()) == []
    assert options.sampler_correction.floor == (0.5 if "loss" in written else None)


def test_where_its_defaults_come_from() -> None:
    options = ObjectiveOptions(name="tbpo", band_low=3e-3)
    assert options.origin("band_high") == "objective.loss: sequence_band"
    assert options.origin("sampler_correction.weights") == "objective.name: tbpo"
    assert options.origin("aggregation") == "objective.name: tbpo"
