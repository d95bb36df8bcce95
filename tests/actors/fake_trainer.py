"""A spot trainer without a process or a network: it answers what it is told, and writes down what it was told."""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.spot.process import SpotTrainer
from contracts.records import SequenceRecord
from contracts.spot import (
    ContinueFrom,
    MicroStep,
    NeedData,
    PublishDrafter,
    SetTarget,
    SpotCommand,
    StartTraining,
    StopTraining,
    TrainedWeights,
    TrainerEvent,
    TrainFailed,
    TrainOn,
    TrainSession,
    TrainStarted,
    TrainStopped,
)
from models.manifest import WeightsManifest
from tests.actors.fake_engine import weights


@dataclass
class Script:
    """How trainers behave, and what happened to all of them in order."""

    log: list[str] = field(default_factory=list)
    made: list["FakeTrainer"] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  # that they were told to be reached at
    starts: int = 0
    gate: threading.Event | None = None  # a start waits for it
    hold: threading.Event | None = None  # so does what is told of new target weights
    fail_to_start: str = ""
    deaf: bool = False  # does not stop
    stop_s: float = 0.0  # from the command to stop to the answer
    weights_bytes: int = 4
    notes: str = ""  # file to which the versions that are loaded are appended; empty: nowhere

    def trainer(self, host: str) -> "FakeTrainer":
        """The factory of a SpotPlan."""
        self.hosts.append(host)
        self.starts += 1
        if self.gate is not None:
            self.gate.wait(30.0)
        if self.fail_to_start:
            raise RuntimeError(self.fail_to_start)
        trainer = FakeTrainer(self)
        self.made.append(trainer)
        return trainer


class FakeTrainer(SpotTrainer):
    """A SpotTrainer: one micro-step per TrainOn, and its steps are its version."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._events: deque[tuple[float, TrainerEvent]] = deque()  # and when it is told
        self._changed = threading.Condition()
        self._session: TrainSession | None = None
        self.steps = 0
        self.targets: list[int] = []  # versions
        self.loaded: list[int] = []
        self.fed: list[SequenceRecord] = []
        self.alive = True

    def send(self, command: SpotCommand) -> None:
        match command:
            case SetTarget(manifest):
                self.targets.append(manifest.version)
                if self._script.hold is not None:
                    self._script.hold.wait(30.0)
            case StartTraining(session):
                self._session = session
                self._script.log.append("start")
                self.say(TrainStarted(session.session, session.epoch), NeedData(64))
            case TrainOn(records):
                self._learn(records)
            case StopTraining():
                self._script.log.append("stop")
                if not self._script.deaf:
                    number, self._session = (self._session.session if self._session else 0), None
                    self.say(TrainStopped(number, self.steps, self._script.stop_s), after_s=self._script.stop_s)
            case PublishDrafter():
                self.say(TrainedWeights(*weights(self.steps, self._script.weights_bytes)))
            case ContinueFrom(manifest, payload):
                self._load(manifest, payload)

    def _learn(self, records: Sequence[SequenceRecord]) -> None:
        if self._session is None:
            return
        self.fed += records
        self.steps += 1
        step = MicroStep(
            step=self.steps,
            session=self._session.session,
            epoch=self._session.epoch,
            members=1,
            loss=2.0,
            accuracy=0.5,
            top3_accuracy=0.75,
            tokens=len(records),
            target_version=0,
            started_s=time.time(),
            seconds=0.01,
        )
        self.say(step, NeedData(64), after_s=0.01)

    def _load(self, manifest: WeightsManifest, payload: NDArray[np.uint8]) -> None:
        self.loaded.append(manifest.version)
        self.steps = manifest.version
        if self._script.notes:
            with Path(self._script.notes).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"trainer": manifest.version, "weights": int(payload.sum())}) + "\n")

    def say(self, *events: TrainerEvent, after_s: float = 0.0) -> None:
        with self._changed:
            self._events.extend((time.monotonic() + after_s, event) for event in events)
            self._changed.notify()

    def poll(self, timeout_s: float) -> list[TrainerEvent]:
        with self._changed:
            if not self._events:
                self._changed.wait(timeout_s)
            told = []
            while self._events and self._events[0][0] <= time.monotonic():
                told.append(self._events.popleft()[1])
        self._script.log += ["stopped" for event in told if isinstance(event, TrainStopped)]
        return told

    def kill(self) -> None:
        if self.alive:
            self._script.log.append("kill")
            self.say(TrainFailed("killed"))
        self.alive = False

    def close(self, timeout_s: float = 5.0) -> None:
        self.alive = False
        self.say(TrainFailed("closed"))
