"""The driver's side of rollout. It owns every request and lends them to workers.

    dispatcher = RolloutDispatcher(starts, rollout, context, start_timeout_s=timeout_s)    # starts: WorkerStarts
    dispatcher.start()
    for step in range(steps):
        dispatcher.set_weights(manifest, ref)              # PacelineError names the worker
        dispatcher.begin(requests)                         # each comes as Finished
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
        RolloutProgressed,
        WeightsGone,
        WorkerChanged,
        WorkerNews,
        WorkerUp,
    )
    from launch.dispatch.ledger import FailedRequest
    from launch.dispatch.requests import DispatchStats
    from launch.dispatch.seat import (
        SeatState,
        Weights,
        WorkerArrived,
        WorkerHandle,
        WorkerNow,
        WorkerStarts,
        worker_name,
    )

# Modules of the names. Imports are lazy, since planner.simulate uses the ledger without Ray.
_WHERE = {
    "DispatchStats": "requests",
    "DispatchEvent": "events",
    "RolloutProgressed": "events",
    "WeightsGone": "events",
    "WorkerChanged": "events",
    "WorkerNews": "events",
    "WorkerUp": "events",
    "Delta": "seat",
    "Deltas": "seat",
    "FailedRequest": "ledger",
    "RolloutDispatcher": "dispatcher",
    "SeatState": "seat",
    "Weights": "seat",
    "WorkerArrived": "seat",
    "WorkerHandle": "seat",
    "WorkerNow": "seat",
    "WorkerStarts": "seat",
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
    "FailedRequest",
    "RolloutDispatcher",
    "RolloutProgressed",
    "SeatState",
    "Weights",
    "WeightsGone",
    "WorkerArrived",
    "WorkerChanged",
    "WorkerHandle",
    "WorkerNews",
    "WorkerNow",
    "WorkerStarts",
    "WorkerUp",
    "worker_name",
]
