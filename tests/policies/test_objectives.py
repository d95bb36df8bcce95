"""Each objective against numbers worked out by hand: values, gradients, limits; what importance weights and entropy
add. The clipped surrogate's own table is in test_objective.py."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from config.objective import Name, ObjectiveOptions
from policies.objectives import LOSSES, derived_metrics, sequence_coefficients, token_losses
from tests.policies.objectives import inputs

NAMES = get_args(Name)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient_of(loss: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, leaf)
    values: list[float] = gradient.tolist()
    return values


@pytest.mark.parametrize(
    ("ratio", "advantage", "bounds", "loss", "gradient"),
    [
        (1.0, 3.0, {}, 3.0, -3.0),  # -A log pi at log pi = -1
        (2.0, 1.0, {"clip_high": 0.5}, 0.460279229, -1.5),  # weight cut to 1.5: -1.5 (log 2 - 1), and a gradient
        (2.0, 1.0, {}, 0.613705639, -2.0),  # below the default bound of 5
        (9.0, -1.0, {}, 5.986122887, 5.0),  # 5 (log 9 - 1)
        (0.5, -2.0, {}, -1.693147181, 1.0),  # no lower bound: weight 0.5
        (0.5, -2.0, {"clip_low": 0.2}, -2.709035490, 1.6),  # weight raised to 0.8
    ],
)
def test_cispo_by_hand(ratio: float, advantage: float, bounds: dict[str, float], loss: float, gradient: float) -> None:
    options = ObjectiveOptions(name="cispo", **bounds)
    old = tensor(-1.0)
    logp = (old + math.log(ratio)).requires_grad_()
    losses = token_losses(inputs(logp, old, tensor(advantage)), options).loss
    assert losses.item() == pytest.approx(loss, rel=1e-8)
    assert gradient_of(losses.sum(), logp) == pytest.approx([gradient])


def test_cispo_keeps_the_gradient_of_tokens_that_clipping_would_silence() -> None:
    logp = tensor(math.log(10.0), math.log(0.1)).requires_grad_()
    advantages = tensor(1.0, -1.0)
    cispo = token_losses(inputs(logp, tensor(0.0, 0.0), advantages), ObjectiveOptions(name="cispo"))
    assert gradient_of(cispo.loss.sum(), logp) == pytest.approx([-5.0, 0.1])
    assert cispo.metrics["clip_fraction/high"].tolist() == [True, False]
    clipped = token_losses(inputs(logp, tensor(0.0, 0.0), advantages), ObjectiveOptions())
    assert gradient_of(clipped.loss.sum(), logp) == [0.0, 0.0]


def test_gspo_by_hand() -> None:
    """Log ratios .1, .3 and -.2, -.4, 0: s = e^.2 = 1.2214 and e^-.2 = 0.8187, for every token of the response."""
    logp = tensor(0.1, 0.3, -0.2, -0.4, 0.0).requires_grad_()
    options = ObjectiveOptions(name="gspo", clip_low=0.1, clip_high=0.15)

    def computed(first: float, second: float) -> tuple[list[float], list[float], Any]:
        advantages = tensor(first, first, second, second, second)
        losses = token_losses(inputs(logp, torch.zeros_like(logp), advantages, lengths=[2, 3]), options)
        return losses.loss.tolist(), gradient_of(losses.loss.sum(), logp), losses.metrics

    values, gradient, metrics = computed(2.0, 1.0)
    assert values == pytest.approx([-2.3, -2.3] + [-0.818730753] * 3)  # 1.15 * 2; too low but good: not clipped
    assert gradient == pytest.approx([0.0, 0.0] + [-0.818730753] * 3)
    assert metrics["clip_fraction/high"].tolist() == [True, True, False, False, False]
    values, gradient, metrics = computed(-2.0, -1.0)
    assert values == pytest.approx([2.442805516, 2.442805516] + [0.9] * 3)
    assert gradient == pytest.approx([2.442805516, 2.442805516, 0.0, 0.0, 0.0])
    assert metrics["clip_fraction/low"].tolist() == [False, False, True, True, True]


def test_gspo_of_a_sequence_is_the_clipped_geometric_mean() -> None:
    """With seq_mean_token_mean: loss = -s A with s = (prod r_t)^(1/T), so each token's gradient is -s A / T."""
    logp = tensor(0.01, -0.03, 0.05).requires_grad_()
    options = ObjectiveOptions(name="gspo", clip_low=0.2, clip_high=0.2)
    losses = token_losses(inputs(logp, torch.zeros_like(logp), tensor(2.0, 2.0, 2.0)), options).loss
    loss = (losses * torch.from_numpy(sequence_coefficients([3], [1], "seq_mean_token_mean"))).sum()
    s = math.exp(0.01)
    assert loss.item() == pytest.approx(-2 * s)
    assert gradient_of(loss, logp) == pytest.approx([-2 * s / 3] * 3)


def test_gspo_gives_each_token_its_own_advantage() -> None:
    """GSPO-token: sg(s) pi / sg(pi), times the token's advantage."""
    logp = tensor(0.02, 0.04).requires_grad_()
    options = ObjectiveOptions(name="gspo", clip_low=0.2, clip_high=0.2)
    losses = token_losses(inputs(logp, torch.zeros_like(logp), tensor(1.0, -3.0)), options).loss
    s = math.exp(0.03)
    assert losses.tolist() == pytest.approx([-s, 3 * s])
    assert gradient_of(losses.sum(), logp) == pytest.approx([-s, 3 * s])


def test_policy_gradient_by_hand() -> None:
    logp = tensor(-0.5, -2.0).requires_grad_()
    losses = token_losses(inputs(logp, tensor(-9.0, -9.0), tensor(2.0, -3.0)), ObjectiveOptions(name="reinforce")).loss
    assert losses.tolist() == [1.0, -6.0]  # whatever the old log-probs
    assert gradient_of(losses.sum(), logp) == [-2.0, 3.0]


def test_sums_over_a_response_make_it_the_policy_gradient_of_the_response() -> None:
    """RLOO: -A log pi(y), log pi(y) the sum over tokens, mean over responses."""
    logp, lengths = tensor(-0.5, -1.5, -2.0), [2, 1]
    options = ObjectiveOptions(name="rloo")
    losses = token_losses(inputs(logp, logp, tensor(1.0, 1.0, -1.0), lengths=lengths), options).loss
    factors = sequence_coefficients(lengths, [1, 1], options.aggregation).repeat(lengths)
    assert float((losses.numpy() * factors).sum()) == pytest.approx((2.0 - 2.0) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_every_objective_is_the_policy_gradient(name: str) -> None:
    logp = tensor(-0.1, -1.0, -5.0, -2.0).requires_grad_()
    advantages = tensor(1.5, -0.5, -2.0, 0.0)
    options = ObjectiveOptions(name=name, kl="none")
    losses = token_losses(inputs(logp, logp.detach(), advantages, lengths=[3, 1]), options)
    assert gradient_of(losses.loss.sum(), logp) == pytest.approx([-1.5, 0.5, 2.0, 0.0])
    assert not any(losses.metrics[key].any() for key in losses.metrics if key.startswith("clip_fraction"))
    assert losses.metrics["kl_old"].tolist() == [0.0] * 4


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> list[float]:
    found = []
    for i in range(at.numel()):
        there, back = at.clone(), at.clone()
        there[i] += step
        back[i] -= step
        found.append(float((function(there) - function(back)) / (2 * step)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        ObjectiveOptions(),
        ObjectiveOptions(clip_dual=None, kl="k3", kl_coef=0.3),
        ObjectiveOptions(name="dr_grpo", kl="k2", kl_coef=0.3),
        ObjectiveOptions(name="gspo", clip_low=0.1, clip_high=0.1),
        ObjectiveOptions(name="tbpo", clip_high=0.1, band_low=0.5, band_high=0.5),
        ObjectiveOptions(name="cispo", clip_low=1e-9, clip_high=1e-9),  # constant weights: else not its own derivative
        ObjectiveOptions(name="rloo", sampler_correction={"weights": "token"}),
        ObjectiveOptions(name="reinforce", sampler_correction={"mask": "sequence"}),
        ObjectiveOptions(name="gspo", clip_low=0.1, clip_high=0.1, sampler_correction={"weights": "sequence"}),
    ],
    ids=lambda options: f"{options.name}-{options.kl}",
)
def test_gradients_are_those_of_finite_differences(options: ObjectiveOptions) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [4, 1, 7]

    def random(scale: float) -> Tensor:
        return torch.randn(12, generator=generator, dtype=torch.float64) * scale

    old = -random(1.0).abs() - 1
    logp, reference, sampler = old + random(0.4), old + random(0.5), old + random(0.3)
    advantages = torch.tensor([0.7, -1.2, 0.4], dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    factors = torch.from_numpy(sequence_coefficients(lengths, [1, 2, 1], options.aggregation, 9.0).repeat(lengths))

    def loss(at: Tensor) -> Tensor:
        given = inputs(at, old, advantages, lengths=lengths, sampler_logprobs=sampler, reference_logprobs=reference)
        return (token_losses(given, options).loss * factors).sum()

    leaf = logp.clone().requires_grad_()
    assert gradient_of(loss(leaf), leaf) == pytest.approx(finite_differences(loss, logp), rel=1e-5, abs=1e-8)
    assert any(gradient_of(loss(leaf), leaf))


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_over_parts_is_the_loss_of_the_whole(name: str) -> None:
    """Whole sequences may be given together or apart: no objective looks beyond one of them."""
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 5, 1, 4]
    old = -torch.rand(13, generator=generator) * 3
    logp, advantages = old + torch.randn(13, generator=generator) * 0.3, torch.randn(13, generator=generator)
    options = ObjectiveOptions(
        name=name,
        kl="none",
        sampler_correction={"weights": "sequence", "mask": "geometric", "low": 0.5, "high": 2.0},
    )
    sampler = old + torch.randn(13, generator=generator) * 0.1

    def part(first: int, last: int) -> Tensor:
        a, b = sum(lengths[:first]), sum(lengths[:last])
        given = inputs(logp[a:b], old[a:b], advantages[a:b], lengths=lengths[first:last], sampler_logprobs=sampler[a:b])
        return token_losses(given, options).loss

    apart = torch.cat([part(i, i + 1) for i in range(4)])
    assert torch.equal(part(0, 4), apart)
    assert torch.equal(torch.cat([part(0, 2), part(2, 4)]), apart)


# The gap between sampler and learner ---------------------------------------------------------------------------------


def corrected(correction: dict[str, Any], logs: list[float], lengths: list[int]) -> tuple[list[float], Any]:
    """Weights and metrics for log(pi_old / pi_sampler); the surrogate is -1 everywhere."""
    old = torch.full((len(logs),), -3.0, dtype=torch.float64)
    given = inputs(old, old, torch.ones_like(old), lengths=lengths, sampler_logprobs=old - tensor(*logs))
    losses = token_losses(given, ObjectiveOptions(sampler_correction=correction))
    return (-losses.loss).tolist(), losses.metrics


LOGS, LENGTHS = [0.5, -0.5, 1.0, -2.0, -1.0], [3, 2]  # of the responses: sums 1.0 and -3.0, means 0.3333 and -1.5


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({"weights": "token"}, [1.648721, 0.606531, 2.0, 0.135335, 0.367879]),  # TIS, at most 2
        ({"weights": "token", "truncate": None}, [1.648721, 0.606531, 2.718282, 0.135335, 0.367879]),
        ({"weights": "sequence"}, [2.0, 2.0, 2.0, 0.049787, 0.049787]),
        ({"weights": "sequence", "truncate": 5.0}, [2.718282, 2.718282, 2.718282, 0.049787, 0.049787]),
        ({"weights": "token", "mask": "token"}, [1.648721, 0.606531, 2.718282, 0.0, 0.0]),  # IcePop: 0.5 to 5
        ({"weights": "geometric"}, [1.395612, 1.395612, 1.395612, 0.5, 0.5]),  # TBPO, 0.5 to 2
        ({"weights": "geometric", "floor": None, "truncate": 1.2}, [1.2, 1.2, 1.2, 0.223130, 0.223130]),
        ({"weights": "token", "floor": 0.25}, [1.648721, 0.606531, 2.0, 0.25, 0.367879]),
        ({"mask": "token", "high": 2.0}, [1.0, 1.0, 0.0, 0.0, 0.0]),
        ({"mask": "token", "low": None, "high": 2.0}, [1.0, 1.0, 0.0, 1.0, 1.0]),
        ({"weights": "sequence", "mask": "sequence", "high": 3.0}, [2.718282, 2.718282, 2.718282, 0.0, 0.0]),
        ({"weights": "token", "mask": "geometric", "low": 0.5, "high": 2.0}, [1.648721, 0.606531, 2.718282, 0.0, 0.0]),
        ({"mask": "geometric"}, [0.0] * 5),  # 0.999 to 1.001
    ],
)
def test_importance_weights_by_hand(correction: dict[str, Any], weights: list[float]) -> None:
    assert corrected(correction, LOGS, LENGTHS)[0] == pytest.approx(weights, abs=1e-6)


def test_metrics_of_the_correction_by_hand() -> None:
    _, metrics = corrected({"weights": "token", "truncate": 1.5}, [math.log(2.0), 0.0, math.log(0.5)], [3])
    means = {name: float(values.double().mean()) for name, values in metrics.items()}
    prefix = "sampler_correction"
    assert means[f"{prefix}/truncated"] == pytest.approx(1 / 3)
    assert means[f"{prefix}/weight"] == pytest.approx((1.5 + 1.0 + 0.5) / 3)
    assert means["logprob_gap/k1"] == pytest.approx(0.0, abs=1e-12)  # mean of log pi_s - log pi_old
    assert means["logprob_gap/k3"] == pytest.approx((1 - math.log(2) + math.log(2) - 0.5) / 3)  # mean of w - 1 - log w
    derived = derived_metrics(means)
    _, both = corrected({"weights": "geometric", "truncate": 1.2}, LOGS, LENGTHS)
    assert both[f"{prefix}/truncated"].tolist() == [True] * 3 + [False] * 2
    assert both[f"{prefix}/raised"].tolist() == [False] * 3 + [True] * 2
    assert derived[f"{prefix}/effective_share"] == pytest.approx(1.0 / (3.5 / 3))  # (sum w)^2 / (n sum w^2)
    assert f"{prefix}/weight_squared" not in derived


@pytest.mark.parametrize("correction", [{}, {"weights": "sequence"}, {"mask": "token"}])
def test_the_gap_is_measured_whether_it_is_corrected_for_or_not(correction: dict[str, Any]) -> None:
    """Ratios 2, 1 and 1/2 of tokens, whatever the level of the correction."""
    _, metrics = corrected(correction, [math.log(2.0), 0.0, math.log(0.5)], [1, 2])
    assert metrics["logprob_gap/ratio"].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert metrics["logprob_gap/ratio_max"].max() == pytest.approx(2.0)
    assert metrics["logprob_gap/k1"].tolist() == pytest.approx([-math.log(2.0), 0.0, math.log(2.0)])
    assert metrics["logprob_gap/k3"].tolist() == pytest.approx([1 - math.log(2.0), 0.0, math.log(2.0) - 0.5])
    assert any(name.startswith("sampler_correction") for name in metrics) == bool(correction)


def test_k1_is_the_divergence_from_the_sampler_also_where_it_leaves_tokens_out() -> None:
    """By enumeration: the sampler draws from the nucleus of the learner's own distribution; k3 misses its loss."""
    learner = tensor(0.5, 0.3, 0.2).log()
    sampler = tensor(0.625, 0.375).log()  # top_k=2
    given = inputs(learner[:2], learner[:2], torch.ones(2), sampler_logprobs=sampler)
    metrics = token_losses(given, ObjectiveOptions()).metrics
    divergence = math.log(1 / 0.8)  # sum p_s log(p_s / p)
    assert float((sampler.exp() * metrics["logprob_gap/k1"]).sum()) == pytest.approx(divergence)
    assert float((sampler.exp() * metrics["logprob_gap/k3"]).sum()) == pytest.approx(divergence - 0.2)


def test_a_sampler_that_agrees_changes_no_bit() -> None:
    plain = token_losses(inputs(tensor(-1.0, -2.0), tensor(-1.1, -2.2), tensor(1.0, -1.0)), ObjectiveOptions())
    for correction in ({"weights": "token"}, {"weights": "sequence"}, {"mask": "geometric"}):
        options = ObjectiveOptions(sampler_correction=correction)
        assert torch.equal(
            token_losses(inputs(tensor(-1.0, -2.0), tensor(-1.1, -2.2), tensor(1.0, -1.0)), options).loss, plain.loss
        )


def test_weights_multiply_the_surrogate_and_neither_kl_nor_entropy() -> None:
    options = ObjectiveOptions(
        kl="k2",
        kl_coef=0.5,
        entropy_coef=0.1,
        sampler_correction={"weights": "token", "truncate": None},
    )
    entropy = tensor(2.0).requires_grad_()
    given = inputs(
        tensor(-1.0),
        tensor(-1.0),
        tensor(1.0),
        sampler_logprobs=tensor(-1.0 - math.log(3.0)),
        reference_logprobs=tensor(-2.0),
        entropy=entropy,
    )
    loss = token_losses(given, options).loss
    assert loss.item() == pytest.approx(-3.0 + 0.5 * 0.5 - 0.1 * 2.0)
    assert gradient_of(loss.sum(), entropy) == pytest.approx([-0.1])


# Extremes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("logprob", [-math.inf, -500.0, 0.0])
@pytest.mark.parametrize("old", [-math.inf, -500.0, 0.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_extreme_log_probs_give_neither_nan_nor_infinity(
    name: str, logprob: float, old: float, advantage: float
) -> None:
    options = ObjectiveOptions(
        name=name,
        kl="k3",
        kl_coef=0.1,
        kl_in="loss",
        sampler_correction={"weights": "token", "mask": "geometric"},
    )
    logp = torch.tensor([logprob, -1.0], requires_grad=True)
    given = inputs(
        logp,
        torch.tensor([old, -1.0]),
        torch.tensor([advantage, 1.0]),
        sampler_logprobs=torch.tensor([-1.0, old]),
        reference_logprobs=torch.tensor([old, -1.0]),
    )
    losses = token_losses(given, options)
    assert torch.isfinite(losses.loss).all()
    assert all(math.isfinite(g) for g in gradient_of(losses.loss.sum(), logp))
    assert all(torch.isfinite(values.float()).all() for values in losses.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_network_that_computes_nan_is_not_hidden(name: str) -> None:
    """Infinities are bounded; NaN must reach the check that stops the run."""
    logp = torch.tensor([math.nan, -1.0])
    given = inputs(logp, torch.tensor([-1.0, -1.0]), torch.ones(2))
    assert token_losses(given, ObjectiveOptions(name=name, kl="none")).loss.isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_work_computes_nothing_and_names_the_same_metrics(name: str) -> None:
    options = ObjectiveOptions(
        name=name,
        kl="none",
        sampler_correction={"weights": "sequence", "mask": "geometric"},
    )
    empty, one = torch.zeros(0), torch.zeros(1)
    nothing = token_losses(inputs(empty, empty, empty, lengths=[]), options)
    something = token_losses(inputs(one, one, one), options)
    assert nothing.loss.shape == (0,)
    assert list(nothing.metrics) == list(something.metrics)


def test_the_table_has_every_loss() -> None:
    assert {ObjectiveOptions(name=name).loss for name in NAMES} == set(LOSSES)
