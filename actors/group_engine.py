"""An engine on all GPUs of a reservation, although Ray shows its worker only some. Finds the other GPUs."""

from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

T = TypeVar("T")
_ASKING = 0.01  # of a GPU: for a task that reports the GPU of its bundle


def spawn_on_group(spawn: Callable[..., T], timeout_s: float) -> T:
    """Start the engine of a rollout worker whose group has several bundles, on the GPUs of all of them.

    Finds them in the worker, at every start: after a lost node the group may be on another one, with other GPUs.
    spawn: called with `gpus`, the GPUs for the engine; without, where the process may use all that it sees.
    timeout_s: for the tasks' answers, which take seconds. Raises ray.exceptions.GetTimeoutError."""
    group = get_current_placement_group()
    if group is None:  # no reservation
        return spawn()
    ask: Any = ray.remote(num_cpus=0, num_gpus=_ASKING, max_retries=0)(ray.get_gpu_ids)
    asked = [
        ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in range(group.bundle_count)
    ]
    return spawn(gpus=[int(gpu) for (gpu,) in ray.get(asked, timeout=timeout_s)])
