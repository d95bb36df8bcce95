"""A data buffer on every node, and the start of actors that stay on a node. Ray restarts them whenever they die."""

import logging
import time
from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.data_buffer import DataBufferActor
from actors.identity import unique_name
from config.drafter import DrafterOptions
from launch.run_folder import log_file

_FOLLOW_S = 1.0  # between two checks for nodes that have joined or left
_log = logging.getLogger(__name__)


def live_nodes() -> dict[str, str]:
    """Return the addresses of the nodes that are alive, by id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def placed(actor: type, name: str, node_id: str, *, soft: bool) -> Any:
    """Return the actor class with its name on that node; Ray restarts it whenever it dies. soft: or on another node."""
    where = NodeAffinitySchedulingStrategy(node_id, soft=soft)
    return ray.remote(actor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=where, name=unique_name(name))


class NodeBuffers:
    """One data buffer on each node that is alive, in `by_node` (by node id); none on the nodes to `avoid`."""

    def __init__(self, options: DrafterOptions, run_dir: Path, avoid: Collection[str]) -> None:
        self.by_node: dict[str, Any] = {}
        self._options, self._run_dir, self._avoid = options, run_dir, avoid
        self._numbers = count()
        self._look_s = float("-inf")

    def of(self, node_id: str) -> Any:
        """Return the data buffer of a node where an actor of the run has come up. Ray's list of nodes may be older.
        Never waits."""
        if node_id not in self.by_node:
            self.by_node[node_id] = self._start(node_id)
        return self.by_node[node_id]

    def follow(self) -> None:
        """Give new nodes a buffer, and end those of lost nodes. Cheap, never waits, never raises: it runs for every
        worker that starts, and the head may be restarting."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + _FOLLOW_S
        try:
            nodes = set(live_nodes())
        except Exception:  # Ray raises any exception
            _log.warning("the cluster's nodes could not be listed", exc_info=True)
            return
        for node_id in sorted(nodes - self.by_node.keys() - set(self._avoid)):
            self.by_node[node_id] = self._start(node_id)
        for node_id in self.by_node.keys() - nodes:
            self._end(self.by_node.pop(node_id))

    def close(self) -> None:
        for buffer in self.by_node.values():
            self._end(buffer)

    def _start(self, node_id: str) -> Any:
        name = f"buffer-{next(self._numbers)}"
        options, log = self._options, log_file(self._run_dir, name)
        return placed(DataBufferActor, name, node_id, soft=True).remote(options.buffer, options.seed, name, log=log)

    def _end(self, buffer: Any) -> None:
        ray.kill(buffer, no_restart=True)
