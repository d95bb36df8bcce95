"""New drafter weights on their way from one worker's trainer to every engine and every trainer, with real Ray actors;
engines and trainers only write down what they get. The driver has references to them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.data_buffer import DataBufferActor
from actors.rollout_worker import SupervisorStatus
from actors.spot_host import DrafterEvent, SpotPlan
from benchmarks.alone import DispatcherAlone, spawner
from config.coordinator import CoordinatorOptions
from config.drafter import BufferOptions
from config.rollout import RolloutOptions
from contracts.coordinator import RolloutComplete, RolloutStarted
from contracts.spot import MicroStep
from coordinator.transport.server import CoordinatorServer
from launch.dispatch import Weights
from launch.drafter.weights import load_weights, save_weights
from tests.actors.fake_engine import FakeEngine, FakeOptions
from tests.actors.fake_trainer import Script
from tests.actors.statuses import statuses
from tests.actors.test_drafters_ray import DEADLINE_S, told
from tests.coordinator.cluster import OPTIONS, served
from tests.spot.support import record

pytestmark = pytest.mark.ray
LARGE_BYTES = 2**20  # Ray keeps it in the store of a node, and not with its owner


class Fleet:
    """Two workers that train, and what the driver hears of it."""

    def __init__(self, dispatcher: DispatcherAlone, server: CoordinatorServer) -> None:
        self.dispatcher, self._server = dispatcher, server
        self.weights: list[tuple[str, Weights]] = []
        self.trained: list[MicroStep] = []

    def heard(self, worker: str, event: DrafterEvent) -> None:
        if isinstance(event, MicroStep):
            self.trained.append(event)

    def wait_for(self, come: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not come():
            assert time.monotonic() < deadline_s, "it did not come"
            self.dispatcher.settle()
            time.sleep(0.02)

    def train(self) -> tuple[str, Weights]:
        """A rollout in whose tail someone trains; the first weights that were made."""
        made = lambda: [(w, new) for w, new in self.weights if new.manifest.version > 0]  # noqa: E731
        self._server.control(RolloutStarted(1))
        self.wait_for(lambda: self.trained)
        self._server.control(RolloutComplete(1))
        self.wait_for(made)
        return made()[0]


@contextmanager
def fleet(folder: Path, options: CoordinatorOptions = OPTIONS) -> Iterator[Fleet]:
    buffer = ray.remote(DataBufferActor).options(num_cpus=0).remote(BufferOptions(), 0)
    with served(options) as server:

        def engine(name: str) -> "partial[FakeEngine]":
            return partial(FakeEngine, FakeOptions(notes=str(folder / f"{name}-engine")))

        def plan(name: str) -> SpotPlan:
            script = Script(notes=str(folder / f"{name}-trainer"), weights_bytes=LARGE_BYTES)
            return SpotPlan(
                factory=script.trainer,
                endpoint=server.endpoint,
                coordinator=options,
                stop_timeout_s=10.0,
            )

        dispatcher = DispatcherAlone(
            spawner(engine, spot=plan),
            RolloutOptions(workers=2),
            on_spot=lambda worker, event: found.heard(worker, event),
            on_weights=lambda worker, weights: found.weights.append((worker, weights)),
        )
        dispatcher.buffer_of = lambda node_id: buffer
        found = Fleet(dispatcher, server)
        try:
            dispatcher.start()
            dispatcher.drafters.start_trainers()
            ray.get(buffer.add.remote([ray.put([record(0), record(1)])]), timeout=DEADLINE_S)
            yield found
        finally:
            dispatcher.close()
            ray.kill(buffer)


def test_what_one_trainer_learned_reaches_all_engines_and_all_trainers(tmp_path: Path) -> None:
    with fleet(tmp_path) as f:
        _, new = f.train()
        f.dispatcher.drafters.update("eagle", new)
        version = new.manifest.version
        for name in ("rollout-0", "rollout-1"):
            assert told(tmp_path / f"{name}-engine", 1) == [{"drafter": "eagle", "version": version}]
            assert told(tmp_path / f"{name}-trainer", 1) == [{"trainer": version, "weights": version * LARGE_BYTES}]


def test_weights_outlive_the_worker_that_made_them(tmp_path: Path) -> None:
    """They reach engines that start later, and a checkpoint, when it is gone."""
    with fleet(tmp_path) as f:
        maker, new = f.train()
        status = statuses(f.dispatcher)[maker]
        assert isinstance(status, SupervisorStatus)
        os.kill(status.pid, signal.SIGKILL)
        f.dispatcher.drafters.update("eagle", new)

        version = new.manifest.version
        notes = [tmp_path / f"{name}-engine" for name in ("rollout-0", "rollout-1")]
        f.wait_for(lambda: all(path.exists() for path in notes))  # the maker's successor too
        for path in notes:
            assert told(path, 1)[-1] == {"drafter": "eagle", "version": version}
        save_weights(tmp_path / "saved", [new])
        kept = load_weights(tmp_path / "saved")
        assert (tmp_path / f"saved/{version}.json").exists()
        assert [weights.manifest for weights in kept] == [new.manifest], "read back, and its checksum is right"
        assert int(ray.get(new.ref, timeout=DEADLINE_S)[-1]) == version


def test_weights_whose_worker_dies_right_after_it_said_that_they_are_ready_were_never_heard_of(tmp_path: Path) -> None:
    """The driver goes on with what it has; whoever trains next goes on from there."""
    with fleet(
        tmp_path, OPTIONS.model_copy(update={"lease_s": 8})
    ) as f:  # the next one trains when the lost one's lease has ended
        f.wait_for(lambda: len(f.weights) >= 2)  # what trainers start with
        pids = {name: status.pid for name, status in statuses(f.dispatcher).items()}
        died: list[str] = []
        fetch = f.dispatcher.drafters.fetch

        def dies_first(seat: Any, version: int) -> None:
            if version > 0 and not died:
                died.append(seat.name)
                process = psutil.Process(pids[seat.name])
                process.kill()  # ray.kill returns before it is dead, so the weights could still be had
                process.wait(DEADLINE_S)
            fetch(seat, version)

        f.dispatcher.drafters.fetch = dies_first  # type: ignore[method-assign]
        f._server.control(RolloutStarted(1))
        f.wait_for(lambda: f.trained)
        f._server.control(RolloutComplete(1))
        f.wait_for(lambda: died)
        version = f.trained[-1].step
        f.wait_for(lambda: not f.dispatcher.drafters._fetches)
        assert not any(worker == died[0] and new.manifest.version == version for worker, new in f.weights)
        f.trained.clear()
        f.train()
