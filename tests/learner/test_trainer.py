"""The learner's step: invariances, metrics, numerics options, golden losses, and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.training.batches import split_mini_batches
from actors.training.errors import NonFiniteError
from actors.training.network import LogProbModel, chunk_logprobs
from config.learner import OptimizerOptions
from config.objective import ObjectiveOptions
from contracts.training import Demonstration, StepResult
from models.checkpoint import hf_state_dict, init_model
from models.checksum import checksum
from models.packed import PackedContext
from models.weights import unpack
from tests.learner.tiny import (
    direct_logprobs,
    make_demonstrations,
    make_sequences,
    make_trainer,
    write_config,
)

KL = ObjectiveOptions(kl="k3", kl_coef=0.05, clip_low=0.01, clip_high=0.02)


def run(model_dir: Path, steps: int = 2, objective: ObjectiveOptions = KL, **learner: object) -> list[StepResult]:
    trainer = make_trainer(model_dir, objective=objective, mini_batches=2, **learner)
    return [trainer.rl_step(make_sequences(seed=i), temperature=0.8) for i in range(steps)]


def numbers(results: list[StepResult]) -> list[tuple[float, ...]]:
    return [r.losses + r.grad_norms + tuple(r.metrics[k] for k in sorted(r.metrics)) for r in results]


def test_same_calls_give_bitwise_the_same_numbers(model_dir: Path) -> None:
    assert numbers(run(model_dir)) == numbers(run(model_dir))


@pytest.mark.parametrize(
    "learner",
    [
        {"micro_batch_tokens": 40},
        {"micro_batch_tokens": 1},
        {"packing": False},
        {"packing": False, "micro_batch_tokens": 64},
        {"activation_checkpointing": True},
    ],
    ids=str,
)
def test_how_it_is_computed_does_not_change_what(model_dir: Path, learner: dict[str, object]) -> None:
    for got, expected in zip(numbers(run(model_dir, **learner)), numbers(run(model_dir)), strict=True):
        assert got == pytest.approx(expected, rel=2e-4, abs=2e-6)


def test_both_implementations_give_the_same_numbers(model_dir: Path, tmp_path: Path) -> None:
    """An oracle that shares no code with ours: transformers' own Qwen3."""
    make_trainer(model_dir).weights.export(tmp_path / "model")
    ours = run(tmp_path / "model", init="checkpoint")
    theirs = run(tmp_path / "model", init="checkpoint", implementation="transformers")
    for got, expected in zip(numbers(theirs), numbers(ours), strict=True):
        assert got == pytest.approx(expected, rel=5e-4, abs=5e-6)


def test_a_step_moves_the_weights_alike_in_any_cut(model_dir: Path) -> None:
    def weights(**learner: object) -> torch.Tensor:
        optimizer = OptimizerOptions(lr=1e-2, eps=1e-3)  # a large eps: Adam's sign-like first steps amplify rounding
        trainer = make_trainer(model_dir, optimizer=optimizer, **learner)
        trainer.rl_step(make_sequences(), temperature=1.0)
        return torch.cat([p.detach().flatten() for p in trainer.module.parameters()])

    whole = weights()
    torch.testing.assert_close(weights(micro_batch_tokens=30), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(weights(packing=False), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_direct_forward(model_dir: Path, temperature: float) -> None:
    sequences = make_sequences()
    expected = torch.cat(direct_logprobs(model_dir, sequences, temperature))
    trainer = make_trainer(model_dir, packing=False, micro_batch_tokens=10**6)  # padded: keeps the order
    (got,) = trainer.logprobs(sequences, temperature=temperature)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_chunks_change_neither_values_nor_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(17, 8, generator=generator, requires_grad=True)
    start = torch.randn(23, 8, generator=generator)
    targets = torch.randint(0, 17, (23,), generator=generator)

    class Fake(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, context: object) -> torch.Tensor:
            return hidden[tokens]

        def logits(self, rows: torch.Tensor) -> torch.Tensor:
            return rows @ head.T

    results: list[Any] = []
    for chunk_rows in (4, 23):
        hidden = start.clone().requires_grad_()
        module = LogProbModel.__new__(LogProbModel)
        torch.nn.Module.__init__(module)
        module.network, module.chunk_rows = Fake(), chunk_rows  # type: ignore[assignment]
        rows = torch.arange(23)
        out = module(rows, PackedContext.from_lengths([23]), rows, targets, 0.7)
        results.append((*out, *torch.autograd.grad((out[0] * torch.linspace(0, 1, 23)).sum(), (head, hidden))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    entropy = torch.distributions.Categorical(logits=start @ head.detach().T / 0.7).entropy()
    torch.testing.assert_close(results[0][2], entropy, rtol=1e-5, atol=1e-5)


def test_chunk_logprobs_never_sees_more_rows_than_its_budget(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(model_dir)
    trainer.module.chunk_rows = 16
    seen: list[int] = []

    def spy(head: object, hidden: torch.Tensor, *rest: object) -> object:
        seen.append(len(hidden))
        return chunk_logprobs(head, hidden, *rest)

    monkeypatch.setattr("actors.training.network.chunk_logprobs", spy)
    trainer.rl_step(make_sequences(), temperature=1.0)
    assert max(seen) == 16
    assert sum(seen) >= sum(len(s.response_tokens) for s in make_sequences())


def test_gap_is_measured_over_the_whole_step_against_the_old_weights(model_dir: Path) -> None:
    sequences = [
        replace(s, sampler_logprobs_t1=lp.float().numpy())
        for s, lp in zip(make_sequences(), direct_logprobs(model_dir, make_sequences()), strict=True)
    ]
    trainer = make_trainer(model_dir, mini_batches=3, optimizer=OptimizerOptions(lr=0.1))
    exact = trainer.rl_step(sequences, temperature=0.7).metrics
    assert exact["logprob_gap/max"] < 1e-4
    assert exact["kl_old"] > 1e-3  # the later mini-batches did see other weights

    assert sequences[-1].sampler_logprobs_t1 is not None
    shifted = sequences[-1].sampler_logprobs_t1.copy()
    shifted[0] += 0.5
    wrong = [*sequences[:-1], replace(sequences[-1], sampler_logprobs_t1=shifted)]
    trainer = make_trainer(model_dir, mini_batches=3, optimizer=OptimizerOptions(lr=0.1))
    found = trainer.rl_step(wrong, temperature=0.7).metrics
    tokens = sum(len(s.response_tokens) for s in sequences)
    assert found["logprob_gap/max"] == pytest.approx(0.5, abs=1e-4)
    assert found["logprob_gap/mean"] == pytest.approx(0.5 / tokens, abs=1e-5)


def test_without_log_probs_at_temperature_1_the_gap_is_measured_at_the_sampling_temperature(model_dir: Path) -> None:
    drawn = direct_logprobs(model_dir, make_sequences(), temperature=0.7)
    sequences = [
        replace(s, sampler_logprobs=lp.float().numpy(), sampler_logprobs_t1=None)
        for s, lp in zip(make_sequences(), drawn, strict=True)
    ]
    assert make_trainer(model_dir).rl_step(sequences, temperature=0.7).metrics["logprob_gap/max"] < 1e-4
    assert make_trainer(model_dir).rl_step(sequences, temperature=1.0).metrics["logprob_gap/max"] > 1e-2
    sequences[-1].sampler_logprobs[0] += 0.5
    gap = make_trainer(model_dir).rl_step(sequences, temperature=0.7).metrics["logprob_gap/max"]
    assert gap == pytest.approx(0.5, abs=1e-4)


def test_one_mini_batch_is_on_policy(model_dir: Path) -> None:
    result = make_trainer(model_dir).rl_step(make_sequences(), temperature=1.0)
    sequences = make_sequences()
    w = np.array([s.weight for s in sequences])
    t = np.array([len(s.response_tokens) for s in sequences])
    a = np.array([s.advantage for s in sequences])
    assert result.losses == pytest.approx([-(w * t * a).sum() / (w * t).sum()], rel=1e-5)  # ratio 1 everywhere
    assert result.metrics["clip_fraction"] == 0
    assert result.metrics["kl_old"] == 0


def test_a_sequence_of_weight_zero_changes_nothing(model_dir: Path) -> None:
    sequences = make_sequences(4)
    ignored = [*sequences, replace(make_sequences(1, seed=9)[0], weight=0.0, advantage=100.0)]
    with_it = make_trainer(model_dir).rl_step(ignored, temperature=1.0)
    without = make_trainer(model_dir).rl_step(sequences, temperature=1.0)
    assert with_it.losses == pytest.approx(without.losses, rel=1e-5)
    assert with_it.grad_norms == pytest.approx(without.grad_norms, rel=1e-4)


def test_supervised_loss_is_the_mean_cross_entropy_and_falls(model_dir: Path) -> None:
    demonstrations = make_demonstrations()
    trainer = make_trainer(model_dir, steps=40)
    losses = [trainer.sft_step(demonstrations).losses[0] for _ in range(40)]
    expected = -torch.cat(direct_logprobs(model_dir, demonstrations)).mean().item()
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.2 * losses[0]


def test_reinforcement_raises_what_was_good(model_dir: Path) -> None:
    """Sign and direction: after some steps, sequences with a positive advantage are likelier than before."""
    sequences = make_sequences()
    trainer = make_trainer(model_dir, packing=False, micro_batch_tokens=10**6, optimizer=OptimizerOptions(lr=1e-3))

    def totals() -> list[float]:
        (lp,) = trainer.logprobs(sequences, temperature=1.0)
        return [float(part.sum()) for part in torch.split(lp, [len(s.response_tokens) for s in sequences])]

    before = totals()
    for _ in range(3):
        trainer.rl_step(sequences, temperature=1.0)
    weighted = sum(s.advantage * (b - a) for s, a, b in zip(sequences, before, totals(), strict=True))
    assert weighted > 0


def test_bfloat16_compute_keeps_float32_masters(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, autocast_bf16=True, dtype="bfloat16")
    result = trainer.rl_step(make_sequences(), temperature=1.0)
    exact = make_trainer(model_dir).rl_step(make_sequences(), temperature=1.0)
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    assert result.losses == pytest.approx(exact.losses, rel=1e-3)
    assert result.grad_norms == pytest.approx(exact.grad_norms, rel=5e-2)
    assert result.grad_norms != exact.grad_norms
    published = trainer.weights.publish(1)
    assert published is not None
    assert {t.dtype for t in published[0].tensors} == {"bfloat16"}


@pytest.mark.parametrize("learner", [{}, {"implementation": "transformers"}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk_rows", [7, 1000])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_what_is_computed_again_in_bfloat16_is_what_was_computed(
    model_dir: Path,
    tmp_path: Path,
    chunk_rows: int,
    checkpointing: bool,
    learner: dict[str, str],
    entropy_coef: float,
) -> None:
    """The head's chunks and checkpointed layers run a second time in the backward pass: in bfloat16, too."""
    make_trainer(model_dir).weights.export(tmp_path / "model")

    def moved(chunk_rows: int, checkpointing: bool) -> tuple[tuple[float, ...], torch.Tensor]:
        optimizer = OptimizerOptions(lr=1e-2, eps=0.1)  # smooth: the head sums chunks in bfloat16
        trainer = make_trainer(
            tmp_path / "model",
            objective=KL.model_copy(update={"entropy_coef": entropy_coef}),
            optimizer=optimizer,
            init="checkpoint",
            autocast_bf16=True,
            activation_checkpointing=checkpointing,
            mini_batches=2,
            **learner,
        )
        trainer.module.chunk_rows = chunk_rows
        losses = (
            trainer.sft_step(make_demonstrations()).losses + trainer.rl_step(make_sequences(), temperature=0.8).losses
        )
        assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
        assert all(p.is_leaf for p in trainer.module.parameters())
        return losses, torch.cat([p.detach().flatten() for p in trainer.module.parameters()])

    losses, weights = moved(chunk_rows, checkpointing)
    plain_losses, plain_weights = moved(1000, False)
    assert losses == pytest.approx(plain_losses, rel=1e-2, abs=1e-3)
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=2e-3)


def test_published_weights_are_the_model(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    trainer.sft_step(make_demonstrations())
    published = trainer.weights.publish(7)
    assert published is not None
    manifest, buffer = published
    assert manifest.version == 7
    assert manifest.checksum == checksum(buffer)
    expected = hf_state_dict(trainer.network)
    got = dict(unpack(manifest, buffer))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    fresh = hf_state_dict(init_model(model_dir, 5))
    assert not torch.equal(fresh["model.embed_tokens.weight"], got["model.embed_tokens.weight"])


def test_export_is_a_model_that_transformers_loads(model_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(model_dir)
    trainer.sft_step(make_demonstrations())
    trainer.weights.export(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    s = make_sequences(1)[0]
    tokens = torch.tensor([[*s.prompt_tokens, *s.response_tokens]])
    with torch.no_grad():
        table = torch.log_softmax(theirs(tokens).logits[0], -1)
    rows = torch.arange(len(s.prompt_tokens) - 1, tokens.shape[1] - 1)
    (ours,) = trainer.logprobs([s], temperature=1.0)
    torch.testing.assert_close(ours, table[rows, tokens[0][rows + 1]], rtol=1e-4, atol=1e-4)


def test_another_architecture_trains_through_transformers(tmp_path: Path) -> None:
    changes = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_dropout": 0.3}
    path = write_config(tmp_path / "neox", **changes)
    trainer = make_trainer(path, implementation="auto")
    losses = [trainer.sft_step(make_demonstrations()).losses[0] for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]
    again = make_trainer(path, implementation="auto")
    assert again.sft_step(make_demonstrations()).losses[0] == losses[0]  # dropout is off


def test_golden_losses(model_dir: Path) -> None:
    """Proof of value: unchanged maths gives these numbers. Change them only together with the reason."""
    trainer = make_trainer(model_dir, objective=KL, mini_batches=2)
    sft = [trainer.sft_step(make_demonstrations()).losses[0] for _ in range(3)]
    rl = [loss for i in range(3) for loss in trainer.rl_step(make_sequences(seed=i), temperature=0.9).losses]
    assert sft == pytest.approx(GOLDEN_SFT, rel=2e-5)
    assert rl == pytest.approx(GOLDEN_RL, rel=5e-5, abs=1e-6)


GOLDEN_SFT = [4.31016064, 3.49976301, 3.01461625]
GOLDEN_RL = [0.722395658, -0.480659157, 0.671876907, -0.453545451, -0.268869787, 0.168926418]


def test_not_finite_stops_before_the_update(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    sequences = make_sequences(3)
    broken = [replace(sequences[0], advantage=1e38, weight=1e10), *sequences[1:]]
    before = [p.detach().clone() for p in trainer.module.parameters()]
    with pytest.raises(NonFiniteError, match="optimizer step 0"):
        trainer.rl_step(broken, temperature=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))
    assert np.isfinite(trainer.rl_step(sequences, temperature=1.0).losses[0])


def test_bad_input_is_named(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    good = make_sequences(2)
    with pytest.raises(ValueError, match="temperature is 0"):
        trainer.rl_step(good, temperature=0.0)
    with pytest.raises(ValueError, match="sequence 1: token 61 is outside the model's vocabulary of 61"):
        trainer.rl_step([good[0], replace(good[1], response_tokens=np.array([61], np.int32))], temperature=1.0)
    with pytest.raises(ValueError, match="sequence 0: prompt and response need"):
        trainer.sft_step([Demonstration(np.zeros(0, np.int32), np.ones(1, np.int32))])
    with pytest.raises(ValueError, match=r"sequence 1: 1 log-probs for"):
        trainer.rl_step([good[0], replace(good[1], sampler_logprobs_t1=np.zeros(1, np.float32))], temperature=1.0)
    with pytest.raises(ValueError, match="sequence 0: advantage is nan"):
        trainer.rl_step([replace(good[0], advantage=float("nan"))], temperature=1.0)


def test_no_sequences_is_no_step(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    result = trainer.rl_step([], temperature=1.0)
    assert result.losses == ()
    assert trainer.optimizers.steps_done == 0


def test_mini_batches_are_consecutive_and_even() -> None:
    assert split_mini_batches(7, 3) == [range(0, 3), range(3, 5), range(5, 7)]
    assert split_mini_batches(2, 5) == [range(0, 1), range(1, 2)]
    assert split_mini_batches(0, 2) == []
