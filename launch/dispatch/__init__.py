"""The driver's side of rollout. It owns every request and lends them to workers.

    from functools import partial
    from actors.engine.process import spawn_engine
    from launch.dispatch import RolloutDispatcher, spawner

    spawn = spawner(
        lambda name: partial(spawn_engine, model, engine, seed=seed, name=name),
        placement.worker_options,     # per name: Ray options (num_cpus, scheduling_strategy, ...)
    )
    dispatcher = RolloutDispatcher(spawn, rollout, context, start_timeout_s=timeout_s)
    dispatcher.start()
    for step in range(steps):
        dispatcher.set_weights(manifest, ref)              # PacelineError names the worker
        dispatcher.begin(requests)                         # each comes as RolloutEnded
        dispatcher.wait(lambda: dispatcher.done)
        stats = dispatcher.end(abort=False)
    dispatcher.close()

A run is done when every request has finished or failed. A request fails if it is rejected, or lost more than
`max_retries` times (`stats.failed`); its group goes on without it. A worker is lost if its actor or engine dies, or if
it makes no progress for `stall_timeout_s`. That costs time, never tokens: its requests continue elsewhere from the
tokens they had. `join(name)` adds a worker and `leave(name)` lets one go, at any time, also during a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.dispatch.dispatcher import RolloutDispatcher
    from launch.dispatch.events import (
        DispatchEvent,
        DrafterNews,
        DrafterPublished,
        RolloutEnded,
        RolloutProgressed,
        WeightsGone,
        WorkerChanged,
        WorkerMeasured,
        WorkerSampled,
        WorkerUp,
    )
    from launch.dispatch.ledger import FailedRequest
    from launch.dispatch.seat import SeatState, Weights, WorkerArrived, WorkerNow, worker_name
    from launch.dispatch.spawn import spawner
    from launch.dispatch.stats import DispatchStats

# Modules of the names. Imports are lazy, since planner.simulate uses the ledger without Ray.
_WHERE = {
    "DispatchStats": "stats",
    "DispatchEvent": "events",
    "DrafterNews": "events",
    "DrafterPublished": "events",
    "RolloutEnded": "events",
    "RolloutProgressed": "events",
    "WeightsGone": "events",
    "WorkerChanged": "events",
    "WorkerMeasured": "events",
    "WorkerSampled": "events",
    "WorkerUp": "events",
    "Delta": "seat",
    "Deltas": "seat",
    "FailedRequest": "ledger",
    "RolloutDispatcher": "dispatcher",
    "SeatState": "seat",
    "Weights": "seat",
    "WorkerArrived": "seat",
    "WorkerNow": "seat",
    "spawner": "spawn",
    "worker_name": "seat",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = [
    "Delta",
    "Deltas",
    "DispatchEvent",
    "DispatchStats",
    "DrafterNews",
    "DrafterPublished",
    "FailedRequest",
    "RolloutDispatcher",
    "RolloutEnded",
    "RolloutProgressed",
    "SeatState",
    "Weights",
    "WeightsGone",
    "WorkerArrived",
    "WorkerChanged",
    "WorkerMeasured",
    "WorkerNow",
    "WorkerSampled",
    "WorkerUp",
    "spawner",
    "worker_name",
]
