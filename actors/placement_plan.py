"""Plan of reservations from the `cluster:` section: pure, without Ray.

embedded       CPU only, one group, PACK. Rollout and learning alternate, so if there are fewer CPUs than requested,
               every share is scaled down until all fit: a laptop with 2 cores runs 3 workers.
colocated      one STRICT_PACK group per rollout worker, one bundle per GPU. Each bundle can also hold a learner rank;
               rank and worker take just under half of the GPU each. A worker with several GPUs runs in the group's
               first bundle, and Ray shows it only that; its engine uses every GPU of the group (`group_gpus`).
disaggregated  workers SPREAD over the nodes with `rollout_resource`, ranks PACKed on those with `learner_resource`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from config.tree import ClusterOptions

Bundle = Mapping[str, float]

_SHARE = 0.49  # of a GPU: a learner rank and a rollout worker in one bundle
_TAG = 0.001  # amount of a custom resource that marks a node; practically unlimited


class PlacementError(RuntimeError):
    """The cluster cannot hold the actors: a contradiction in the configuration, or resources that did not appear."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one actor: its resources of a bundle of a group."""

    group: int
    bundle: int
    cpus: float
    gpus: float
    resources: Bundle


@dataclass(frozen=True, slots=True)
class BundleGroup:
    bundles: tuple[Bundle, ...]
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"]


@dataclass(frozen=True, slots=True)
class Plan:
    groups: tuple[BundleGroup, ...]
    learners: tuple[Slot, ...]
    workers: tuple[Slot, ...]
    further: tuple[BundleGroup, Slot]  # of each additional worker

    def demand(self) -> dict[str, float]:
        """Return the resources of all bundles."""
        total: Counter[str] = Counter()
        for group in self.groups:
            for bundle in group.bundles:
                total.update(bundle)
        return dict(total)


def plan(cluster: ClusterOptions, *, workers: int, ranks: int, available_cpus: float) -> Plan:
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


def _embedded(cluster: ClusterOptions, workers: int, ranks: int, available_cpus: float) -> Plan:
    asked = ranks * cluster.cpus_per_learner + workers * cluster.cpus_per_worker
    scale = min(1.0, available_cpus / asked) if asked else 1.0
    cpus = [_floor(cluster.cpus_per_learner * scale)] * ranks + [_floor(cluster.cpus_per_worker * scale)] * workers
    # A bundle must request something; an actor that takes 0 CPUs still has a place.
    group = BundleGroup(tuple({"CPU": max(c, 0.001)} for c in cpus), "PACK")
    slots = [Slot(group=0, bundle=i, cpus=c, gpus=0.0, resources={}) for i, c in enumerate(cpus)]
    whole = cluster.cpus_per_worker  # a later worker takes no share from the others
    further = (
        BundleGroup((_bundle(whole, 0.0, {}),), "PACK"),
        Slot(group=0, bundle=0, cpus=whole, gpus=0.0, resources={}),
    )
    return Plan((group,), tuple(slots[:ranks]), tuple(slots[ranks:]), further)


def _colocated(cluster: ClusterOptions, workers: int, ranks: int) -> Plan:
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
    groups: list[BundleGroup] = []
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
        groups.append(BundleGroup(tuple(bundles), "STRICT_PACK"))
        worker_slots.append(Slot(group=worker, bundle=0, cpus=cluster.cpus_per_worker, gpus=_SHARE, resources={}))
    more = tuple(_bundle(cluster.cpus_per_worker if bundle == 0 else 0.0, 1.0, {}) for bundle in range(per_worker))
    further = BundleGroup(more, "STRICT_PACK"), replace(worker_slots[0], group=0)
    return Plan(tuple(groups), tuple(learner_slots), tuple(worker_slots), further)


def _disaggregated(cluster: ClusterOptions, workers: int, ranks: int) -> Plan:
    def side(group: int, n: int, cpus: float, gpus: float, resource: str | None) -> tuple[Bundle, tuple[Slot, ...]]:
        tag = {resource: _TAG} if resource else {}
        return _bundle(cpus, gpus, tag), tuple(
            Slot(group=group, bundle=i, cpus=cpus, gpus=gpus, resources=tag) for i in range(n)
        )

    learner, learners = side(0, ranks, cluster.cpus_per_learner, cluster.gpus_per_learner, cluster.learner_resource)
    rollout, rollouts = side(1, workers, cluster.cpus_per_worker, cluster.gpus_per_worker, cluster.rollout_resource)
    groups = BundleGroup((learner,) * ranks, "PACK"), BundleGroup((rollout,) * workers, "SPREAD")
    return Plan(groups, learners, rollouts, (BundleGroup((rollout,), "PACK"), replace(rollouts[0], group=0)))


def _bundle(cpus: float, gpus: float, tag: Bundle) -> Bundle:
    bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount} | dict(tag)
    return bundle or {"CPU": 0.001}


def _floor(cpus: float) -> float:
    """Round down to Ray's granularity, so that the shares' sum stays within the whole."""
    return int(cpus * 1000) / 1000
