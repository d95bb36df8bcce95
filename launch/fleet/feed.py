"""News about the cluster's nodes: from a thread of the driver, and a watcher on every other node.

Owns the watchers, also on nodes that join later, and the queries to Ray about its nodes. Decides nothing. The driver
never waits for it: news are events of its loop. A failure here costs notices, not the run.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.context import Context
from actors.identity import unique_name
from actors.notice_watcher import NoticeWatcher, agent_of
from actors.notices.http import Http
from actors.notices.types import Withdrawn
from actors.notices.watch import Trouble, WatchEvent, watch
from config.spot import SpotOptions

LOOK_S = 0.5  # between two checks of Ray's draining nodes, if no watcher reports
NODES_S = 2.0  # between two checks for nodes that have joined or left
AGAIN_S = 30.0  # a lost watcher is started again after this time
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class RayDrains:
    """Ray itself drains the node (`ray drain-node`, or its autoscaler)."""

    WHAT: ClassVar[str] = "Ray drains it"
    at_s: float | None  # Unix time at which it will be ended; None: not announced


@dataclass(frozen=True, slots=True)
class Gone:
    """The node has left the cluster."""


@dataclass(frozen=True, slots=True)
class Heard:
    node_id: str
    address: str
    event: WatchEvent | RayDrains | Gone
    heard_s: float  # monotonic, of the driver


class NoticeFeed:
    """Runs from construction to `close`. Posts news to the driver's loop, as Heard."""

    def __init__(self, options: SpotOptions, here: str, context: Context) -> None:
        """here: the driver's node, which needs no actor."""
        self._options, self._here, self._context = options, here, context
        self._over = threading.Event()
        self._nodes: dict[str, str] = {}  # addresses of nodes alive, by id
        self._watchers: dict[str, Any] = {}  # by node id
        self._asked: dict[Any, str] = {}  # pending answers of watchers: node id
        self._again_s: dict[str, float] = {}  # by node id: not before, after a loss ...
        self._lost: dict[str, str] = {}  # ... and its reason, reported if the node is still there then
        self._drains: dict[str, int] = {}
        self._said: set[str] = set()
        self._threads = [threading.Thread(target=self._run, name="notices", daemon=True)]
        if options.provider != "none":
            self._threads.append(threading.Thread(target=self._watch_here, name="notices-here", daemon=True))
        for thread in self._threads:
            thread.start()

    def drained(self, node_id: str, holds: bool) -> None:
        """Pass on to the node's watcher whether nothing of the run is left there. Does not wait."""
        watcher = self._watchers.get(node_id)  # the driver's own node is never drained
        if watcher is not None:
            watcher.drained.remote(holds)

    def close(self) -> None:
        self._over.set()
        self._threads[0].join(CLOSE_S)  # the other may be in the middle of a query, and ends by itself
        for watcher in list(self._watchers.values()):  # the thread may be in the middle of starting one
            ray.kill(watcher, no_restart=True)
        self._watchers.clear()

    # Run on the threads.

    def _watch_here(self) -> None:
        http = Http(self._options.base_url, agent_of(self._here))
        for event in watch(self._options, http, clock=time.monotonic):
            if not isinstance(event, float):
                self._tell(self._here, event)
            elif self._over.wait(event):
                return

    def _tell(self, node_id: str, event: WatchEvent | RayDrains | Gone) -> None:
        self._context.loop.post(Heard(node_id, self._nodes.get(node_id, ""), event, time.monotonic()))

    def _run(self) -> None:
        nodes_at_s = 0.0
        while not self._over.is_set():
            if time.monotonic() >= nodes_at_s:
                with self._guarded():
                    self._look_for_nodes()
                nodes_at_s = time.monotonic() + NODES_S
            with self._guarded():
                self._look_for_drains()
            listened = False
            with self._guarded():
                self._listen()
                listened = True
            if not listened:
                self._over.wait(LOOK_S)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Each way of hearing fails for itself. Ray's own watch ends the run where Ray is lost."""
        try:
            yield
        except Exception as error:  # Ray raises what it likes, and what is private may be gone
            self._trouble(f"Ray cannot be asked about its nodes: {_words(error)}")

    def _look_for_nodes(self) -> None:
        alive = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}  # type: ignore[no-untyped-call]
        gone = self._nodes.keys() - alive.keys()
        self._nodes |= alive
        for node_id in gone:
            self._tell(node_id, Gone())
            del self._nodes[node_id]
            self._watchers.pop(node_id, None)
            self._again_s.pop(node_id, None)
            self._lost.pop(node_id, None)
        if self._options.provider == "none":
            return
        now_s = time.monotonic()
        for node_id in alive.keys() - self._watchers.keys() - {self._here}:
            if self._over.is_set():
                return
            if now_s >= self._again_s.get(node_id, 0.0) and node_id not in self._drains:
                self._start(node_id)

    def _start(self, node_id: str) -> None:
        if reason := self._lost.pop(node_id, ""):
            self._trouble(reason, node_id)
        name = f"notices-{node_id[:8]}"
        actor: Any = ray.remote(NoticeWatcher).options(
            num_cpus=0,
            name=unique_name(name),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        self._watchers[node_id] = actor.remote(self._options, node_id, self._context.log(name))
        self._ask(node_id)

    def _ask(self, node_id: str) -> None:
        self._asked[self._watchers[node_id].heard.remote()] = node_id

    def _look_for_drains(self) -> None:
        drains: dict[str, int] = ray._private.state.state.get_draining_nodes()
        for node_id, deadline_ms in drains.items():
            if node_id not in self._drains:
                self._tell(node_id, RayDrains(deadline_ms / 1000 if deadline_ms > 0 else None))
        if over := self._drains.keys() - drains.keys():
            self._look_for_nodes()  # a node that has left is not draining any more
            for node_id in over & self._nodes.keys():
                self._tell(node_id, Withdrawn(RayDrains.WHAT))
        self._drains = dict(drains)

    def _listen(self) -> None:
        if not self._asked:
            self._over.wait(LOOK_S)
            return
        refs = list(self._asked)
        ready, _ = ray.wait(refs, num_returns=1, timeout=LOOK_S)
        if ready:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            node_id = self._asked.pop(ref)
            try:
                events: list[WatchEvent] = ray.get(ref, timeout=LOOK_S)
            except RayError as error:
                self._watchers.pop(node_id, None)
                self._again_s[node_id] = time.monotonic() + AGAIN_S
                self._lost[node_id] = f"its watcher was lost: {_words(error)}"
                continue
            for event in events:
                self._tell(node_id, event)
            self._ask(node_id)

    def _trouble(self, reason: str, node_id: str = "") -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._tell(node_id or self._here, Trouble(reason))


def _words(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
