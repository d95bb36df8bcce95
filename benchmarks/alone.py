"""Parts of the driver by themselves, for tests and measurements: a dispatcher or a reward pool with its own event loop,
whose reactions the caller sets. In a run all parts share one loop (launch.run.reactions).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import ray

from actors.context import Context, no_log
from actors.identity import unique_name
from actors.loop import EventLoop, Look
from actors.observer import RunObserver
from actors.reward_pool import GradesArrived, RewardPool
from actors.rewards.grader import LaneGrader
from actors.rollout_worker import EngineFactory, RolloutWorker
from actors.spot_host import SpotPlan
from config.rewards import RewardOptions
from config.rollout import RolloutOptions
from contracts.rollout import EngineWindow, Finished, PassEvent, Request, Rollout
from launch.cluster.versions import NodeVersions
from launch.dispatch import (
    DispatchStats,
    RolloutDispatcher,
    Weights,
    WeightsGone,
    WorkerArrived,
    WorkerChanged,
    WorkerNews,
    WorkerStarts,
    WorkerUp,
)


def nothing(*_: Any) -> None: ...


@dataclass
class Told(RunObserver):
    """In place of an observer."""

    on_event: Callable[[str, str], None] = nothing
    on_span: Callable[[str, str, float, float], None] = nothing

    def event(self, kind: str, message: str) -> None:
        self.on_event(kind, message)

    def worked(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        self.on_span(actor, kind, start_s, end_s)


@dataclass
class Starts:
    """Workers that `spawn` makes, as WorkerStarts."""

    spawn: Callable[[str], Any]
    placed: Callable[[str], bool] = lambda name: True


def spawner(
    factory: Callable[[str], EngineFactory],
    options: Callable[[str], dict[str, Any]] = lambda name: {},
    spot: Callable[[str], SpotPlan | None] = lambda name: None,
    log: Callable[[str], str | None] = no_log,
) -> Callable[[str], Any]:
    """Return what makes worker `name`, an actor. `factory(name)`: of its engine; `options(name)`: Ray's; `spot(name)`:
    how it trains the drafter; `log(name)`: its log file."""

    def spawn(name: str) -> Any:
        worker = ray.remote(RolloutWorker).options(**{"num_cpus": 0, **options(name), "name": unique_name(name)})
        return worker.remote(name, factory(name), spot(name), log(name))

    return spawn


class AllVouched(NodeVersions):
    """Asks nobody and accepts every node."""

    def __init__(self) -> None:
        super().__init__(mine={})

    def _alive(self) -> Mapping[str, str]:
        return {}

    def vouched(self, node_id: str) -> bool:
        return True


class DispatcherAlone(RolloutDispatcher):
    """A dispatcher alone. `meanwhile`, `buffer_of` and the hooks may be changed at any time."""

    def __init__(
        self,
        spawn: Callable[[str], Any],
        options: RolloutOptions,
        *,
        start_timeout_s: float = 600.0,
        on_event: Callable[[str, str], None] = nothing,
        on_span: Callable[[str, str, float, float], None] = nothing,
        on_window: Callable[..., None] = nothing,
        on_passes: Callable[..., None] = nothing,
        on_spot: Callable[..., None] = nothing,
        on_weights: Callable[..., None] = nothing,
        on_weights_gone: Callable[[], bool] = lambda: False,
        placed: Callable[[str], bool] = lambda name: True,
        refused: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        context = Context(loop=EventLoop(clock), observer=Told(on_event, on_span), wall=wall)
        starts = cast(WorkerStarts, Starts(spawn, placed))
        super().__init__(starts, options, context, start_timeout_s=start_timeout_s, refused=refused)
        self._on_event, self._on_window, self._on_passes = on_event, on_window, on_passes
        self._on_spot, self._on_weights, self._on_weights_gone = on_spot, on_weights, on_weights_gone
        self._on_finished: Callable[[Rollout], object] = nothing
        self.meanwhile: Callable[[], object] = nothing
        self.tick: Callable[[], object] = nothing
        self.buffer_of: Callable[[str], Any] = lambda node_id: None
        self.loop = context.loop
        self.loop.react_with(self._react)

    def run(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Rollout], object],
        *,
        tick: Callable[[], object] = nothing,
        should_stop: Callable[[], bool] = lambda: False,
        more: Callable[[], bool] = lambda: False,
    ) -> DispatchStats:
        """Sample all requests. `tick`: called after every turn of the loop. `more`: requests are still to come
        (`submit`)."""
        self.begin(requests)
        self._on_finished, self.tick = on_finished, tick
        stopped = True
        try:
            self.wait(lambda: should_stop() or (self.done and not more()))
            stopped = not (self.done and not more())
        finally:
            self._on_finished = self.tick = nothing
            stats = self.end(abort=stopped)
        return stats

    def _react(self, event: Any) -> None:
        match event:
            case WorkerArrived():
                self.receive(event)
            case Finished(rollout):
                self._on_finished(rollout)
            case WorkerChanged(kind, worker, message):
                self._on_event(kind, f"{worker}: {message}")
            case WorkerNews(worker, EngineWindow() as window):
                self._on_window(worker, window)
            case WorkerNews(worker, PassEvent() as passed):
                self._on_passes(worker, passed)
            case WorkerNews(worker, Weights() as weights):
                self._on_weights(worker, weights)
            case WorkerNews(worker, news):
                self._on_spot(worker, news)
            case WorkerUp(seat):
                if (buffer := self.buffer_of(seat.node_id)) is not None:
                    self.drafters.use_buffer(seat, buffer)
            case WeightsGone():
                with self.unheard():
                    renewed = self._on_weights_gone()
                if not renewed:
                    self.give_up(event)
            case Look():
                self.look()
                self.meanwhile()
                self.tick()


class PoolAlone(RewardPool):
    """A reward pool alone. `meanwhile` may be changed at any time."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        grader: type[LaneGrader] = LaneGrader,
        actor_options: Callable[[], Mapping[str, Any]] = dict,
        start_timeout_s: float = 120.0,
        on_event: Callable[[str, str], None] = nothing,
        on_span: Callable[[str, str, float, float], None] = nothing,
        log: Callable[[str], str | None] = no_log,
    ) -> None:
        self.loop = EventLoop()
        self.meanwhile: Callable[[], object] = nothing
        context = Context(loop=self.loop, observer=Told(on_event, on_span), log=log)
        super().__init__(options, context, grader=grader, actor_options=actor_options, start_timeout_s=start_timeout_s)
        self.loop.react_with(self._react)

    def poll(self) -> None:
        """Take the graded responses; does not wait."""
        self.loop.turn()

    def _react(self, event: Any) -> None:
        match event:
            case GradesArrived():
                self.receive(event)
            case Look():
                self.look()
                self.meanwhile()
