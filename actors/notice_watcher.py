"""Watch of one node's cloud metadata service, as a Ray actor on that node. Runs a thread and queues its events.

watcher = ray.remote(NoticeWatcher).options(num_cpus=0, scheduling_strategy=on_that_node).remote(options, node_id)
events = ray.get(watcher.heard.remote())     # answers when there is something: Watching, SpotNotice, Withdrawn, ...
"""

import asyncio
import contextlib
import threading
import time

import ray

from actors.identity import log_to
from actors.notices.http import Http
from actors.notices.watch import WatchEvent, watch
from config.spot import SpotOptions


def agent_of(node_id: str) -> str:
    """Return a node's user agent, for a proxy's log."""
    return f"paceline (Ray node {node_id})"


class NoticeWatcher:
    """See the module docstring. Its methods run on one event loop, the watch on a thread."""

    def __init__(self, options: SpotOptions, node_id: str, log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, f"notices-{node_id[:8]}")
        self._options, self._node_id = options, node_id
        self._events: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self._begun = False
        self._drained = threading.Event()

    def __repr__(self) -> str:
        return f"notices-{self._node_id[:8]}"

    @ray.method
    async def heard(self) -> list[WatchEvent]:
        """Return the events since the last answer, waiting for the first. The first call starts the watch."""
        if not self._begun:
            self._begun = True
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._watch, args=(loop,), name="notices", daemon=True).start()
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    @ray.method
    async def drained(self, holds: bool) -> None:
        """Set whether nothing of the run is left on the node."""
        (self._drained.set if holds else self._drained.clear)()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        http = Http(self._options.base_url, agent_of(self._node_id))
        for event in watch(self._options, http, clock=time.monotonic, drained=self._drained):
            if isinstance(event, float):
                time.sleep(event)
                continue
            with contextlib.suppress(RuntimeError):  # the loop is closed: the actor is ending
                loop.call_soon_threadsafe(self._events.put_nowait, event)
