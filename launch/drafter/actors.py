"""The actors that drafter training needs besides the rollout workers: the coordinator, and a data buffer on every node.

Owns their start, their placement and their end; Ray restarts them whenever they die.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.coordinator import CoordinatorActor
from actors.data_buffer import DataBufferActor
from actors.identity import unique_name
from config.coordinator import LOOPBACK, CoordinatorOptions
from coordinator.transport.security import Keys
from launch.cluster.address import attaches
from launch.config import Config
from launch.dispatch import worker_name
from launch.run_folder import log_file

KEYS_DIR = "coordinator-keys"
_FOLLOW_S = 1.0  # between two checks for nodes that have joined or left
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterActors:
    coordinator: Any
    workers: Collection[str]  # workers that the coordinator knows from its start
    endpoint: str  # of the coordinator: tcp://host:port
    buffers: Mapping[str, Any]  # by node id
    keys: Keys  # of every process that speaks to the coordinator
    follow: Callable[[], None] = lambda: None  # gives new nodes a buffer, ends those of lost nodes; never waits
    buffer_of: Callable[[str], Any] = lambda node_id: None  # of a node that may just have joined; never waits


def _nodes() -> dict[str, str]:
    """Return the addresses of the nodes that are alive, by id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def home(here: str, nodes: Collection[str], avoid: Collection[str]) -> str:
    """Return the coordinator's node: the driver's, where people look for it; another one if that must be avoided."""
    return here if here not in avoid else min(set(nodes) - set(avoid), default=here)


class Follow:
    """Keep one data buffer in `buffers` (by node id) for each node that is alive, except those of `avoid`. Cheap, never
    waits, never raises: it runs for every worker that starts, and the head may be restarting."""

    def __init__(
        self,
        buffers: dict[str, Any],
        start: Callable[[str], Any],
        end: Callable[[Any], None],
        avoid: Collection[str],
        *,
        nodes: Callable[[], Collection[str]] = _nodes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffers, self._start, self._end, self._avoid = buffers, start, end, avoid
        self._nodes, self._clock, self._look_s = nodes, clock, float("-inf")

    def buffer_of(self, node: str) -> Any:
        """Return the data buffer of a node where an actor of the run has come up. Ray's list of nodes may be older."""
        if node not in self._buffers:
            self._buffers[node] = self._start(node)
        return self._buffers[node]

    def __call__(self) -> None:
        if self._clock() < self._look_s:
            return
        self._look_s = self._clock() + _FOLLOW_S
        try:
            nodes = set(self._nodes())
        except Exception:  # Ray raises any exception
            _log.warning("the cluster's nodes could not be listed", exc_info=True)
            return
        for node in sorted(nodes - self._buffers.keys() - set(self._avoid)):
            self._buffers[node] = self._start(node)
        for node in self._buffers.keys() - nodes:
            self._end(self._buffers.pop(node))


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
    started: list[Any] = []

    def start(actor: type, name: str, node: str, *args: Any, soft: bool, **more: Any) -> Any:
        where = NodeAffinitySchedulingStrategy(node, soft=soft)
        home: Any = ray.remote(actor).options(
            num_cpus=0, max_restarts=-1, scheduling_strategy=where, name=unique_name(name)
        )
        started.append(home.remote(*args, **more, log=log_file(run_dir, name)))
        return started[-1]

    try:
        there = _nodes()
        at = home(ray.get_runtime_context().get_node_id(), there, avoid)
        keys = Keys(reachable_options(config, there, at), run_dir / KEYS_DIR)
        workers = [worker_name(index) for index in range(config.rollout.workers.max)]
        args = keys.options, str(run_dir.resolve()), workers
        coordinator = start(CoordinatorActor, "coordinator", at, *args, run=secrets.token_hex(8), soft=False)
        drafter, numbers = config.drafter, count()

        def start_buffer(node: str) -> Any:
            name = f"buffer-{next(numbers)}"
            return start(DataBufferActor, name, node, drafter.buffer, drafter.seed, name, soft=True)

        buffers: dict[str, Any] = {}
        follow = Follow(buffers, start_buffer, lambda actor: ray.kill(actor, no_restart=True), avoid)
        follow()
        endpoint = ray.get(coordinator.endpoint.remote(), timeout=config.cluster.start_timeout_s)
        yield DrafterActors(
            coordinator=coordinator,
            workers=workers,
            endpoint=str(endpoint),
            buffers=buffers,
            keys=keys,
            follow=follow,
            buffer_of=follow.buffer_of,
        )
    finally:
        for actor in started:
            ray.kill(actor, no_restart=True)
