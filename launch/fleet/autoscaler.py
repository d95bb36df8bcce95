"""What Ray's autoscaler is asked for: room for so many workers, beside the learner. Owns the last request; where nobody
scales the cluster, nobody is asked.

Places that are waited for show the autoscaler the next few workers; this shows it all that are wanted, and keeps nodes
that are wanted from being taken for idle. A request stands until the next one, beyond the end of a run that is killed,
and counts what the cluster has already.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources

from actors.placement_plan import Bundle, BundleGroup, Plan

_NODE_GROUP = "ray.io/node-group"  # label of nodes that Ray's cluster launcher or KubeRay started
_log = logging.getLogger(__name__)


def scaled() -> bool:
    """Somebody adds nodes to this cluster, or may."""
    return any(node["Alive"] and node["Labels"].get(_NODE_GROUP) for node in ray.nodes())  # type: ignore[no-untyped-call]


def bundles(plan: Plan, workers: int) -> list[dict[str, float]]:
    """What is on one node together, of all that the run has with so many workers, or with the planned ones."""
    further, _ = plan.further
    groups = [*plan.groups, *[further] * max(workers - len(plan.workers), 0)]
    return [bundle for group in groups for bundle in _by_node(group)]


def _by_node(group: BundleGroup) -> list[dict[str, float]]:
    if group.strategy != "STRICT_PACK":
        return [dict(bundle) for bundle in group.bundles]
    together: Counter[str] = Counter()
    for bundle in group.bundles:
        together.update(bundle)
    return [dict(together)]


class Autoscaler:
    """Requests to the autoscaler of one run, elastic or not. Begins with a request for nothing: a run that was killed
    has left its own behind."""

    def __init__(
        self,
        plan: Plan,
        is_scaled: Callable[[], bool] = scaled,
        request: Callable[[list[dict[str, float]]], Any] = lambda wanted: request_resources(bundles=wanted),
    ) -> None:
        self._plan, self._request = plan, request
        self.there = is_scaled()
        self._asked: list[Bundle] | None = None
        self._workers: int | None = None  # that were wanted last
        self._ask([])

    def want(self, workers: int) -> None:
        """Room for so many rollout workers. Never raises; an equal request is not repeated."""
        if workers != self._workers:
            self._workers = workers
            self._ask(bundles(self._plan, workers))

    def close(self) -> None:
        """The run is over: it wants nothing."""
        if self._asked:
            self._ask([])

    def _ask(self, wanted: list[dict[str, float]]) -> None:
        if not self.there or wanted == self._asked:
            return
        try:
            self._request(wanted)
            self._asked = list(wanted)
        except Exception as error:  # Ray raises what it likes; the run can do without
            _log.warning("the autoscaler was not asked for %d bundles: %s", len(wanted), error)
