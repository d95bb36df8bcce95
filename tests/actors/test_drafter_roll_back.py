"""A roll-back as a run has it: the driver's decisions, a worker, a coordinator, and a real trainer in its process that
trains on from the bad weights before anybody knows. Ray and the engine are stand-ins.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from config.coordinator import CoordinatorOptions, CurveOptions
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.tree import Config
from contracts.coordinator import RolloutComplete, RolloutStarted
from contracts.engine import UpdateDrafter
from contracts.rollout import EngineWindow, StrategyUse
from contracts.spot import TrainedWeights, TrainStopped
from coordinator.transport.security import Keys
from launch.dispatch import Weights
from launch.drafter.actors import DrafterActors
from launch.drafter.training import DrafterTraining
from launch.observe import Observer
from launch.observe.journal import read
from policies.drafter.lineage import LINEAGE, micro_steps
from tests.actors.test_spot_host import World, eventually, no_ray, world
from tests.report.synthetic import config
from tests.spot.support import only, save_target, spawn
from tests.windows import engine_window

NO_KEYS = Keys(CoordinatorOptions(curve=CurveOptions(enabled=False)), Path())  # writes nothing

pytestmark = pytest.mark.asyncio
__all__ = ["no_ray"]


class Run:
    """The driver of a run with one worker: its events go to DrafterTraining, what that hands out to the worker."""

    def __init__(self, world: World, run_dir: Path, observer: Observer, settings: Config) -> None:
        self._world, self._seen = world, 0
        self.versions: list[int] = []
        self.payloads: dict[int, bytes] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        buffers: Any = SimpleNamespace(follow=lambda: None)
        actors = DrafterActors(
            coordinator="coordinator",
            workers=("rollout-0", "rollout-1"),
            endpoint="tcp://127.0.0.1:1",
            buffers=buffers,
            keys=NO_KEYS,
        )
        watch: Any = SimpleNamespace(look=dict)
        model = ModelOptions(path="model")
        self.training = DrafterTraining(settings, observer, run_dir, model, actors, self, watch)
        self.training.plan("rollout-0", EngineOptions())

    @property
    def drafters(self) -> "Run":
        return self

    def start_trainers(self) -> None:
        pass  # the worker of `world` has one

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        self._world.server.control(RolloutStarted(step, train))

    def rollout_complete(self, step: int) -> None:
        self._world.server.control(RolloutComplete(step))

    def update(self, name: str, weights: Weights) -> None:
        manifest, payload = weights.manifest, cast(NDArray[np.uint8], weights.ref)  # without Ray it is the bytes
        self.versions.append(manifest.version)
        self.payloads[manifest.version] = payload.tobytes()
        update = self._world.worker.ask(UpdateDrafter(name, manifest), payload)
        self._tasks.append(asyncio.get_running_loop().create_task(update))

    async def settle(self) -> None:
        """The driver reads what the worker said."""
        events, self._seen = self._world.events[self._seen :], len(self._world.events)
        for event in events:
            if isinstance(event, TrainedWeights):
                with suppress(KeyError):  # newer ones have come meanwhile
                    manifest, payload = await self._world.worker.drafter_weights(event.manifest.version)
                    self.training.published("w", Weights(manifest, cast(Any, payload)))

    async def hand_out(self, target: int) -> None:
        await self.settle()
        self.training.hand_out(self, target)
        await asyncio.gather(*self._tasks)

    async def tail(self, step: int, rate: float) -> None:
        """An RL step in whose tail the worker trains, while engines accept `rate` of what they draft."""
        await eventually(lambda: self._world.state == "IDLE")
        self.training.begin(step, self)
        await self._world.training(2)
        self.training.window(drafted(rate))
        events, before = self._world.events, len(self._world.events)
        if rate > 0.1:
            self.training.reached("sampled", step)
        await eventually(lambda: bool(only(events[before:], TrainStopped)))  # a roll-back stops it unasked
        await eventually(lambda: bool(only(events[before:], TrainedWeights)))
        self.training.reached("sampled", step)


def drafted(rate: float) -> EngineWindow:
    use = StrategyUse(
        strategy="eagle:4",
        engine_steps=1,
        request_steps=10,
        drafted=2000,
        accepted=round(2000 * rate),
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )
    return engine_window(strategies=(use,))


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[tuple[Observer, Config]]:
    values = config(tmp_path / "run", steps=9).model_dump()
    settings = Config.model_validate(values | {"drafter": {"train": True, "while_it_pays": False}})
    with Observer(tmp_path / "run", settings) as observer:
        yield observer, settings


async def test_weights_that_come_back_reach_engines_and_trainers_that_had_gone_on(
    observed: tuple[Observer, Config], tmp_path: Path
) -> None:
    target = save_target(tmp_path)
    script: Any = SimpleNamespace(log=[], trainer=lambda host: spawn(target, tmp_path / "drafter", checkpoint_keep=10))
    async with world(script) as w:
        run = Run(w, tmp_path / "run", *observed)
        await eventually(lambda: bool(only(w.events, TrainedWeights)))  # what the trainer starts with
        for step, rate in ((1, 0.6), (2, 0.6), (3, 0.05)):
            await run.hand_out(step - 1)
            await run.tail(step, rate)
        good, bad = run.versions
        made_of_bad = [ready.manifest.version for ready in only(w.events, TrainedWeights)][-1]
        assert 0 < good < bad < made_of_bad
        await run.hand_out(3)
        await run.tail(4, 0.6)
        await run.hand_out(4)
        await run.tail(5, 0.6)
    returned, next_ = run.versions[2:]
    assert micro_steps(returned) == good
    assert run.payloads[returned] == run.payloads[good]
    assert LINEAGE < returned < next_ < LINEAGE + bad + made_of_bad, "trainers go on from what came back"
    [message] = [e["message"] for e in read(tmp_path / "run/events.jsonl") if e["kind"] == "drafter_rolled_back"]
    assert message == f"version {bad} drafts worse than version {good}, which is restored"
