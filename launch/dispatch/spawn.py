"""Make workers for the dispatcher: Ray actors with names, resources and initial arguments. Owns no worker."""

from collections.abc import Callable
from typing import Any

import ray

from actors.identity import unique_name
from actors.rollout_worker import EngineFactory, RolloutWorker
from actors.spot_host import SpotPlan
from launch.dispatch.seat import WorkerHandle


def spawner(
    factory: Callable[[str], EngineFactory],
    options: Callable[[str], dict[str, Any]] = lambda name: {},
    spot: Callable[[str], SpotPlan | None] = lambda name: None,
    log: Callable[[str], str | None] = lambda name: None,
) -> Callable[[str], WorkerHandle]:
    """Return the function that makes worker `name`. `factory(name)` is its picklable engine factory, `options(name)`
    its Ray actor options (resources, scheduling strategy). `spot(name)` is how it trains the drafter when it is out of
    work, `log(name)` its log file."""

    def spawn(name: str) -> WorkerHandle:
        worker = ray.remote(RolloutWorker).options(**{"num_cpus": 0, **options(name), "name": unique_name(name)})
        return worker.remote(name, factory(name), spot(name), log(name))

    return spawn
