"""The GPUs of a whole reservation, although Ray shows its worker only some."""

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_ASKING = 0.01  # of a GPU: for a task that reports the GPU of its bundle


def group_gpus(timeout_s: float) -> list[int] | None:
    """Return the GPUs of all bundles of this process's placement group; None: it has none, and may use what it sees.

    Call it in the worker, at every start of its engine: after a lost node the group may be on another one, with other
    GPUs. timeout_s: for the tasks' answers, which take seconds. Raises ray.exceptions.GetTimeoutError."""
    group = get_current_placement_group()
    if group is None:
        return None
    ask: Any = ray.remote(num_cpus=0, num_gpus=_ASKING, max_retries=0)(ray.get_gpu_ids)
    asked = [
        ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
        for bundle in range(group.bundle_count)
    ]
    return [int(gpu) for (gpu,) in ray.get(asked, timeout=timeout_s)]
