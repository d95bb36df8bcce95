"""Requests to Ray's autoscaler: room for all wanted workers, besides the learner. Owns the last request.

If nothing scales the cluster, nothing is requested. Pending places show the autoscaler the next few workers. This shows
it all wanted ones, and keeps their nodes from being removed as idle. A request holds until the next one, even after the
run is killed, and includes what the cluster already has.
"""

import logging
from collections import Counter

import ray
from ray.autoscaler.sdk import request_resources

from actors.placement_plan import Bundle, BundleGroup, Plan

_NODE_GROUP = "ray.io/node-group"  # label of nodes that Ray's cluster launcher or KubeRay started
_log = logging.getLogger(__name__)


def scaled() -> bool:
    """Whether something adds nodes to this cluster, or may."""
    return any(node["Alive"] and node["Labels"].get(_NODE_GROUP) for node in ray.nodes())  # type: ignore[no-untyped-call]


def bundles(plan: Plan, workers: int) -> list[dict[str, float]]:
    """Return the bundles of the run with `workers` workers, or with the planned ones if more. Bundles that share a node
    are joined."""
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
    """Requests to the autoscaler of one run, elastic or not. Starts with an empty request, to replace that of a killed
    run."""

    def __init__(self, plan: Plan, *, there: bool) -> None:
        """there: whether something adds nodes (`scaled`); if not, nothing is requested."""
        self._plan, self.there = plan, there
        self._asked: list[Bundle] | None = None
        self._workers: int | None = None  # last wanted number
        self._ask([])

    def want(self, workers: int) -> None:
        """Request room for this many rollout workers. Never raises; an equal request is not repeated."""
        if workers != self._workers:
            self._workers = workers
            self._ask(bundles(self._plan, workers))

    def close(self) -> None:
        """Withdraw the request at the end of the run."""
        if self._asked:
            self._ask([])

    def _ask(self, wanted: list[dict[str, float]]) -> None:
        if not self.there or wanted == self._asked:
            return
        try:
            self._request(wanted)
            self._asked = list(wanted)
        except Exception as error:  # Ray raises any exception; the run can do without
            _log.warning("the autoscaler was not asked for %d bundles: %s", len(wanted), error)

    def _request(self, wanted: list[dict[str, float]]) -> None:
        request_resources(bundles=wanted)
