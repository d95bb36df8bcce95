"""What the suites of public trainers assert about objectives, restated: their inputs and numbers, ours to compute.

Each test names the project and what its test is about. Clipping, reductions and KL are in test_public_semantics.py.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from config.objective import ObjectiveOptions
from policies.objectives import TokenLosses, sequence_coefficients, token_losses
from tests.policies.objectives import inputs

SYMMETRIC: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
CLIP = ObjectiveOptions(clip_dual=None, **SYMMETRIC)
CISPO = ObjectiveOptions(name="cispo", **SYMMETRIC)
GSPO = ObjectiveOptions(name="gspo", **SYMMETRIC)


def computed(
    logprobs: list[float],
    old: list[float],
    advantages: list[float],
    options: ObjectiveOptions,
    *,
    sampler: list[float] | None = None,
    lengths: list[int] | None = None,
) -> TokenLosses:
    given = inputs(
        torch.tensor(logprobs),
        torch.tensor(old),
        torch.tensor(advantages),
        lengths=lengths,
        sampler_logprobs=None if sampler is None else torch.tensor(sampler),
    )
    return token_losses(given, options)


def corrected(correction: dict[str, Any], base: ObjectiveOptions = CLIP) -> ObjectiveOptions:
    return ObjectiveOptions(**(base.model_dump() | {"sampler_correction": correction}))


def weights(
    old: list[float], sampler: list[float], correction: dict[str, Any], lengths: list[int] | None = None
) -> list[float]:
    """The surrogate is -1 for all tokens: what is left is the weight."""
    ones = [1.0] * len(old)
    loss: Tensor = -computed(old, old, ones, corrected(correction), sampler=sampler, lengths=lengths).loss
    return [float(w) for w in loss]


# Ratios 0.5, 1 and 1.5 of NeMo-RL's clipped losses; 0.5, 1 and 10 of its and SkyRL's dual clip and CISPO.
HALF_TO_1_5 = ([-1.69315, -1.0, -0.59453], [-1.0, -1.0, -1.0], [1.0, -1.0, 2.0])
HALF_TO_10 = ([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0])
GENERATED = [-0.5, -1.5, -0.8]  # NeMo-RL's generation log-probs: weights 0.6065, 1.6487, 0.8187


def test_nemo_ppo_clipping() -> None:
    assert computed(*HALF_TO_1_5, CLIP).loss.mean().item() == pytest.approx(-0.6333, abs=1e-4)


def test_nemo_reinforce() -> None:
    losses = computed([-0.5, -1.0, -1.5], [0.0, 0.0, 0.0], [1.0, -1.0, 2.0], ObjectiveOptions(name="reinforce"))
    assert losses.loss.tolist() == pytest.approx([0.5, -1.0, 3.0])
    assert losses.loss.mean().item() == pytest.approx(0.8333, abs=1e-4)


def test_skyrl_dual_clip() -> None:
    options = ObjectiveOptions(clip_dual=3.0, **SYMMETRIC)
    assert computed(*HALF_TO_10, options).loss.mean().item() == pytest.approx(4.1667, abs=1e-3)


def test_skyrl_cispo() -> None:
    """-A clip(r) log pi with weights 0.8, 1, 1.2."""
    losses = computed(*HALF_TO_10, CISPO).loss
    assert losses.tolist() == pytest.approx([1.35452, -1.0, -3.347568], abs=1e-4)


def test_nemo_cispo_and_its_correction() -> None:
    """-A clip(r) log pi with weights 0.8, 1, 1.2; then each times the weight of the generation."""
    assert computed(*HALF_TO_1_5, CISPO).loss.tolist() == pytest.approx([1.35452, -1.0, 1.426872], abs=1e-4)
    options = corrected({"weights": "token", "truncate": None}, CISPO)
    losses = computed(*HALF_TO_1_5, options, sampler=GENERATED).loss
    assert losses.tolist() == pytest.approx([0.8215, -1.6487, 1.1682], abs=1e-3)


def test_slime_cispo_matches_the_formula_with_a_detached_ratio() -> None:
    """Ratios 1, e and 1, cut at 1.5 and not below; only the second is cut, and each token's gradient is -w A."""
    logp = torch.tensor([0.0, 0.5, -1.0], requires_grad=True)
    given = inputs(logp, torch.tensor([0.0, -0.5, -1.0]), torch.tensor([1.0, -2.0, 0.25]))
    losses = token_losses(given, ObjectiveOptions(name="cispo", clip_high=0.5))
    assert losses.loss.tolist() == pytest.approx([0.0, 1.5, 0.25])
    assert losses.metrics["clip_fraction"].tolist() == [False, True, False]
    losses.loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-1.0, 3.0, -0.25])


def test_nemo_gspo_of_one_sequence_and_of_two() -> None:
    """s = 0.9086 for mixed advantages inside the band: mean -0.6057; s = 2.4697 is cut where the advantage is > 0."""
    one = computed(*HALF_TO_1_5, GSPO).loss
    assert one.tolist() == pytest.approx([-0.9086, 0.9086, -1.8171], abs=1e-4)
    assert one.mean().item() == pytest.approx(-0.6057, abs=1e-4)
    logprobs, _, advantages = HALF_TO_1_5
    two = computed(logprobs * 2, [-1.0] * 3 + [-2.0] * 3, advantages * 2, GSPO, lengths=[3, 3]).loss
    assert two.tolist() == pytest.approx([-0.9086, 0.9086, -1.8171, -1.2, 2.4697, -2.4], abs=1e-4)


def test_areal_packed_sequences_have_their_own_geometric_mean() -> None:
    """Lengths 3, 5 and 4 with log ratios 0.5, 1 and 1.5 all along: bad tokens are not cut, so the loss is s."""
    lengths = [3, 5, 4]
    ratios = [0.5] * 3 + [1.0] * 5 + [1.5] * 4
    losses = computed(ratios, [0.0] * 12, [-1.0] * 12, GSPO, lengths=lengths).loss
    assert losses.tolist() == pytest.approx([math.e**0.5] * 3 + [math.e] * 5 + [math.e**1.5] * 4)


def test_areal_sequence_level_loss_at_ratio_one_is_minus_the_mean_advantage() -> None:
    advantages = [1.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.5, 0.5]
    losses = computed([1.0] * 8, [1.0] * 8, advantages, GSPO, lengths=[4, 4]).loss
    assert losses.mean().item() == pytest.approx(-1.5)


def test_skyrl_gspo_and_ppo_with_three_masked_sequences() -> None:
    """Its three responses of 5, 2 and 4 tokens with extreme ratios: sequence means of the clipped products."""
    lengths = [5, 2, 4]
    logprobs = [0.2, -2.5, -0.3, 0.1, -1.8, 0.8, -0.2, -0.5, 0.3, -1.7, 0.4]
    advantages = [1.5, 2.0, 1.0, 0.8, 0.5, 3.0, 1.5, 0.5, 0.8, 1.2, 2.5]
    losses = computed(logprobs, [-1.0] * 11, advantages, GSPO, lengths=lengths)
    # mean log ratios 0.14, 1.3 and 0.625: s = 1.1503, 3.6693 (cut to 1.2), 1.8682 (cut to 1.2)
    expected = [-1.150274 * a for a in advantages[:5]] + [-1.2 * a for a in advantages[5:]]
    assert losses.loss.tolist() == pytest.approx(expected, abs=1e-5)
    factors = torch.from_numpy(sequence_coefficients(lengths, [1] * 3, "seq_mean_token_mean").repeat(lengths))
    assert float((losses.loss * factors).sum()) == pytest.approx(-(1.150274 * 1.16 + 1.2 * 2.25 + 1.2 * 1.25) / 3)
    token = computed(logprobs, [-1.0] * 11, advantages, CLIP, lengths=lengths)
    assert token.metrics["clip_fraction"].sum() != losses.metrics["clip_fraction"].sum()


# The gap between sampler and learner: verl rollout_corr, SkyRL off_policy_correction, NeMo-RL -------------------------


def test_skyrl_tis_by_token_and_by_sequence() -> None:
    old, sampler = [-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5]
    assert weights(old, sampler, {"weights": "token", "truncate": 2.0}) == pytest.approx(
        [1.6487, 0.6065, 2.0], abs=1e-4
    )
    by_sequence = weights(old, sampler, {"weights": "sequence", "truncate": 5.0})
    assert by_sequence == pytest.approx([2.7183] * 3, abs=1e-4)
    assert weights([-1.0] * 3, [-2.0] * 3, {"weights": "sequence", "truncate": 5.0}) == pytest.approx([5.0] * 3)


@pytest.mark.parametrize(
    ("old", "sampler", "correction", "kept"),
    [
        ([-1.0, -1.1, -1.0], [-1.1, -1.0, -1.0], {"mask": "geometric", "low": 0.9, "high": 1.1}, True),
        ([-1.0, -1.0, -1.0], [-1.5, -1.5, -1.5], {"mask": "geometric", "low": 0.9, "high": 1.1}, False),
        ([-1.0, -1.1, -1.2], [-1.2, -1.2, -1.2], {"mask": "sequence", "low": 0.5, "high": 2.0}, True),
        ([-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0], {"mask": "sequence", "low": 0.5, "high": 2.0}, False),
    ],
)
def test_skyrl_sequence_masks(old: list[float], sampler: list[float], correction: dict[str, Any], kept: bool) -> None:
    assert weights(old, sampler, correction) == [float(kept)] * 3


def test_skyrl_truncation_and_a_geometric_mask_together() -> None:
    both = {"weights": "token", "truncate": 2.0, "mask": "geometric", "low": 0.8, "high": 1.2}
    assert weights([-1.0] * 3, [-1.1] * 3, both) == pytest.approx([math.exp(0.1)] * 3)


def test_verl_rejects_by_token_and_caps_what_is_left() -> None:
    """Sequences at ratio 0.37 and 1.65 with bounds 0.5 and 2: the first is rejected, half of all tokens."""
    correction = {"weights": "token", "truncate": 2.0, "mask": "token", "low": 0.5, "high": 2.0}
    old, sampler = [-2.0] * 10, [-1.0] * 5 + [-2.5] * 5
    assert weights(old, sampler, correction, [5, 5]) == pytest.approx([0.0] * 5 + [1.6487] * 5, abs=1e-4)
    losses = computed(old, old, [1.0] * 10, corrected(correction), sampler=sampler, lengths=[5, 5])
    assert losses.metrics["sampler_correction/masked"].float().mean() == 0.5


def test_verl_weights_are_capped_and_equal_within_a_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(40, generator=generator)
    sampler = old + 0.5 * torch.randn(40, generator=generator)
    by_token = weights(old.tolist(), sampler.tolist(), {"weights": "token", "truncate": 2.0}, [10] * 4)
    assert max(by_token) == 2.0
    by_sequence = weights(old.tolist(), sampler.tolist(), {"weights": "sequence", "truncate": 5.0}, [10] * 4)
    assert [len(set(by_sequence[i : i + 10])) for i in range(0, 40, 10)] == [1] * 4


def test_verl_measures_the_gap_by_k1_and_k3() -> None:
    """mismatch_kl = mean(log pi_s - log pi_old); mismatch_k3_kl = mean(w - log w - 1)."""
    old, sampler = [-2.0, -1.0], [-1.5, -1.2]
    losses = computed(old, old, [1.0, 1.0], corrected({"weights": "token"}), sampler=sampler)
    assert losses.metrics["logprob_gap/k1"].tolist() == pytest.approx([0.5, -0.2])
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.2) - 0.2 - 1]
    assert losses.metrics["logprob_gap/k3"].tolist() == pytest.approx(k3, abs=1e-6)


def test_nemo_importance_sampling_without_a_cap() -> None:
    options = corrected({"weights": "token", "truncate": None})
    losses = computed(*HALF_TO_1_5, options, sampler=GENERATED).loss
    assert losses.tolist() == pytest.approx([-0.30325, 1.6487, -1.96488], abs=1e-3)
    assert losses.mean().item() == pytest.approx(-0.2065, abs=1e-3)


def test_nemo_truncated_importance_sampling_of_tokens_and_of_sequences() -> None:
    """Capped at 0.8: by token 0.6065, 0.8, 0.8; by sequence e^-0.2 = 0.8187 becomes 0.8, with GSPO's ratio."""
    by_token = computed(*HALF_TO_1_5, corrected({"weights": "token", "truncate": 0.8}), sampler=GENERATED).loss
    assert by_token.tolist() == pytest.approx([-0.3033, 0.8, -1.92], abs=1e-3)
    assert by_token.mean().item() == pytest.approx(-0.4744, abs=1e-3)
    options = corrected({"weights": "sequence", "truncate": 0.8}, GSPO)
    by_sequence = computed(*HALF_TO_1_5, options, sampler=GENERATED).loss
    assert by_sequence.tolist() == pytest.approx([-0.7268, 0.7268, -1.4537], abs=1e-3)
    assert by_sequence.mean().item() == pytest.approx(-0.4846, abs=1e-3)


def test_nemo_icepop_zeroes_weights_outside_its_bounds() -> None:
    correction = {"weights": "token", "mask": "token", "low": 0.5, "high": 5.0}
    found = weights([-1.0] * 3, [-0.5, -3.5, -0.8], correction)
    assert found == pytest.approx([0.6065, 0.0, 0.8187], abs=1e-4)


def test_nemo_mask_by_the_geometric_mean_with_weights_of_tokens() -> None:
    """seq-mask-tis: e^0.0005 lies within 0.999 and 1.002; one impossible token of the engine's masks the response."""
    correction = {"weights": "token", "mask": "geometric", "low": 0.999, "high": 1.002}
    assert weights([-1.0] * 3, [-1.0005] * 3, correction) == pytest.approx([math.exp(0.0005)] * 3)
    assert weights([-1.0] * 3, [-1.0005, -math.inf, -1.0005], correction) == [0.0] * 3


def test_nemo_counts_the_weights_out_of_bounds() -> None:
    old = [math.log(1.0), math.log(3.0), math.log(0.5)]
    losses = computed(old, old, [1.0] * 3, corrected({"weights": "token", "truncate": 2.0}), sampler=[0.0] * 3)
    assert losses.metrics["sampler_correction/truncated"].float().mean().item() == pytest.approx(1 / 3)
    assert (-losses.loss).tolist() == pytest.approx([1.0, 2.0, 0.5])
