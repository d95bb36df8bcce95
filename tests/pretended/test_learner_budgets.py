"""What learning may cost on a GPU beside its arithmetic, over the real learner and the real trainer of drafters: a
micro-batch asks the device for nothing, so that the host stays ahead of it."""

from pathlib import Path

import pytest
import torch

from actors.spot.residence import Residence, on_device
from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from config.drafter import Algorithm, DrafterOptions
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from tests.drafter.training_support import ALGORITHMS, records_of
from tests.engine.support import tiny_model
from tests.learner.tiny import make_demonstrations, make_sequences, write_config
from tests.pretended.counting import counting
from tests.pretended.device import Seen
from tests.pretended.support import DEVICE

CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
BFLOAT16 = pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])


def trainer_of(tmp_path: Path, *, checkpointing: bool, autocast: bool, kl: str) -> Trainer:
    options = LearnerOptions(
        micro_batch_tokens=48, mini_batches=2, activation_checkpointing=checkpointing, autocast_bf16=autocast
    )
    trainer = Trainer(
        ModelOptions(path=str(write_config(tmp_path / "model")), dtype="bfloat16" if autocast else "float32"),
        options,
        ObjectiveOptions(kl=kl),
        rank=Rank(device=DEVICE),
        init="random",
    )
    trainer.begin(OptimizerOptions(), 10)
    return trainer


def stepped(trainer: Trainer, kind: str, sequences: int) -> Seen:
    with counting() as seen:
        if kind == "rl":
            result = trainer.rl_step(make_sequences(sequences), temperature=0.8)
        else:
            result = trainer.sft_step(make_demonstrations(sequences))
    assert all(value == value for value in result.losses)
    return seen


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("kl", ["none", "k3"])
@CHECKPOINTING
@BFLOAT16
def test_a_micro_batch_asks_the_device_for_nothing(
    kind: str, kl: str, checkpointing: bool, autocast: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, checkpointing=checkpointing, autocast=autocast, kl=kl)
    stepped(trainer, kind, 8)  # what happens once: tables, kernels chosen
    few, many = stepped(trainer, kind, 8), stepped(trainer, kind, 40)
    assert many.uploads.total() > 2 * few.uploads.total(), "more sequences are more micro-batches"
    more = many.waits - few.waits
    assert not more, f"waits grow with the micro-batches: {more}"
    assert not many.pageable - few.pageable, many.pageable - few.pageable


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_micro_step_of_the_spot_trainer_waits_once_at_its_end(
    algorithm: Algorithm, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path, "qwen2", invariant=False).requires_grad_(False)
    records = records_of(model, [9, 30, 14])
    head = TargetHead.of(model.to(dtype), 0)
    trainer = DrafterTrainer(on_device(head, DEVICE), DrafterOptions(algorithm=algorithm), device=DEVICE)
    trainer.micro_step(records)
    with counting() as seen:
        result = trainer.micro_step(records)
    assert result.updated
    assert seen.waits.total() == 1, seen.waits
    (place,) = seen.waits.lines()
    assert place.startswith("drafter/training/trainer.py")
    assert not seen.pageable & seen.uploads, seen.pageable


def test_what_the_spot_trainer_publishes_and_moves_is_never_pageable(tmp_path: Path) -> None:
    """Into a session, a micro-step, weights for the engines, out of it again: but for the micro-step's five numbers."""
    model = tiny_model(tmp_path, "qwen2", invariant=False).requires_grad_(False)
    records = records_of(model, [9, 30, 14])
    residence = Residence(DrafterTrainer(TargetHead.of(model, 0), DrafterOptions(), seed=0), DEVICE)
    residence.move_in()
    residence.trainer.micro_step(records)  # tables of angles go up once
    residence.move_out()
    with counting() as seen:
        residence.move_in()
        residence.trainer.micro_step(records)
        there = residence.trainer.export()
        residence.move_out()
    assert [what for what, _ in seen.pageable] == ["download [5]"], seen.pageable
    manifest, buffer = residence.trainer.export()
    assert manifest == there[0]
    assert (buffer == there[1]).all()
