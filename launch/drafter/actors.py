"""The actors that drafter training needs beside the rollout workers: the coordinator, and a data buffer on every node.
Owns their start, where they run, and their end; Ray starts them again whenever they die.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.coordinator import CoordinatorActor
from actors.data_buffer import DataBufferActor
from actors.identity import unique_name
from launch.config import Config
from launch.dispatch import worker_name
from launch.run_folder import log_file


@dataclass(frozen=True, slots=True)
class DrafterActors:
    coordinator: Any
    workers: Collection[str]  # whom the coordinator knows from its start
    endpoint: str  # of the coordinator: tcp://host:port
    buffers: Mapping[str, Any]  # by node id


@contextmanager
def drafter_actors(config: Config, run_dir: Path) -> Iterator[DrafterActors]:
    """For the length of a job. Raises what the coordinator's start raises."""
    started: list[Any] = []

    def start(actor: type, name: str, node: str, *args: Any, soft: bool, **more: Any) -> Any:
        where = NodeAffinitySchedulingStrategy(node, soft=soft)
        home: Any = ray.remote(actor).options(
            num_cpus=0, max_restarts=-1, scheduling_strategy=where, name=unique_name(name)
        )
        started.append(home.remote(*args, **more, log=log_file(run_dir, name)))
        return started[-1]

    try:
        here = ray.get_runtime_context().get_node_id()
        reachable = config.cluster.layout != "embedded"
        workers = [worker_name(index) for index in range(config.rollout.workers)]
        args = config.coordinator, str(run_dir.resolve()), workers
        coordinator = start(CoordinatorActor, "coordinator", here, *args, reachable=reachable, soft=False)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        options = config.drafter
        buffers = {}
        for index, node in enumerate(nodes):
            name = f"buffer-{index}"
            buffers[node] = start(DataBufferActor, name, node, options.buffer, options.seed, name, soft=True)
        endpoint = ray.get(coordinator.endpoint.remote(), timeout=config.cluster.start_timeout_s)
        yield DrafterActors(coordinator, workers, str(endpoint), buffers)
    finally:
        for actor in started:
            ray.kill(actor, no_restart=True)
