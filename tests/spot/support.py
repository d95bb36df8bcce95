"""Small targets, records and trainers for the tests of the spot trainer."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.spot.process import SpotTrainer, spawn_trainer
from config.drafter import DrafterOptions
from config.model import ModelOptions
from contracts.records import SequenceRecord
from contracts.spot import MicroStep, StartTraining, StopTraining, TrainerEvent, TrainOn, TrainSession
from models.checkpoint import init_model, save_model
from tests.engine.support import write_config

HIDDEN, VOCAB = 32, 61
DEADLINE_S = 60.0
ALONE = TrainSession(1, 1, ("a",), 0)
E = TypeVar("E")


def save_target(directory: Path) -> Path:
    """A target with a hidden size of 32."""
    save_model(init_model(write_config(directory / "config"), 0), directory / "hf")
    return directory / "hf"


def options_of(**changes: Any) -> DrafterOptions:
    values: dict[str, Any] = {"micro_step_tokens": 64, "warmup_steps": 3, "checkpoint_every": 1000}
    return DrafterOptions(**(values | changes))


def record(seed: int, rows: int = 40, version: int = 0, **changes: Any) -> SequenceRecord:
    """Random tokens and states; what they say is not the point here."""
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    values: dict[str, Any] = {
        "tokens": rng.integers(0, VOCAB, rows + 1).astype(np.int32),
        "prompt_length": 3,
        "first": 0,
        "states": states.view(np.uint8),
        "dtype": "float32",
        "width": HIDDEN,
        "target_version": version,
    }
    return SequenceRecord(**(values | changes))


def spawn(target: Path, checkpoints: Path, **options: Any) -> SpotTrainer:
    model = ModelOptions(path=str(target))
    trainer = spawn_trainer(
        options_of(**options), model, checkpoint_dir=checkpoints, threads=1, device="cpu", niceness=0
    )
    assert isinstance(trainer, SpotTrainer)
    return trainer


def until(trainer: SpotTrainer, done: Callable[[list[TrainerEvent]], bool]) -> list[TrainerEvent]:
    """Events up to the one that makes `done` true; nothing is fed."""
    events: list[TrainerEvent] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while not done(events):
        assert time.monotonic() < deadline_s, f"not done within {DEADLINE_S} s; the last events: {events[-5:]}"
        events += trainer.poll(0.2)
    return events


def until_a(trainer: SpotTrainer, kind: type[E]) -> E:
    return only(until(trainer, lambda events: bool(only(events, kind))), kind)[-1]


def feed(*records: SequenceRecord) -> TrainOn:
    return TrainOn(records)


def start(session: int, epoch: int, members: Sequence[str] = ("a",), rank: int = 0, store: str = "") -> StartTraining:
    return StartTraining(TrainSession(session, epoch, tuple(members), rank, store))


def stop() -> StopTraining:
    return StopTraining(time.time())


def only(events: Sequence[object], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def micro_steps(trainer: SpotTrainer, count: int, first_seed: int = 0) -> list[MicroStep]:
    """Feed one pack at a time, `count` of them, and wait for each one's micro-step."""
    steps = []
    for seed in range(first_seed, first_seed + count):
        trainer.send(feed(record(seed)))
        steps.append(until_a(trainer, MicroStep))
    return steps
