"""A fleet on a real head: pretended engines, real reservations; workers join, leave a drained node and come back."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.placement import place
from benchmarks.alone import AllVouched, DispatcherAlone, spawner
from config.rollout import EngineOptions, RolloutOptions, WorkerCount
from contracts.rollout import Rollout
from launch.dispatch import SeatState
from launch.fleet import Autoscaler, Fleet
from launch.fleet.autoscaler import scaled
from tests.actors.fake_engine import FakeEngine, FakeOptions
from tests.actors.test_dispatch_ray import check, requests, weights
from tests.actors.test_placement import placing
from tests.context import run_context
from tests.launch.fleet_world import config_of

pytestmark = pytest.mark.ray

COUNT = WorkerCount(min=1, max=2)
FAKE = FakeOptions(step_s=0.004, progress_every_tokens=1000)  # what goes on elsewhere was handed back


def test_workers_join_a_rollout_leave_a_drained_node_and_come_back_with_the_same_tokens() -> None:
    here = ray.get_runtime_context().get_node_id()
    options = RolloutOptions(workers=COUNT, engine=EngineOptions(max_running=2), max_retries=0, max_worker_restarts=0)
    events: list[tuple[str, str]] = []
    note: Any = lambda kind, message: events.append((kind, message))  # noqa: E731
    with place(placing(workers=COUNT.min, cpus_per_worker=0.001, cpus_per_learner=0.001)) as placement:
        dispatcher = DispatcherAlone(
            spawner(lambda name: partial(FakeEngine, FAKE), placement.worker_options), options, on_event=note
        )
        learner: Any = SimpleNamespace(busy=False)
        autoscaler = Autoscaler(placement.plan, there=scaled())
        context = run_context(config_of(COUNT), on_event=note)
        fleet = Fleet(dispatcher, placement, learner, AllVouched(), None, autoscaler, context)
        try:
            fleet.start()
            dispatcher.set_weights(*weights(3))
            assert list(dispatcher.workers()) == ["rollout-0"]
            done: list[Rollout] = []
            acted: list[str] = []

            def tick() -> None:
                fleet.look()
                ready = [now.state for now in dispatcher.workers().values()].count(SeatState.READY)
                if not acted and ready == 2:
                    acted.append("drained")
                    fleet.drain(here, "spot notice")
                elif acted == ["drained"] and any(kind == "worker_left" for kind, _ in events):
                    acted.append("returned")
                    fleet.admit(here, "spot notice")

            fleet.begins("rollout")
            stats = dispatcher.run(asked := requests(400, max_new_tokens=48), done.append, tick=tick)
            fleet.ends(stats.tokens)
            check(done, asked)
            assert acted == ["drained", "returned"]
            assert (stats.failed, stats.lost_workers) == ((), 0)
            assert stats.reissued > 0
            kinds = [kind for kind, _ in events]
            assert kinds.count("worker_left") >= 2, "both; and who waited for room elsewhere, if somebody did"
            assert "worker_joined" in kinds
            assert set(fleet.held(here)) == set(fleet.state.up)
        finally:
            dispatcher.close()
