"""The optimizer's state on the host between steps: no number changes, its memory is gone, and a checkpoint has it."""

from pathlib import Path

import pytest
import torch

from actors.training.away import Away
from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from tests.learner.ranks import run_ranks
from tests.learner.tiny import make_sequences, make_trainer


def held_bytes(trainer: Trainer) -> int:
    """Of the optimizer's state, as it lies there now."""
    tensors = [t for t in trainer.optimizers._state().values() if t.dim()]
    return sum(getattr(t, "_local_tensor", t).untyped_storage().nbytes() for t in tensors)


def numbers(trainer: Trainer, rests: bool) -> list[tuple[float, ...]]:
    found = []
    for step in range(3):
        if rests:
            trainer.rest(optimizer=True)
            trainer.rest(optimizer=True)  # twice is once
            assert held_bytes(trainer) == 0
        result = trainer.rl_step(make_sequences(seed=step), temperature=0.8)
        assert held_bytes(trainer) > 0
        found.append(result.losses + result.grad_norms)
    return found


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_learner_that_rests_between_steps_computes_the_same_bits(name: str, model_dir: Path) -> None:
    optimizer = OptimizerOptions(name=name, lr=1e-2)
    plain, resting = (make_trainer(model_dir, optimizer=optimizer, mini_batches=2) for _ in range(2))
    assert numbers(plain, rests=False) == numbers(resting, rests=True)
    for ours, theirs in zip(plain.module.parameters(), resting.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_of_a_resting_learner_is_whole_and_one_can_be_loaded_into_it(
    model_dir: Path, tmp_path: Path
) -> None:
    plain, resting = make_trainer(model_dir), make_trainer(model_dir)
    for trainer in (plain, resting):
        trainer.rl_step(make_sequences(seed=0), temperature=0.8)
    resting.rest(optimizer=True)
    resting.save(tmp_path)
    other = make_trainer(model_dir, seed=6)
    other.rest(optimizer=True)
    other.load(tmp_path)
    expected = plain.rl_step(make_sequences(seed=1), temperature=0.8)
    for trainer in (resting, other):
        assert trainer.rl_step(make_sequences(seed=1), temperature=0.8).losses == expected.losses
    for ours, theirs in zip(plain.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def both(rank: Rank, model_dir: str) -> list[list[tuple[float, ...]]]:
    return [sharded(rank, model_dir, rests) for rests in (True, False)]


def sharded(rank: Rank, model_dir: str, rests: bool) -> list[tuple[float, ...]]:
    trainer = Trainer(
        ModelOptions(path=model_dir),
        LearnerOptions(ranks=rank.size),
        ObjectiveOptions(),
        rank=rank,
        init="random",
        seed=5,
    )
    trainer.begin(OptimizerOptions(lr=1e-2), 20)
    return numbers(trainer, rests)


@pytest.mark.long
def test_two_ranks_rest_with_their_shards(model_dir: Path) -> None:
    for rests, undisturbed in run_ranks(2, both, str(model_dir)):
        assert rests == undisturbed


def test_memory_that_is_not_there_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, away = [torch.arange(4.0), torch.arange(6.0)], Away()
    away.leave(tensors)
    assert [t.numel() for t in tensors] == [0, 0]
    empty_like, given = torch.empty_like, list[object]()

    def full(*arguments: object, **keywords: object) -> torch.Tensor:
        if given:
            raise torch.OutOfMemoryError
        given.append(arguments)
        return empty_like(*arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", full)
        with pytest.raises(torch.OutOfMemoryError):
            away.come_back()
    assert away.gone
    away.come_back()
    assert [t.tolist() for t in tensors] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
