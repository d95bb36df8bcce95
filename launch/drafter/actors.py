"""The actors that drafter training needs besides the rollout workers: the coordinator, and a data buffer on every node.

Owns their start, their placement and their end; Ray restarts them whenever they die.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.coordinator import CoordinatorActor
from config.coordinator import LOOPBACK, CoordinatorOptions
from coordinator.transport.security import Keys
from launch.cluster.address import attaches
from launch.config import Config
from launch.dispatch import worker_name
from launch.node_buffers import NodeBuffers, live_nodes, placed
from launch.run_folder import log_file

KEYS_DIR = "coordinator-keys"


def home(here: str, nodes: Collection[str], avoid: Collection[str]) -> str:
    """Return the coordinator's node: the driver's, where people look for it; another one if that must be avoided."""
    return here if here not in avoid else min(set(nodes) - set(avoid), default=here)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterActors:
    coordinator: Any
    workers: Collection[str]  # workers that the coordinator knows from its start
    endpoint: str  # of the coordinator: tcp://host:port
    buffers: NodeBuffers
    keys: Keys  # of every process that speaks to the coordinator


def reachable_options(config: Config, there: Mapping[str, str], at: str) -> CoordinatorOptions:
    """Return options for a coordinator on node `at` that every worker can reach. If workers may run on other nodes, it
    listens at its node's address: `embedded` also spans CPU nodes, and an elastic run's workers may get future nodes.

    there: nodes' addresses by id."""
    options = config.coordinator
    alone = len(there) == 1 and not (attaches(config.cluster.address) and config.rollout.workers.elastic)
    if options.host not in LOOPBACK or (config.cluster.layout == "embedded" and alone):
        return options
    return options.model_copy(update={"host": there[at]})


@contextmanager
def drafter_actors(config: Config, run_dir: Path, avoid: Collection[str] = ()) -> Iterator[DrafterActors]:
    """Run the actors for the length of a job. `avoid`: ids of nodes that get none. Raises what the coordinator's start
    raises."""
    there = live_nodes()
    at = home(ray.get_runtime_context().get_node_id(), there, avoid)
    keys = Keys(reachable_options(config, there, at), run_dir / KEYS_DIR)
    workers = [worker_name(index) for index in range(config.rollout.workers.max)]
    with ExitStack() as stack:
        coordinator = placed(CoordinatorActor, "coordinator", at, soft=False).remote(
            keys.options,
            str(run_dir.resolve()),
            workers,
            run=secrets.token_hex(8),
            log=log_file(run_dir, "coordinator"),
        )
        stack.callback(ray.kill, coordinator, no_restart=True)
        buffers = NodeBuffers(config.drafter, run_dir, avoid)
        stack.callback(buffers.close)
        buffers.follow()
        endpoint = str(ray.get(coordinator.endpoint.remote(), timeout=config.cluster.start_timeout_s))
        yield DrafterActors(coordinator=coordinator, workers=workers, endpoint=endpoint, buffers=buffers, keys=keys)
