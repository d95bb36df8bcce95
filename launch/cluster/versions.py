"""Find nodes whose installation differs from the driver's, before an actor fails there. Each is reported once, not
used.

Owns the query (one task per node, once, that takes no resources) and the list of refused nodes. The code that places
actors keeps them off these nodes (`off` in actors/placement.py).

    versions = compared(session, observer)   # waits for the answers of the nodes that are there
    with place(config, versions.refused) as placement: ...
    versions.look()                                # now and then: asks nodes that have joined; never waits

Ray refuses a node with another Ray or Python at its `ray start` already. It does not know torch and Paceline.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.observer import UNOBSERVED, RunObserver
from actors.placement import off
from launch.cluster.installed import installed
from launch.cluster.session import RaySession
from launch.errors import PacelineError

REMEDY = "install there what the driver runs with (docs/tutorials/cluster.md, Upgrading)"
_START_S = 60.0  # a node with a slower first worker process is checked later
_LOOK_S = 5.0  # between two lists of the cluster's nodes
_TRIES = 3  # of a node on which the task was lost
_log = logging.getLogger(__name__)

Asked = Any  # an ObjectRef of `installed`'s answer


def ask(node_id: str) -> Asked:
    """Ask the node for its versions. Returns a reference to the answer."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(installed)
    return task.options(
        name="versions", scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    ).remote()


def alive() -> dict[str, str]:
    """Return the addresses of the nodes that are alive, by id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Describe the differences in the driver's order, such as `torch 2.12.0 where the driver has 2.13.0`."""
    return [
        f"{name} {theirs.get(name, 'unknown')} where the driver has {value}"
        for name, value in mine.items()
        if theirs.get(name) != value
    ]


def compared(session: RaySession, observer: RunObserver) -> "NodeVersions":
    """The nodes of a cluster at the start of a run. Nobody is asked where the head is this process's own: it runs what
    this process runs. Raises PacelineError if no node can be used."""
    versions = NodeVersions(observer=observer, trusted=alive() if session.owned else ())
    versions.look(_START_S)
    versions.require_one()
    return versions


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """A node on which nothing of the run may be placed."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedGone:
    """A refused node has left the cluster."""

    node_id: str


class NodeVersions:
    """See the module docstring. Not thread-safe. `refused`: the reason shown to people, by node id."""

    def __init__(
        self,
        *,
        observer: RunObserver = UNOBSERVED,
        mine: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        trusted: Collection[str] = (),
    ) -> None:
        """`observer` gets the events node_refused. `trusted`: nodes that are not asked."""
        self.refused: dict[str, str] = {}
        self._observer = observer
        self._mine = installed() if mine is None else mine
        self._clock = clock
        self._nodes: dict[str, str] = {}
        self._asked: dict[Asked, str] = {}
        self._lost: dict[str, int] = {}  # lost tasks by node
        self._known = set(trusted)  # asked, or answered
        self._look_s = float("-inf")  # when nodes are listed again
        self._asked_s: dict[str, float] = {}  # time of the question, by node

    # What Ray is asked.

    def _alive(self) -> Mapping[str, str]:
        return alive()

    def _ask(self, node_id: str) -> Asked:
        return ask(node_id)

    def _wait(self, asked: Sequence[Asked], timeout_s: float) -> Sequence[Asked]:
        answered, _ = ray.wait(list(asked), num_returns=1, timeout=timeout_s, fetch_local=True)
        return answered

    def _get(self, asked: Asked) -> Mapping[str, str]:
        found: Any = ray.get(asked)
        return dict(found)

    # What a run asks.

    def look(self, timeout_s: float = 0.0) -> list[NodeRefused | RefusedGone]:
        """Ask new nodes, take the answers that arrive within `timeout_s`, and return what changed. Cheap if nothing is
        new."""
        changed: list[NodeRefused | RefusedGone] = []
        if timeout_s > 0 or self._clock() >= self._look_s:
            self._look_s = self._clock() + _LOOK_S
            try:
                self._nodes = dict(self._alive())
            except Exception:  # Ray raises any exception while its head restarts; RayWatch decides whether it is lost
                _log.warning("the cluster's nodes could not be listed", exc_info=True)
            for node_id in self.refused.keys() - self._nodes.keys():
                del self.refused[node_id]
                self._known.discard(node_id)  # if only the listing missed it, it is asked again
                changed.append(RefusedGone(node_id))
            for node_id in self._nodes.keys() - self._known:
                self._known.add(node_id)
                self._asked_s.setdefault(node_id, self._clock())
                self._asked[self._ask(node_id)] = node_id
        deadline_s = self._clock() + timeout_s
        while self._asked:
            answered = self._wait(list(self._asked), max(deadline_s - self._clock(), 0.0))
            for each in answered:
                if (refused := self._hear(each)) is not None:
                    changed.append(refused)
            if not answered:
                break
        return changed

    def vouched(self, node_id: str) -> bool:
        """Whether actors may start on the node: its versions agree, or it has not answered for 60 s. An unknown node is
        listed at the next look."""
        if node_id not in self._known:
            self._look_s = float("-inf")
            return self._lost.get(node_id, 0) >= _TRIES
        if node_id in self._asked.values():
            return self._clock() - self._asked_s[node_id] > _START_S
        return node_id not in self.refused

    def asking(self) -> bool:
        """Return whether a node has yet to answer, so that it may be vouched for soon."""
        return not self.unvouched() <= self.refused.keys()

    def unvouched(self) -> set[str]:
        """Return the ids of nodes on which nothing may start now."""
        return {node_id for node_id in self._nodes if not self.vouched(node_id)}

    def off_unvouched(self) -> dict[str, Any]:
        """Return the Ray options of workers that only their code ties to a node."""
        return {"label_selector": selector} if (selector := off(self.unvouched())) else {}

    def require_one(self) -> None:
        """Raise PacelineError if every node is refused, since waiting for room would be in vain."""
        if self._nodes and self._nodes.keys() <= self.refused.keys():
            reasons = "; ".join(self.refused[node_id] for node_id in sorted(self._nodes))
            raise PacelineError(f"none of the cluster's nodes can be used: {reasons}", remedy=REMEDY)

    def _hear(self, answered: Asked) -> NodeRefused | None:
        node_id = self._asked.pop(answered)
        try:
            differing = differences(self._mine, self._get(answered))
        except (RayTaskError, RuntimeEnvSetupError) as error:
            differing = [f"Paceline cannot be imported there ({_last_line(error)})"]
        except RayError:  # the node or the task was lost
            self._lost[node_id] = self._lost.get(node_id, 0) + 1
            if self._lost[node_id] < _TRIES:
                self._known.discard(node_id)
            return None
        if differing:
            reason = f"node {self._nodes.get(node_id, 'unknown')} ({node_id[:8]}) has {', '.join(differing)}"
            self.refused[node_id] = reason
            self._observer.event("node_refused", f"{reason}: the node is not used; {REMEDY}")
            return NodeRefused(node_id, reason)
        return None


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
