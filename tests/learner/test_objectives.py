"""Objectives inside the learner: how a step is cut changes no loss, advantages may differ by token, entropy has its
gradient, and the KL to the reference comes back in order."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.training import batches
from actors.training.network import chunk_logprobs
from actors.training.parallel import Rank
from config.learner import OptimizerOptions
from config.objective import ObjectiveOptions
from contracts.training import StepResult, TrainSequence
from policies.kl import kl_values
from tests.learner.tiny import direct_logprobs, make_sequences, make_trainer

CORRECTED = {"weights": "token", "mask": "sequence", "low": 1e-6, "high": 1e6}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"name": "gspo", "sampler_correction": {"weights": "sequence"}},
    "tbpo": {"name": "tbpo"},
    "cispo": {"name": "cispo", "entropy_coef": 0.02, "sampler_correction": CORRECTED},
    "dr_grpo": {"name": "dr_grpo", "sum_divisor": 20.0, "kl": "k2", "kl_coef": 0.1},
    "rloo": {"name": "rloo", "entropy_coef": 0.02},
    "reinforce_pp_baseline": {"name": "reinforce_pp_baseline", "sampler_correction": {"mask": "geometric", "low": 0.1}},
}


def sampled(model_dir: Path, seed: int = 0, temperature: float = 0.8) -> list[TrainSequence]:
    """Of an engine that is a little off: its log-probs differ from the learner's by 0.3."""
    rng, sequences = np.random.default_rng(seed), make_sequences(seed=seed)
    found = direct_logprobs(model_dir, sequences, temperature)
    return [
        replace(s, sampler_logprobs=(lp.numpy() + rng.normal(0, 0.3, len(lp))).astype(np.float32))
        for s, lp in zip(sequences, found, strict=True)
    ]


def numbers(result: StepResult) -> list[float]:
    return [*result.losses, *result.grad_norms, *(result.metrics[key] for key in sorted(result.metrics))]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_change_no_loss_gradient_or_metric(model_dir: Path, name: str) -> None:
    def run(**learner: object) -> list[float]:
        options = ObjectiveOptions(**OBJECTIVES[name])
        trainer = make_trainer(model_dir, objective=options, mini_batches=2, **learner)
        return numbers(trainer.rl_step(sampled(model_dir), temperature=0.8))

    whole = run()
    assert run(micro_batch_tokens=40) == pytest.approx(whole, rel=2e-4, abs=2e-6)
    assert run(packing=False, micro_batch_tokens=64) == pytest.approx(whole, rel=2e-4, abs=2e-6)


def test_the_correction_is_measured(model_dir: Path) -> None:
    options = ObjectiveOptions(sampler_correction={"weights": "token", "truncate": None})
    sequences = sampled(model_dir)
    metrics = make_trainer(model_dir, objective=options).rl_step(sequences, temperature=0.8).metrics
    learner = torch.cat(direct_logprobs(model_dir, sequences, 0.8))
    gaps = learner - torch.from_numpy(np.concatenate([s.sampler_logprobs for s in sequences]))
    weights = gaps.exp()
    assert metrics["sampler_correction/weight"] == pytest.approx(float(weights.mean()), rel=1e-4)
    share = float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
    assert metrics["sampler_correction/effective_share"] == pytest.approx(share, rel=1e-4)
    assert metrics["logprob_gap/k1"] == pytest.approx(-float(gaps.mean()), rel=1e-3)
    assert metrics["logprob_gap/ratio"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert metrics["logprob_gap/ratio_max"] == pytest.approx(float(weights.max()), rel=1e-4)
    plain = step(model_dir, make_sequences()).metrics
    assert not any(key.startswith("sampler_correction") for key in plain)
    assert {"logprob_gap/k1", "logprob_gap/k3", "logprob_gap/ratio", "logprob_gap/ratio_max"} <= plain.keys()


def test_the_extremes_of_ratios_are_those_of_all_micro_batches(model_dir: Path) -> None:
    """Of the second mini-batch they are what the update on the first has moved; of the first they are 1."""
    sequences, optimizer = make_sequences(), OptimizerOptions(lr=1e-2)
    half = len(sequences) // 2
    updated = make_trainer(model_dir, packing=False, micro_batch_tokens=10**6, optimizer=optimizer)
    (old,) = updated.logprobs(sequences[half:], temperature=1.0)
    updated.rl_step(sequences[:half], temperature=1.0)
    (new,) = updated.logprobs(sequences[half:], temperature=1.0)
    lengths = [len(s.response_tokens) for s in sequences]
    means = torch.stack([moved.mean() for moved in torch.split(new - old, lengths[half:])])
    found = make_trainer(model_dir, mini_batches=2, micro_batch_tokens=40, optimizer=optimizer)
    metrics = found.rl_step(sequences, temperature=1.0).metrics
    expected = {
        "ratio/token_max": max(1.0, float((new - old).max().exp())),
        "ratio/token_min": min(1.0, float((new - old).min().exp())),
        "ratio/sequence_max": max(1.0, float(means.max().exp())),
        "ratio/sequence_min": min(1.0, float(means.min().exp())),
        "ratio/sequence_distance": float((means.abs() * torch.tensor(lengths[half:])).sum()) / sum(lengths),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert metrics["ratio/token_min"] < 0.99 < 1.01 < metrics["ratio/token_max"]


def step(model_dir: Path, sequences: list[TrainSequence], **objective: Any) -> StepResult:
    return make_trainer(model_dir, objective=ObjectiveOptions(**objective)).rl_step(sequences, temperature=1.0)


def test_an_advantage_for_each_token_may_be_the_same_for_all(model_dir: Path) -> None:
    sequences = make_sequences()
    spread = [replace(s, advantage=np.full(len(s.response_tokens), s.advantage)) for s in sequences]
    assert numbers(step(model_dir, spread)) == numbers(step(model_dir, sequences))


def test_advantages_of_tokens_weigh_each_its_own(model_dir: Path) -> None:
    rng = np.random.default_rng(4)
    sequences = [replace(s, advantage=rng.normal(size=len(s.response_tokens))) for s in make_sequences()]
    w = np.array([s.weight for s in sequences])
    totals = np.array([np.sum(s.advantage) for s in sequences])
    lengths = np.array([len(s.response_tokens) for s in sequences])
    assert step(model_dir, sequences).losses == pytest.approx([-(w * totals).sum() / (w * lengths).sum()], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_a_response_is_never_cut_and_comes_with_what_belongs_to_it(ranks: int, packing: bool) -> None:
    sequences = [
        replace(
            s, sampler_logprobs=np.full(len(s.response_tokens), -i, np.float32), advantage=float(i), sampler=f"w{i % 2}"
        )
        for i, s in enumerate(make_sequences(17))
    ]
    found = []
    for index in range(ranks):
        mini = batches.build_mini_batch(
            sequences,
            np.arange(17.0),
            Rank(index, ranks),
            budget_tokens=30,
            packing=packing,
            samplers={"w0": 0, "w1": 1},
        )
        for batch in mini.micro:
            assert batch.segments[0] == 0
            assert batch.segments[-1] == len(batch.rows)
            for i, (a, b) in zip(batch.indices, torch.stack((batch.segments[:-1], batch.segments[1:]), 1), strict=True):
                part = slice(int(a), int(b))
                assert batch.targets[part].tolist() == sequences[i].response_tokens.tolist()
                expected = {"advantages": i, "sampler_logprobs": -i, "coefficients": i, "samplers": i % 2}
                assert {key: set(getattr(batch, key)[part].tolist()) for key in expected} == {
                    key: {value} for key, value in expected.items()
                }
                found.append(i)
    assert sorted(found) == list(range(17))


def test_bad_advantages_and_log_probs_are_named(model_dir: Path) -> None:
    (good,) = make_sequences(1)
    length = len(good.response_tokens)
    with pytest.raises(ValueError, match=rf"sequence 0: advantages of shape \({length + 1},\) for {length} response"):
        step(model_dir, [replace(good, advantage=np.zeros(length + 1))])
    with pytest.raises(ValueError, match="sequence 0: advantage is"):
        step(model_dir, [replace(good, advantage=np.full(length, np.nan))])
    with pytest.raises(ValueError, match=rf"sequence 0: {length + 2} log-probs for {length} response"):
        step(model_dir, [replace(good, sampler_logprobs=np.zeros(length + 2, np.float32))])


def test_the_gradient_of_the_entropy_by_hand() -> None:
    """dH/dz = -p (log p + H) / T for logits z; chunks of the head change nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, requires_grad=True)
    targets = torch.zeros(5, dtype=torch.int64)
    _, _, entropy = chunk_logprobs(lambda hidden: hidden, logits, targets, 0.5, True)
    entropy.sum().backward()
    p = torch.softmax(logits.detach() / 0.5, -1)
    h = -(p * p.log()).sum(-1, keepdim=True)
    torch.testing.assert_close(logits.grad, -p * (p.log() + h) / 0.5)
    assert not chunk_logprobs(lambda hidden: hidden, logits, targets, 0.5)[2].requires_grad


def test_an_entropy_bonus_lowers_the_loss_by_it_and_raises_the_entropy(model_dir: Path) -> None:
    def entropies(coef: float) -> tuple[list[float], list[float]]:
        objective = ObjectiveOptions(entropy_coef=coef)
        trainer = make_trainer(model_dir, objective=objective, optimizer=OptimizerOptions(lr=1e-3))
        trainer.module.chunk_rows = 16
        results = [trainer.rl_step(make_sequences(), temperature=1.0) for _ in range(4)]
        return [r.losses[0] for r in results], [r.metrics["entropy"] for r in results]

    plain, bonus = entropies(0.0), entropies(2.0)
    # The metric is a mean over tokens, the loss one over weighted tokens: equal weights make them comparable.
    assert bonus[0][0] < plain[0][0] - 2.0
    assert bonus[1][0] == plain[1][0]
    assert bonus[1][-1] > plain[1][-1]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_to_the_reference_of_every_token_in_the_order_of_the_sequences(model_dir: Path, estimator: Any) -> None:
    objective = ObjectiveOptions(kl=estimator, kl_in="reward", kl_coef=0.1)
    trainer = make_trainer(model_dir, objective=objective, micro_batch_tokens=40)
    sequences = make_sequences()
    reference = direct_logprobs(model_dir, sequences, 0.8)
    start = trainer.reference_kl(sequences, temperature=0.8)
    assert all(np.abs(values).max() < 1e-5 for values in start.values())
    assert "kl" not in trainer.rl_step(make_sequences(seed=3), temperature=0.8).metrics  # no term of the loss

    moved = trainer.reference_kl(sequences, temperature=0.8)
    padded = make_trainer(model_dir, packing=False, micro_batch_tokens=10**6)
    padded.module.load_state_dict(trainer.module.state_dict())
    (now,) = padded.logprobs(sequences, temperature=0.8)
    parts = torch.split(now.double(), [len(s.response_tokens) for s in sequences])
    assert sorted(moved) == list(range(len(sequences)))
    for i, (new, ref) in enumerate(zip(parts, reference, strict=True)):
        expected = kl_values(new, ref, estimator).numpy()
        assert moved[i] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert max(np.abs(values).max() for values in moved.values()) > 1e-2


def test_without_a_reference_there_is_no_kl_to_it(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"objective\.kl is none"):
        make_trainer(model_dir).reference_kl(make_sequences(), temperature=1.0)


def test_a_divisor_that_nobody_set_is_named(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"objective\.sum_divisor is not set"):
        step(model_dir, make_sequences(), name="dr_grpo")
    assert math.isfinite(step(model_dir, make_sequences(), name="dr_grpo", sum_divisor=20).losses[0])
