"""Notices when the coordinator or a data buffer was lost, and says so. Owns no actor: Ray starts them again.

Both may be back before anyone asks. Then the coordinator's term has risen, and what a buffer ever took in has fallen.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from coordinator.address import Address
from drafter.training.buffer import BufferStats

_TIMEOUT_S = 1.0


class DrafterWatch:
    """`on_event` gets `coordinator_lost` and `buffer_lost`, once per loss."""

    def __init__(
        self, coordinator: Any, buffers: Mapping[str, Any], run_dir: Path, on_event: Callable[[str, str], None]
    ) -> None:
        """buffers: by node id."""
        self._coordinator, self._buffers, self._run_dir, self._on_event = coordinator, buffers, run_dir, on_event
        self._term = self._known_term()
        self._lost_coordinator = False
        self._added = dict.fromkeys(buffers, 0)

    def look(self) -> dict[str, BufferStats]:
        """Ask all of them, for a second at most; what the buffers hold, as far as they answer."""
        asked: dict[Any, str | None] = {self._coordinator.endpoint.remote(): None}
        asked |= {buffer.stats.remote(): node for node, buffer in self._buffers.items()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_TIMEOUT_S)
        found: dict[str, BufferStats] = {}
        for ref, node in asked.items():
            if ref not in ready:
                self._failed(node, f"it does not answer within {_TIMEOUT_S:g} s")
                continue
            try:
                answer = ray.get(ref, timeout=_TIMEOUT_S)
            except RayError as error:
                self._failed(node, str(error).strip().partition("\n")[0])
                continue
            if node is None:
                self._coordinator_answered()
            else:
                self._buffer_answered(node, answer)
                found[node] = answer
        return found

    def _failed(self, node: str | None, reason: str) -> None:
        if node is not None:
            if self._added[node]:
                self._say_buffer(node, reason)
            self._added[node] = 0
        elif not self._lost_coordinator:
            self._lost_coordinator = True
            self._say_coordinator(reason)

    def _coordinator_answered(self) -> None:
        term = self._known_term()
        if term > self._term and not self._lost_coordinator:
            self._say_coordinator("another one has taken its place")
        self._lost_coordinator = self._lost_coordinator and term == self._term
        self._term = term

    def _buffer_answered(self, node: str, stats: BufferStats) -> None:
        if stats.added < self._added[node]:
            self._say_buffer(node, "another one has taken its place")
        self._added[node] = stats.added

    def _say_coordinator(self, reason: str) -> None:
        self._on_event("coordinator_lost", f"{reason}; Ray starts it again, rollouts go on without it")

    def _say_buffer(self, node: str, reason: str) -> None:
        self._on_event("buffer_lost", f"data buffer of node {node[:8]}: {reason}; what it held is given up")

    def _known_term(self) -> int:
        address = Address.read(self._run_dir)
        return 0 if address is None else address.term
