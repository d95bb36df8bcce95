"""What sequences begin with alike is computed once: same numbers, same gradients, fewer tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.training import batches
from actors.training.network import LogProbModel
from actors.training.parallel import Rank
from actors.training.recording import RecordingPlan, StepRecording
from actors.training.trainer import Trainer
from config.learner import OptimizerOptions
from contracts.training import TrainSequence
from models.checkpoint import init_model
from tests.learner.tiny import make_sequences, make_trainer
from tests.native import needs_native

OPTIMIZER = OptimizerOptions(lr=1e-2, eps=1e-3)  # a large eps: Adam's sign-like first steps amplify rounding


def groups(longest: int = 20) -> list[TrainSequence]:
    """Three prompts that begin alike with four responses each, of which two begin alike and two are the same."""
    made = make_sequences(12, longest=longest)
    system = np.array([3, 1, 4, 1], np.int32)
    found = []
    for i, sequence in enumerate(made):
        first, twin = made[i // 4 * 4], made[i // 4 * 4 + 1]
        response = (sequence if i % 4 < 2 else twin).response_tokens
        if i % 4 == 2:
            response = np.concatenate((response[: len(response) // 2], sequence.response_tokens))
        zeros = np.zeros(len(response), np.float32)
        prompt = np.concatenate((system, first.prompt_tokens))
        found.append(
            replace(
                sequence,
                prompt_tokens=prompt,
                response_tokens=response,
                sampler_logprobs=zeros,
                sampler_logprobs_t1=zeros,
            )
        )
    return found


def forks() -> list[TrainSequence]:
    """Two episodes as sequences of their turns: the second turns of the first, of which two are sampled after the same
    first turn, and a third turn that continues one of them."""
    rng, found = np.random.default_rng(8), list[TrainSequence]()
    for _ in range(2):
        prompt, turns = rng.integers(0, 60, 9), [rng.integers(0, 60, 7) for _ in range(5)]
        seen = [
            (prompt, turns[0]),
            (prompt, np.concatenate((turns[0][:4], turns[1]))),
            (np.concatenate((prompt, turns[0], [5])), turns[1]),
            (np.concatenate((prompt, turns[0], [5])), turns[2]),
            (np.concatenate((prompt, turns[0], [5], turns[2], [6, 7])), turns[3]),
        ]
        for before, response in seen:
            zeros = np.zeros(len(response), np.float32)
            found.append(
                TrainSequence(
                    prompt_tokens=before.astype(np.int32),
                    response_tokens=response.astype(np.int32),
                    sampler_logprobs=zeros,
                    sampler_logprobs_t1=zeros,
                    advantage=float(rng.normal()),
                )
            )
    return found


def trainer_of(model_dir: Path, *, shared: bool, **learner: object) -> Trainer:
    trainer = make_trainer(model_dir, optimizer=OPTIMIZER, **learner)
    assert trainer.shares_prefixes
    trainer.shares_prefixes = shared
    return trainer


def logprobs_of(trainer: Trainer, sequences: list[TrainSequence]) -> dict[int, torch.Tensor]:
    """Of each sequence, by its index."""
    mini = trainer._mini_batch(sequences)
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for batch in mini.micro:
            parts = trainer._forward(trainer.module, batch, 0.7)[0].split(list(batch.response_lengths))
            found |= dict(zip(batch.indices, parts, strict=True))
    return found


@needs_native
@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 4}}, {"micro_batch_tokens": 40}], ids=str)
@pytest.mark.parametrize("sequences", [groups, forks])
def test_log_probs_are_bitwise_those_of_sequences_alone(
    model_dir: Path, learner: dict[str, object], sequences: Callable[[], list[TrainSequence]]
) -> None:
    shared, alone = (logprobs_of(trainer_of(model_dir, shared=s, **learner), sequences()) for s in (True, False))
    assert shared.keys() == alone.keys()
    assert all(torch.equal(shared[i], alone[i]) for i in shared)


@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 4}}, {"mini_batches": 3, "micro_batch_tokens": 60}], ids=str)
def test_a_step_does_the_same_to_the_weights_with_fewer_tokens(model_dir: Path, learner: dict[str, object]) -> None:
    found = []
    for shared in (True, False):
        trainer = trainer_of(model_dir, shared=shared, **learner)
        result = trainer.rl_step(groups(), temperature=0.7)
        found.append((result, torch.cat([p.detach().flatten() for _, p in trainer._trained])))
    (one, weights), (other, expected) = found
    assert one.tokens < 0.8 * other.tokens
    assert one.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-7)
    assert one.grad_norms == pytest.approx(other.grad_norms, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget_tokens", [10**6, 48])  # all in one pass, and trees that are cut
@pytest.mark.parametrize("made", [groups, forks])
def test_gradients_in_float64_are_those_of_sequences_alone(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: Callable[[], list[TrainSequence]],
    budget_tokens: int,
) -> None:
    """The real network, with float64 where it computes in float32."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    sequences, whole = made(), dict[bool, int]()
    weights = np.random.default_rng(0).normal(size=len(sequences))
    found = []
    for shared in (True, False):
        network = init_model(model_dir, 5, dtype=torch.float64)
        module = LogProbModel(network, torch.device("cpu"))
        mini = batches.build_mini_batch(
            sequences, weights, Rank(), budget_tokens=budget_tokens, packing=True, shared=shared
        )
        whole[shared] = mini.computed_tokens
        for batch in mini.micro:
            logprobs, _, _ = module(batch.tokens, batch.context, batch.rows, batch.targets, 0.7)
            assert logprobs.dtype is torch.float64
            (logprobs * batch.coefficients.double()).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert float((found[0] - found[1]).abs().max()) <= 1e-12 * float(found[1].abs().max())
    assert whole[True] < 0.8 * whole[False]


@needs_native
def test_recorded_states_are_those_of_each_sequence(model_dir: Path) -> None:
    found = []
    for shared in (True, False):
        trainer = trainer_of(model_dir, shared=shared)
        recording = StepRecording(RecordingPlan(10**6), 1, torch.float32)
        trainer.rl_step(groups(), temperature=0.7, recording=recording)
        found.append({(record.tokens.tobytes(), record.states.tobytes()) for record in recording.records})
    assert found[0] == found[1]
    assert len(found[0]) == 9  # three of the twelve are the same as others


def test_ranks_get_nearly_equal_work() -> None:
    sequences = [replace(s, prompt_tokens=np.arange(30, dtype=np.int32)) for s in make_sequences(64)]
    coefficients = np.ones(64)
    tokens = [
        sum(
            len(batch.tokens)
            for batch in batches.build_mini_batch(
                sequences, coefficients, Rank(index, 4), budget_tokens=10**6, packing=True, shared=True
            ).micro
        )
        for index in range(4)
    ]
    assert max(tokens) <= 1.25 * min(tokens)
