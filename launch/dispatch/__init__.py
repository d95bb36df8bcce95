"""The driver's side of rollout: it owns every request, workers only borrow them.

    from functools import partial
    from actors.engine.process import spawn_engine
    from launch.dispatch import RolloutDispatcher, spawner

    spawn = spawner(
        lambda name: partial(spawn_engine, config.model, config.rollout.engine, seed=config.run.seed, name=name),
        placement.worker_options,     # of a name: ray options (num_cpus, scheduling_strategy, ...)
    )
    dispatcher = RolloutDispatcher(
        spawn, config.rollout, start_timeout_s=config.cluster.start_timeout_s, on_event=observer.event, on_span=...
    )
    dispatcher.start()
    for step in range(steps):
        dispatcher.set_weights(manifest, ref)              # StaleWeightsError names the worker
        stats = dispatcher.run(requests, on_finished=lambda rollout: pool.submit(...), tick=pool.poll)
    dispatcher.close()

`run` returns when every request has finished or failed (`stats.failed`: rejected, or lost more than `max_retries`
times; its group goes on without it). A lost worker (its actor or engine died, or it made no progress for
`stall_timeout_s`) costs time, never tokens: its requests go on elsewhere with the tokens they had. Workers go by name;
`join(name)` and `leave(name)` add one and let one go at any time, in the middle of a `run` too.
"""

from launch.dispatch.dispatcher import RolloutDispatcher
from launch.dispatch.errors import NoWorkersError, StaleWeightsError, WorkerStartError
from launch.dispatch.ledger import FailedRequest
from launch.dispatch.seat import Weights, worker_name
from launch.dispatch.spawn import spawner
from launch.dispatch.stats import DispatchStats

__all__ = [
    "DispatchStats",
    "FailedRequest",
    "NoWorkersError",
    "RolloutDispatcher",
    "StaleWeightsError",
    "Weights",
    "WorkerStartError",
    "spawner",
    "worker_name",
]
