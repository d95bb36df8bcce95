"""Placement of actors: Ray placement groups from a plan (actors/placement_plan.py), and actor options from those.

Reserves the plan, with a deadline and an error that names the missing resources. Later workers get reservations of
their own, which nobody waits for and which are released one by one. It starts no actors.

    with place(config) as placement:                       # config: the configuration tree
        ray.remote(LearnerRank).options(**placement.learner_options()[rank]).remote(...)
        ray.remote(RolloutWorker).options(**placement.worker_options(name)).remote(...)
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.context import Context
from actors.placement_plan import Bundle, BundleGroup, PlacementError, Plan, Slot, plan
from config.tree import Config

_NODE_ID = "ray.io/node-id"  # Ray's own label of every node
_SLICE_S = 1  # longest wait before a stop request is checked; Ray takes whole seconds only
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 60.0  # of waiting, before the first report, between reports
_RESERVING_S = 2  # longest wait for a group to be reserved before it is removed; whole seconds, too
_FEW = 16  # groups that are queried singly; one query for all costs as much as a few more
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a rollout worker."""

    group: PlacementGroup
    slot: Slot
    own: bool  # the group is the worker's alone, and is released with it


class Placement:
    """Reserved resources. Options are for `ray.remote(Class).options(**...)`."""

    def __init__(self, plan: Plan, groups: list[PlacementGroup], timeout_s: float) -> None:
        self.plan = plan
        self._groups = groups
        self._timeout_s = timeout_s
        self._vacant = [_Place(groups[slot.group], slot, own=False) for slot in plan.workers]  # planned and free
        self._places: dict[str, _Place] = {}  # of rollout workers
        self._left = False  # a planned place was vacated, and its node may have been lost since
        self._avoid: dict[str, Collection[str]] = {}  # nodes to avoid, by worker
        self._off: Collection[str] = ()  # nodes to avoid for learner ranks, since their last start
        self._said: dict[PlacementGroup, Any] | None = None  # cache of a look: Ray's state of groups ...
        self._in_vain: set[frozenset[str]] = set()  # ... and sets of avoided nodes without a vacant planned place

    @contextmanager
    def look(self) -> Iterator[None]:
        """Query Ray at most once per group inside the block, for any number of workers' places."""
        if self._said is not None:
            yield
            return
        self._said = {}
        try:
            yield
        finally:
            self._said = None
            self._in_vain.clear()

    def learner_options(self) -> list[dict[str, Any]]:
        """Return the options of the learner's ranks."""
        return [_options(self._groups[slot.group], slot) for slot in self.plan.learners]

    def missing_learner(self) -> str:
        """Return the missing resources for a learner rank's place that was lost with its node; "": all places exist."""
        for slot in self.plan.learners:
            if not self._node(self._learner_place(slot)):
                return _lacking_now(self.plan.groups[slot.group], self._off)
        return ""

    def in_the_way(self, names: Iterable[str]) -> list[str]:
        """Return those of the workers that block a learner's lost place: they have places of their own on nodes that
        could hold it. Empty while Ray's head restarts."""
        groups = {slot.group for slot in self.plan.learners if not self._node(self._learner_place(slot))}
        wanted = [_on_one_node(self.plan.groups[index]) for index in groups]
        try:
            nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        except Exception:  # Ray raises various exceptions
            _log.warning("the cluster's nodes could not be listed", exc_info=True)
            return []
        where = self.nodes(name for name in names if self.own(name))
        return [name for name, node in where.items() if any(_holds(nodes.get(node, {}), need) for need in wanted)]

    def _learner_place(self, slot: Slot) -> _Place:
        return _Place(self._groups[slot.group], slot, own=False)

    def learners_are_off(self, avoid: Collection[str]) -> bool:
        """Return whether every learner rank's place is reserved, and none on these nodes (ids)."""
        return all(self._node(self._learner_place(slot)) not in ("", *avoid) for slot in self.plan.learners)

    def learners_off(self, avoid: Collection[str]) -> None:
        """Prepare a new learner group: its ranks must not be on these nodes (ids).

        After a loss, Ray may have reserved there again, or be about to. The ranks' group is then requested anew, off
        them; workers that share its one node have lost it too. If the group's workers may be on other nodes, the ranks
        move to a group of their own, since Ray cannot release part of a group."""
        self._off = tuple(avoid)
        shared = {slot.group for slot in self.plan.workers}
        for index in sorted({slot.group for slot in self.plan.learners}) if avoid else ():
            group, nodes = self._groups[index], _asked(self._groups[index]).get("bundles_to_node_id", {})
            slots = [slot for slot in self.plan.learners if slot.group == index]
            if all(nodes.get(slot.bundle, "") not in ("", *avoid) for slot in slots):
                continue
            if index in shared and self.plan.groups[index].strategy != "STRICT_PACK":
                self._part(index, avoid)
                continue
            _remove(group)
            made = self._groups[index] = _create(self.plan.groups[index], avoid)
            self._vacant = [_moved(place, group, made) for place in self._vacant]
            self._places = {name: _moved(place, group, made) for name, place in self._places.items()}

    def _part(self, index: int, avoid: Collection[str]) -> None:
        """Move the ranks of this group into one of their own."""
        old, bundles, learners = self.plan.groups[index], list[Bundle](), list[Slot]()
        for slot in self.plan.learners:
            if slot.group == index:
                bundles.append(old.bundles[slot.bundle])
                slot = replace(slot, group=len(self._groups), bundle=len(bundles) - 1)
            learners.append(slot)
        group = BundleGroup(tuple(bundles), "PACK")
        self.plan = replace(self.plan, groups=(*self.plan.groups, group), learners=tuple(learners))
        self._groups.append(_create(group, avoid))

    def worker_options(self, name: str) -> dict[str, Any]:
        """Return the options of a rollout worker, which keeps its place under its name."""
        if name not in self._places:
            self.ask(name)
        place = self._places[name]
        return _options(place.group, place.slot)

    def ask(self, name: str, avoid: Collection[str] = ()) -> None:
        """Request a place for a rollout worker, not on the nodes `avoid` (ids); never waits.

        It is a vacant planned place, else an additional one, reserved as soon as there is room."""
        place = self._take_vacant(avoid)
        if place is None:
            group, slot = self.plan.further
            place = _Place(_create(group, avoid), slot, own=True)
        self._places[name], self._avoid[name] = place, tuple(avoid)

    def ready(self, name: str) -> bool:
        """Return whether the place is reserved: the requested one, or a planned one that Ray has since moved to another
        node."""
        place = self._places[name]
        if self._node(place):
            return True
        if (planned := self._take_vacant(self._avoid[name])) is None:
            return False
        self.let_go(name)
        self._places[name], self._avoid[name] = planned, ()
        return True

    def _take_vacant(self, avoid: Collection[str]) -> _Place | None:
        """Take a vacant planned place that is reserved, not on one of these nodes; None if there is none."""
        off, unasked = frozenset(avoid), not (avoid or self._left)
        if off in self._in_vain:
            return None
        if not unasked:
            self._ask_of_many({place.group for place in self._vacant})
        for place in self._vacant:
            if unasked or ((node := self._node(place)) and node not in off):
                self._vacant.remove(place)
                return place
        if self._said is not None:
            self._in_vain.add(off)
        return None

    def _ask_of_many(self, groups: set[PlacementGroup]) -> None:
        if self._said is not None and len(groups := groups - self._said.keys()) > _FEW:
            tables = _asked()
            self._said |= {group: tables.get(group.id.hex(), {}) for group in groups}

    def _node(self, place: _Place) -> str:
        """Return the id of the node of the place's reservation; "" if there is none yet, or none again after the loss
        of a node, or while Ray's head restarts."""
        table = self._said.get(place.group) if self._said is not None else None
        if table is None:
            table = _asked(place.group)
            if self._said is not None:
                self._said[place.group] = table
        return str(table["bundles_to_node_id"][place.slot.bundle]) if table.get("state") == "CREATED" else ""

    def there(self, name: str) -> bool:
        """Return whether the worker's place is reserved now, as far as Ray reports."""
        return name not in self._places or bool(self._node(self._places[name]))

    def node(self, name: str) -> str:
        """Return the id of the node of the worker's place; "": not reserved yet."""
        return self._node(self._places[name])

    def nodes(self, names: Iterable[str]) -> dict[str, str]:
        """Return `node` of each worker."""
        places = {name: self._places[name] for name in names}
        with self.look():
            self._ask_of_many({place.group for place in places.values()})
            return {name: self._node(place) for name, place in places.items()}

    def placed(self) -> Set[str]:
        """Return the names of workers with a place, reserved or requested."""
        return self._places.keys()

    def own(self, name: str) -> bool:
        """Return whether the worker's place is its own, released when it goes."""
        return self._places[name].own

    def let_go(self, name: str) -> None:
        """Release a worker's place for others. Ray may kill an actor that still runs in it."""
        place = self._places.pop(name)
        del self._avoid[name]
        if place.own:
            _remove(place.group)
        else:
            self._vacant.append(place)
            self._left = True
            self._in_vain.clear()

    def missing(self, name: str) -> str:
        """Return the resources for a worker's place that no node has."""
        group, _ = self.plan.further
        return _lacking_now(group, self._avoid[name])

    @property
    def gpus_timeout_s(self) -> float | None:
        """How long a worker may ask for the GPUs of its other bundles; None: its engine uses what Ray shows it."""
        further, _ = self.plan.further
        return self._timeout_s if further.strategy == "STRICT_PACK" and len(further.bundles) > 1 else None

    def release(self) -> None:
        """Release all reservations; Ray kills actors that still run in them."""
        for group in [*self._groups, *(place.group for place in self._places.values() if place.own)]:
            _remove(group)
        self._groups.clear()
        self._places.clear()


def _moved(place: _Place, old: PlacementGroup, new: PlacementGroup) -> _Place:
    return replace(place, group=new) if place.group == old else place


def _options(group: PlacementGroup, slot: Slot) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot.bundle)
    return {
        "num_cpus": slot.cpus,
        "num_gpus": slot.gpus,
        "resources": dict(slot.resources),
        "scheduling_strategy": strategy,
    }


def off(nodes: Collection[str]) -> dict[str, str]:
    """Return a label selector (of a bundle or of actor options) that excludes these nodes (ids); {} for none."""
    return {_NODE_ID: f"!in({', '.join(sorted(nodes))})"} if nodes else {}


def _create(group: BundleGroup, avoid: Collection[str] = ()) -> PlacementGroup:
    where = [off(avoid) for _ in group.bundles] if avoid else None
    bundles = [dict(bundle) for bundle in group.bundles]
    made: PlacementGroup = placement_group(bundles, strategy=group.strategy, bundle_label_selector=where)
    return made


def _remove(group: PlacementGroup) -> None:
    """Remove a placement group, but not while it is being reserved: Ray (2.60) then sometimes keeps what it had taken
    for as long as the cluster lives (ray-project/ray issue 64693; here one in some 200 groups, on one healthy node)."""
    if _asked(group).get("stats", {}).get("scheduling_state") not in ("NO_RESOURCES", "INFEASIBLE"):
        group.wait(_RESERVING_S)  # returns at once if it is there
    remove_placement_group(group)


def _asked(group: PlacementGroup | None = None) -> Any:
    """Return Ray's table of this group, or of all groups by id; {} if Ray fails."""
    try:
        return placement_group_table(group)
    except Exception:  # Ray raises various exceptions
        _log.warning("Ray did not report the node of a placement group", exc_info=True)
        return {}


def _on_one_node(group: BundleGroup) -> dict[str, float]:
    """Return the resources that one node must at least have."""
    need: Counter[str] = Counter()
    for bundle in group.bundles if group.strategy == "STRICT_PACK" else group.bundles[:1]:
        need.update(bundle)
    return dict(need)


def _holds(node: Bundle, need: Bundle) -> bool:
    return all(node.get(resource, 0) >= amount for resource, amount in need.items())


def lacking(group: BundleGroup, nodes: Mapping[str, tuple[Bundle, Bundle]]) -> str:
    """Return why none of the nodes (by name: free and total resources) has room for one more worker, by resource."""
    need = _on_one_node(group)
    short: dict[str, list[str]] = {}
    for name, (free, total) in nodes.items():
        wants = [
            f"{resource}: {amount:g} needed, {free.get(resource, 0):g} free of {total.get(resource, 0):g}"
            for resource, amount in sorted(need.items())
            if free.get(resource, 0) < amount
        ]
        short.setdefault("; ".join(wants), []).append(name)
    if not nodes:
        return "no node is there that may be used"
    if roomy := short.pop("", None):
        return f"{', '.join(roomy[:4])} should have room for it; it is being reserved"
    told = [
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} ({why})"
        for why, names in sorted(short.items())
    ]
    return f"missing on every node: {'; '.join(told)}"


def _lacking_now(group: BundleGroup, avoid: Collection[str] = ()) -> str:
    try:
        return lacking(group, _free_by_node(avoid))
    except Exception as error:  # Ray raises various exceptions while its head restarts
        return f"Ray did not report what is free now ({type(error).__name__})"


def _free_by_node(avoid: Collection[str] = ()) -> dict[str, tuple[Bundle, Bundle]]:
    """Return free and total resources, by address and the start of the id."""
    free: dict[str, Bundle] = available_resources_per_node()  # type: ignore[no-untyped-call]
    nodes = [(node["NodeID"], node) for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return {
        f"{node['NodeManagerAddress']} ({node_id[:8]})": (free.get(node_id, {}), node["Resources"])
        for node_id, node in nodes
        if node_id not in avoid
    }


def reserve(
    plan: Plan, timeout_s: float, avoid: Mapping[str, str] | None = None, context: Context | None = None
) -> Placement:
    """Create the groups and wait until all are there (an autoscaler may be adding nodes).

    avoid: ids of nodes not to use, and why. context: its observer receives the missing resources (`waiting`) after 5
    seconds and then every minute; its `check` may end the wait with an exception of its own. Raises PlacementError
    after `timeout_s`."""
    context, avoid = context or Context(), avoid or {}
    start_s = told_s = time.monotonic()
    every_s = _FIRST_WORD_S
    before = ray.available_resources()  # type: ignore[no-untyped-call]
    nodes = _free_by_node(avoid)
    groups = [_create(group, avoid) for group in plan.groups]
    placement = Placement(plan, groups, timeout_s)
    try:
        for wanted, group in zip(plan.groups, groups, strict=True):
            while not group.wait(_SLICE_S):
                context.check()
                now_s = time.monotonic()
                if now_s >= start_s + timeout_s:
                    raise _missing(plan, before, timeout_s, avoid, lacking(wanted, nodes))
                if now_s >= told_s + every_s:
                    told_s, every_s = now_s, _NEXT_WORD_S
                    context.observer.event("waiting", _waiting(plan, before, timeout_s, now_s - start_s))
    except BaseException:
        placement.release()
        raise
    return placement


def _short(plan: Plan, available: Mapping[str, float]) -> tuple[str, str]:
    """Return what the cluster as a whole lacks, and needed versus available amounts of each resource."""
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    demand = plan.demand()
    lines = [
        f"{name}: {amount:g} needed, {available.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in sorted(demand.items())
    ]
    short = [name for name, amount in demand.items() if available.get(name, 0) < amount]
    what = f"missing {', '.join(sorted(short))}" if short else "no node is large enough for one bundle or group"
    return what, "; ".join(lines)


def _waiting(plan: Plan, available: Mapping[str, float], timeout_s: float, waited_s: float) -> str:
    what, lines = _short(plan, available)
    return (
        f"the cluster has no room for the workers and the learner yet: {what} ({lines}); for {waited_s:.0f} s, of "
        f"{timeout_s:g} s at most (cluster.start_timeout_s)"
    )


def _missing(
    plan: Plan, available: Mapping[str, float], timeout_s: float, avoid: Mapping[str, str], nodes: str
) -> PlacementError:
    what, lines = _short(plan, available)
    largest = max((len(g.bundles) for g in plan.groups if g.strategy == "STRICT_PACK"), default=0)
    node = f"; a node with {largest:g} GPUs" if largest else ""
    unused = f"; not used: {'; '.join(avoid.values())}" if avoid else ""
    return PlacementError(
        f"the cluster had no room within {timeout_s:g} s (cluster.start_timeout_s): {what} "
        f"({lines}{node}){f'; {nodes}' if nodes.startswith('missing') else ''}{unused}",
        "add nodes, ask for fewer rollout.workers or learner.ranks, or check cluster.layout and its resources",
    )


@contextmanager
def place(
    config: Config, avoid: Mapping[str, str] | None = None, context: Context | None = None
) -> Iterator[Placement]:
    """Reserve the configured resources and release them at the end. Ray must be initialised. `avoid` and `context`: see
    `reserve`."""
    cluster = config.cluster
    cpus = float(ray.available_resources().get("CPU", 0.0)) - _cpus_of(avoid or {})  # type: ignore[no-untyped-call]
    wanted = plan(cluster, workers=config.rollout.workers.min, ranks=config.learner.ranks, available_cpus=cpus)
    placement = reserve(wanted, cluster.start_timeout_s, avoid, context)
    try:
        yield placement
    finally:
        placement.release()


def _cpus_of(node_ids: Collection[str]) -> float:
    if not node_ids:
        return 0.0
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return sum(
        float(node["Resources"].get("CPU", 0.0)) for node in nodes if node["Alive"] and node["NodeID"] in node_ids
    )
