"""New drafter weights on their way from one worker's trainer over the driver to every engine and every trainer, with
real Ray actors; engines and trainers only write down what they get."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.data_buffer import DataBufferActor
from actors.engine.options import RolloutOptions
from actors.spot.types import MicroStep
from actors.spot_host import DrafterReady, SpotEvent, SpotPlan
from coordinator.events import RolloutComplete, RolloutStarted
from launch.dispatch import RolloutDispatcher, spawner
from policies.drafter.options import BufferOptions
from tests.actors.fake_engine import FakeEngine, FakeOptions
from tests.actors.fake_trainer import Script
from tests.actors.test_drafters_ray import DEADLINE_S, told
from tests.coordinator.cluster import OPTIONS, served
from tests.spot.support import record

pytestmark = pytest.mark.ray


def test_what_one_trainer_learned_reaches_all_engines_and_all_trainers(tmp_path: Path) -> None:
    ready: list[tuple[str, DrafterReady]] = []

    trained: list[MicroStep] = []

    def heard(worker: str, event: SpotEvent) -> None:
        if isinstance(event, DrafterReady):
            ready.append((worker, event))
        elif isinstance(event, MicroStep):
            trained.append(event)

    def wait_for(come: Callable[[], list[Any]]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not come():
            assert time.monotonic() < deadline_s, "it did not come"
            dispatcher.settle()
            time.sleep(0.02)

    buffer = ray.remote(DataBufferActor).options(num_cpus=0).remote(BufferOptions(), 0)
    with served() as server:

        def engine(name: str) -> "partial[FakeEngine]":
            return partial(FakeEngine, FakeOptions(notes=str(tmp_path / f"{name}-engine")))

        def plan(name: str) -> SpotPlan:
            script = Script(notes=str(tmp_path / f"{name}-trainer"))
            return SpotPlan(
                factory=script.trainer,
                buffers={"any": buffer},
                endpoint=server.endpoint,
                coordinator=OPTIONS,
                stop_timeout_s=10.0,
            )

        dispatcher = RolloutDispatcher(spawner(engine, spot=plan), RolloutOptions(workers=2), on_spot=heard)
        try:
            dispatcher.start()
            ray.get(buffer.add.remote([ray.put([record(0), record(1)])]), timeout=DEADLINE_S)
            server.control(RolloutStarted(1))
            wait_for(lambda: trained)
            server.control(RolloutComplete(1))
            wait_for(lambda: [event for _, event in ready if event.manifest.version > 0])
            _, new = next((worker, event) for worker, event in ready if event.manifest.version > 0)
            dispatcher.set_drafter("eagle", new.manifest, new.payload)
            version = new.manifest.version
            for name in ("rollout-0", "rollout-1"):
                assert told(tmp_path / f"{name}-engine", 1) == [{"drafter": "eagle", "version": version}]
                assert told(tmp_path / f"{name}-trainer", 1) == [{"trainer": version, "weights": 0}]
        finally:
            dispatcher.close()
            ray.kill(buffer)
