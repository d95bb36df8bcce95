"""Where actors run: from the `cluster:` section to Ray placement groups, and from those to actor options.

Owns the plan (a pure function) and its reservation, with a deadline and an error that says what is missing. It starts
no actors.

    with place(config) as placement:                       # config: the configuration tree, or anything shaped like it
        ray.remote(LearnerRank).options(**placement.learner_options(rank)).remote(...)
        ray.remote(RolloutWorker).options(**placement.worker_options(name)).remote(...)

embedded       CPU only, one group, PACK. Rollout and learning take turns, so where there are fewer CPUs than are asked
               for, every share is scaled down until all fit: a laptop with 2 cores runs 3 workers.
colocated      one STRICT_PACK group per rollout worker, one bundle per GPU: each bundle is also the home of a learner
               rank, and both hold just under half of the GPU. A worker with several GPUs lives in the group's first
               bundle, which is all that Ray shows it; its engine uses every GPU of the group (`GroupEngine`).
disaggregated  workers SPREAD over the nodes with `rollout_resource`, ranks PACKed on those with `learner_resource`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, assert_never

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

T = TypeVar("T", covariant=True)
Layout = Literal["embedded", "colocated", "disaggregated"]
Bundle = Mapping[str, float]

_SHARE = 0.49  # of a GPU: a learner rank and a rollout worker in one bundle
_ASKING = 0.01  # of a GPU: a task that says which one a bundle has
_TAG = 0.001  # amount of a custom resource that marks a node; it never runs out


class PlacementError(RuntimeError):
    """The cluster cannot hold the actors: a contradiction in the configuration, or resources that did not appear."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class ClusterShape(Protocol):
    """The fields of the `cluster:` section that count here."""

    @property
    def layout(self) -> Layout: ...
    @property
    def gpus_per_worker(self) -> float: ...
    @property
    def gpus_per_learner(self) -> float: ...
    @property
    def cpus_per_worker(self) -> float: ...
    @property
    def cpus_per_learner(self) -> float: ...
    @property
    def rollout_resource(self) -> str | None: ...
    @property
    def learner_resource(self) -> str | None: ...
    @property
    def start_timeout_s(self) -> float: ...


class RolloutShape(Protocol):
    @property
    def workers(self) -> int: ...


class LearnerShape(Protocol):
    @property
    def ranks(self) -> int: ...


class ConfigShape(Protocol):
    @property
    def cluster(self) -> ClusterShape: ...
    @property
    def rollout(self) -> RolloutShape: ...
    @property
    def learner(self) -> LearnerShape: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one actor: what it takes of a bundle of a group."""

    group: int
    bundle: int
    cpus: float
    gpus: float
    resources: Bundle


@dataclass(frozen=True, slots=True)
class Group:
    bundles: tuple[Bundle, ...]
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"]


@dataclass(frozen=True, slots=True)
class Plan:
    groups: tuple[Group, ...]
    learners: tuple[Slot, ...]
    workers: tuple[Slot, ...]

    def demand(self) -> dict[str, float]:
        """All resources of all bundles."""
        total: Counter[str] = Counter()
        for group in self.groups:
            for bundle in group.bundles:
                total.update(bundle)
        return dict(total)


def plan(cluster: ClusterShape, *, workers: int, ranks: int, available_cpus: float) -> Plan:
    """Bundles and slots for `workers` rollout workers and `ranks` learner ranks. Pure; raises PlacementError."""
    match cluster.layout:
        case "embedded":
            return _embedded(cluster, workers, ranks, available_cpus)
        case "colocated":
            return _colocated(cluster, workers, ranks)
        case "disaggregated":
            return _disaggregated(cluster, workers, ranks)
        case other:
            assert_never(other)


def _embedded(cluster: ClusterShape, workers: int, ranks: int, available_cpus: float) -> Plan:
    asked = ranks * cluster.cpus_per_learner + workers * cluster.cpus_per_worker
    scale = min(1.0, available_cpus / asked) if asked else 1.0
    cpus = [_floor(cluster.cpus_per_learner * scale)] * ranks + [_floor(cluster.cpus_per_worker * scale)] * workers
    # A bundle must ask for something; an actor that takes 0 CPUs still has a place.
    group = Group(tuple({"CPU": max(c, 0.001)} for c in cpus), "PACK")
    slots = [Slot(group=0, bundle=i, cpus=c, gpus=0.0, resources={}) for i, c in enumerate(cpus)]
    return Plan((group,), tuple(slots[:ranks]), tuple(slots[ranks:]))


def _colocated(cluster: ClusterShape, workers: int, ranks: int) -> Plan:
    per_worker = int(cluster.gpus_per_worker)
    if per_worker < 1 or per_worker != cluster.gpus_per_worker or cluster.gpus_per_learner != 1:
        raise PlacementError(
            f"cluster.layout=colocated with gpus_per_worker={cluster.gpus_per_worker:g} and "
            f"gpus_per_learner={cluster.gpus_per_learner:g}: GPUs are shared one by one",
            "set cluster.gpus_per_worker to a whole number >= 1 and cluster.gpus_per_learner to 1",
        )
    gpus = workers * per_worker
    if ranks > gpus:
        raise PlacementError(
            f"cluster.layout=colocated: {ranks} learner ranks do not fit on the {gpus} GPUs of {workers} workers",
            f"set learner.ranks to at most {gpus}, or raise rollout.workers or cluster.gpus_per_worker",
        )
    groups: list[Group] = []
    learner_slots: list[Slot] = []
    worker_slots: list[Slot] = []
    for worker in range(workers):
        bundles: list[Bundle] = []
        for bundle in range(per_worker):
            cpus = cluster.cpus_per_worker if bundle == 0 else 0.0
            if len(learner_slots) < ranks:
                learner_slots.append(
                    Slot(group=worker, bundle=bundle, cpus=cluster.cpus_per_learner, gpus=_SHARE, resources={})
                )
                cpus += cluster.cpus_per_learner
            bundles.append(_bundle(cpus, 1.0, {}))
        groups.append(Group(tuple(bundles), "STRICT_PACK"))
        worker_slots.append(Slot(group=worker, bundle=0, cpus=cluster.cpus_per_worker, gpus=_SHARE, resources={}))
    return Plan(tuple(groups), tuple(learner_slots), tuple(worker_slots))


def _disaggregated(cluster: ClusterShape, workers: int, ranks: int) -> Plan:
    def side(group: int, n: int, cpus: float, gpus: float, resource: str | None) -> tuple[Bundle, tuple[Slot, ...]]:
        tag = {resource: _TAG} if resource else {}
        return _bundle(cpus, gpus, tag), tuple(
            Slot(group=group, bundle=i, cpus=cpus, gpus=gpus, resources=tag) for i in range(n)
        )

    learner, learners = side(0, ranks, cluster.cpus_per_learner, cluster.gpus_per_learner, cluster.learner_resource)
    rollout, rollouts = side(1, workers, cluster.cpus_per_worker, cluster.gpus_per_worker, cluster.rollout_resource)
    return Plan((Group((learner,) * ranks, "PACK"), Group((rollout,) * workers, "SPREAD")), learners, rollouts)


def _bundle(cpus: float, gpus: float, tag: Bundle) -> Bundle:
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} | dict(tag)
    return bundle or {"CPU": 0.001}


def _floor(cpus: float) -> float:
    """Down to Ray's granularity, so that a sum of shares stays within the whole."""
    return int(cpus * 1000) / 1000


class SpawnsOn(Protocol[T]):
    """Starts an engine that sees these GPUs; None: those that this process sees."""

    def __call__(self, *, gpus: Sequence[int] | None = None) -> T: ...


@dataclass(frozen=True, slots=True)
class GroupEngine(Generic[T]):
    """An engine factory for a rollout worker whose group has several bundles: the engine gets the GPUs of all of them.

    Asks in the worker, at every start: after a lost node the group may be on another one, with other GPUs.
    """

    spawn: SpawnsOn[T]
    timeout_s: float  # for the answer; a bundle has it in seconds

    def __call__(self) -> T:
        """Raises ray.exceptions.GetTimeoutError."""
        group = get_current_placement_group()
        if group is None:  # a worker beyond the plan: Ray shows it all that it may use
            return self.spawn()
        ask: Any = ray.remote(num_cpus=0, num_gpus=_ASKING, max_retries=0)(ray.get_gpu_ids)
        asked = [
            ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
            for bundle in range(group.bundle_count)
        ]
        return self.spawn(gpus=[int(gpu) for (gpu,) in ray.get(asked, timeout=self.timeout_s)])


class Placement:
    """Reserved resources. Options are for `ray.remote(Class).options(**...)`."""

    def __init__(self, plan: Plan, groups: list[PlacementGroup], timeout_s: float) -> None:
        self.plan = plan
        self._groups = groups
        self._timeout_s = timeout_s
        self._places: dict[str, int] = {}  # of rollout workers in plan.workers

    def learner_options(self, rank: int) -> dict[str, Any]:
        return self._options(self.plan.learners[rank])

    def worker_options(self, name: str) -> dict[str, Any]:
        """Of a rollout worker, which keeps its place under its name. Beyond those that were planned, workers take what
        one takes from wherever the cluster has it, unreserved: an autoscaler sees that it is asked for."""
        index = self._places.setdefault(name, len(self._places))
        if index < len(self.plan.workers):
            return self._options(self.plan.workers[index])
        slot, spans = self.plan.workers[-1], self._bundles_per_engine
        return _takes(slot if spans == 1 else replace(slot, gpus=float(spans)))  # whole ones: nobody shares them

    def engine_factory(self, spawn: SpawnsOn[T]) -> Callable[[], T]:
        """What a rollout worker starts its engine with, for an engine on all GPUs of a worker."""
        return spawn if self._bundles_per_engine == 1 else GroupEngine(spawn, self._timeout_s)

    def release(self) -> None:
        """Give everything back; actors that still run in it are killed by Ray."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()

    @property
    def _bundles_per_engine(self) -> int:
        group = self.plan.groups[self.plan.workers[-1].group]
        return len(group.bundles) if group.strategy == "STRICT_PACK" else 1

    def _options(self, slot: Slot) -> dict[str, Any]:
        return _takes(slot) | {"scheduling_strategy": self._strategy(slot.group, slot.bundle)}

    def _strategy(self, group: int, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._groups[group], placement_group_bundle_index=bundle)


def _takes(slot: Slot) -> dict[str, Any]:
    return {"num_cpus": slot.cpus, "num_gpus": slot.gpus, "resources": dict(slot.resources)}


def reserve(plan: Plan, timeout_s: float) -> Placement:
    """Create the groups and wait until all are there (an autoscaler may be adding nodes). Raises PlacementError."""
    deadline_s = time.monotonic() + timeout_s
    before = ray.available_resources()  # type: ignore[no-untyped-call]
    groups = [placement_group([dict(b) for b in group.bundles], strategy=group.strategy) for group in plan.groups]
    placement = Placement(plan, groups, timeout_s)
    try:
        for group in groups:
            if not group.wait(max(deadline_s - time.monotonic(), 0.0)):
                raise _missing(plan, before, timeout_s)
    except BaseException:
        placement.release()
        raise
    return placement


def _missing(plan: Plan, available: Mapping[str, float], timeout_s: float) -> PlacementError:
    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    demand = plan.demand()
    lines = [
        f"{name}: {amount:g} needed, {available.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in sorted(demand.items())
    ]
    short = [name for name, amount in demand.items() if available.get(name, 0) < amount]
    what = f"missing {', '.join(sorted(short))}" if short else "no node is large enough for one bundle or group"
    largest = max((len(g.bundles) for g in plan.groups if g.strategy == "STRICT_PACK"), default=0)
    node = f"; a node with {largest:g} GPUs" if largest else ""
    return PlacementError(
        f"the cluster had no room within {timeout_s:g} s (cluster.start_timeout_s): {what} ({'; '.join(lines)}{node})",
        "add nodes, ask for fewer rollout.workers or learner.ranks, or check cluster.layout and its resources",
    )


@contextmanager
def place(config: ConfigShape) -> Iterator[Placement]:
    """Reserve what the configuration asks for, and give it back at the end. Ray must be initialised."""
    cluster = config.cluster
    cpus = float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    wanted = plan(cluster, workers=config.rollout.workers, ranks=config.learner.ranks, available_cpus=cpus)
    placement = reserve(wanted, cluster.start_timeout_s)
    try:
        yield placement
    finally:
        placement.release()
