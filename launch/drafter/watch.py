"""Detect and report the loss of the coordinator or a data buffer. Owns no actor: Ray restarts them.

An actor may be back before anyone asks; then its process id differs.
"""

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.observer import RunObserver
from drafter.training.buffer import BufferStats

_TIMEOUT_S = 1.0
_START_S = 10.0  # to answer for the first time
_COORDINATOR = ""  # key of the coordinator; buffers have their nodes' ids


class DrafterWatch:
    """`observer` gets `coordinator_lost` and `buffer_lost`, once per loss."""

    def __init__(self, coordinator: Any, buffers: Mapping[str, Any], observer: RunObserver) -> None:
        """buffers: by node id, those that there are at any time. Does not wait."""
        self._coordinator, self._buffers, self._observer = coordinator, buffers, observer
        self._pids: dict[str, int] = {}  # of those that answered when they were last asked
        self._silent: set[str] = set()  # those whose loss was said
        self._first = self._ask()

    def look(self) -> dict[str, BufferStats]:
        """Ask all of them, for at most 1 s (10 s the first time). Returns what the buffers hold, as far as
        they answer."""
        first, self._first = self._first, {}
        if first:
            ray.wait(list(first), num_returns=len(first), timeout=_START_S)
        stats = {buffer.stats.remote(): node for node, buffer in self._buffers.items()}
        pids = self._ask()
        refs = [*first, *pids, *stats]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_TIMEOUT_S)
        for asked in (first, pids):
            for ref, name in asked.items():
                self._answered(name, ref, ref in ready)
        return {node: held for ref, node in stats.items() if ref in ready and (held := _get(ref)) is not None}

    def _ask(self) -> dict[Any, str]:
        def pid(_actor: Any) -> int:  # local, so that it is pickled by value: the actor need not import this module
            return os.getpid()

        return {
            actor.__ray_call__.remote(pid): name
            for name, actor in {_COORDINATOR: self._coordinator, **self._buffers}.items()
        }

    def _answered(self, name: str, ref: Any, ready: bool) -> None:
        if name != _COORDINATOR and name not in self._buffers:
            return  # it was lost with its node
        try:
            pid = ray.get(ref, timeout=_TIMEOUT_S) if ready else None
            reason = f"it does not answer within {_TIMEOUT_S:g} s"
        except RayError as error:
            pid, reason = None, str(error).strip().partition("\n")[0]
        if pid is None:
            self._pids.pop(name, None)
            if name not in self._silent:  # not yet reported
                self._silent.add(name)
                self._say(name, reason)
            return
        self._silent.discard(name)
        if self._pids.setdefault(name, pid) != pid:
            self._pids[name] = pid
            self._say(name, "another one has taken its place")

    def _say(self, name: str, reason: str) -> None:
        if name == _COORDINATOR:
            self._observer.event("coordinator_lost", f"{reason}; Ray restarts it, rollouts continue without it")
        else:
            self._observer.event("buffer_lost", f"data buffer of node {name[:8]}: {reason}; its data is lost")


def _get(ref: Any) -> BufferStats | None:
    try:
        held: BufferStats = ray.get(ref, timeout=_TIMEOUT_S)
    except RayError:
        return None
    return held
