"""An engine on all GPUs of a reservation, although Ray shows its worker only some. Finds the other GPUs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

T = TypeVar("T", covariant=True)
_ASKING = 0.01  # of a GPU: for a task that reports the GPU of its bundle


@dataclass(frozen=True, slots=True)
class GroupEngine(Generic[T]):
    """An engine factory for a rollout worker whose group has several bundles: the engine gets the GPUs of all of them.

    Finds them in the worker, at every start: after a lost node the group may be on another one, with other GPUs.
    """

    spawn: Callable[..., T]  # called with `gpus`, the GPUs for the engine; None: those visible to this process
    timeout_s: float  # for the tasks' answers, which take seconds

    def __call__(self) -> T:
        """Start the engine. Raises ray.exceptions.GetTimeoutError."""
        group = get_current_placement_group()
        if group is None:  # no reservation: the engine may use all visible GPUs
            return self.spawn()
        ask: Any = ray.remote(num_cpus=0, num_gpus=_ASKING, max_retries=0)(ray.get_gpu_ids)
        asked = [
            ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
            for bundle in range(group.bundle_count)
        ]
        return self.spawn(gpus=[int(gpu) for (gpu,) in ray.get(asked, timeout=self.timeout_s)])
