"""The driver's side of drafter training over fakes: what engines and the coordinator are told is noted. The actors are
Ray's only where a test is marked so; elsewhere they are not needed to decide."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from config.coordinator import CoordinatorOptions, CurveOptions
from config.drafter import BufferOptions
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.tree import Config
from contracts.rollout import EngineWindow, StrategyUse
from contracts.spot import MicroStep
from coordinator.transport.security import Keys
from drafter.training.buffer import DataBuffer
from launch.dispatch import Weights
from launch.drafter.actors import DrafterActors
from launch.drafter.training import DrafterTraining
from launch.observe import Observer
from launch.observe.journal import read
from models.checksum import checksum
from models.manifest import WeightsManifest
from tests.report.synthetic import config
from tests.spot.support import record
from tests.windows import engine_window

NO_KEYS = Keys(CoordinatorOptions(curve=CurveOptions(enabled=False)), Path())  # writes nothing

BUFFERS = {"n0": "buffer of n0", "n1": "buffer of n1"}


class Dispatcher:
    """Notes what engines are told to draft with."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.stopped_within_s: list[float] = []
        self.payloads: list[NDArray[np.uint8]] = []
        self.trainers = 0  # times that workers were told to start them

    late: tuple[str, ...] = ()

    @property
    def drafters(self) -> "Dispatcher":
        return self

    def start_trainers(self) -> None:
        self.trainers += 1

    def stop_training(self, timeout_s: float) -> list[str]:
        self.stopped_within_s.append(timeout_s)
        return list(self.late)

    @property
    def last(self) -> str:
        """The weights that were handed out last."""
        return self.payloads[-1].tobytes().decode()

    def update(self, name: str, weights: Weights) -> None:
        assert name == "eagle"
        self.versions.append(weights.manifest.version)
        self.payloads.append(weights.ref)


class Driver:
    """Notes what the coordinator is told: (step, whether to train) at the start, and the step at the end."""

    def __init__(self) -> None:
        self.said: list[tuple[int, bool] | int] = []

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        self.said.append((step, train))

    def rollout_complete(self, step: int) -> None:
        self.said.append(step)


Make = Callable[..., DrafterTraining]


def settings_of(run_dir: Path, drafter: dict[str, Any], **sections: Any) -> Config:
    values = config(run_dir, steps=9).model_dump() | sections
    return Config.model_validate(values | {"drafter": {"train": True, **drafter}})


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def make(tmp_path: Path, driver: Driver) -> Iterator[Make]:
    """Makes what is tested: keyword `drafter` is that section of the configuration, others are other sections. `begun`:
    tails are known to be long enough."""
    buffer = DataBuffer(BufferOptions(), 0)
    buffer.add([record(0), record(1)])
    watch = SimpleNamespace(look=lambda: {"n0": buffer.stats})
    with ExitStack() as stack:

        def make_one(drafter: dict[str, Any] | None = None, *, begun: bool = True, **sections: Any) -> DrafterTraining:
            settings = settings_of(tmp_path / "run", drafter or {}, **sections)
            observer = stack.enter_context(Observer(tmp_path / "run", settings))
            buffers: Any = SimpleNamespace(by_node=BUFFERS, of=BUFFERS.get, follow=lambda: None)
            actors = DrafterActors(
                coordinator="coordinator",
                workers=("rollout-0", "rollout-1"),
                endpoint="tcp://127.0.0.1:1",
                buffers=buffers,
                keys=NO_KEYS,
            )
            model = ModelOptions(path="model")
            made = DrafterTraining(settings, observer, tmp_path / "run", model, actors, driver, watch)
            if made.payoff is not None:
                made.payoff.begun = begun
            for worker in actors.workers:
                made.plan(worker, EngineOptions())
            return made

        yield make_one


@pytest.fixture
def training(make: Make) -> DrafterTraining:
    return make()


def ready(version: int) -> Weights:
    """Without Ray a reference is the bytes."""
    payload: Any = payload_of(version)
    return Weights(WeightsManifest(version, checksum(payload), (), payload.size), payload)


@pytest.fixture(autouse=True)
def no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("ray"):
        monkeypatch.setattr("launch.drafter.weights.ray.get", lambda ref, timeout: ref)
        monkeypatch.setattr("launch.drafter.weights.ray.put", lambda payload: payload)


def payload_of(version: int) -> NDArray[np.uint8]:
    return np.frombuffer(f"weights {version}".encode(), np.uint8)


def drafted(rate: float, tokens: int = 1000) -> EngineWindow:
    use = StrategyUse(
        strategy="eagle:4",
        engine_steps=1,
        request_steps=10,
        drafted=tokens,
        accepted=round(tokens * rate),
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )
    other = StrategyUse(
        strategy="suffix:4",
        engine_steps=1,
        request_steps=10,
        drafted=tokens,
        accepted=0,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )  # another drafter's, never counted
    return engine_window(strategies=(use, other))


def micro_step(number: int = 1) -> MicroStep:
    return MicroStep(
        step=number,
        session=1,
        epoch=1,
        members=1,
        loss=2.0,
        accuracy=0.1,
        top3_accuracy=0.2,
        tokens=100,
        target_version=0,
        started_s=5.0,
        seconds=0.5,
    )


def kinds(tmp_path: Path) -> list[str]:
    return [event["kind"] for event in read(tmp_path / "run/events.jsonl")]
