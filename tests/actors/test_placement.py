"""Plans as pure data, and reservations on the real head (whose GPUs are pretended)."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from actors import placement
from actors.context import Context
from actors.group_engine import group_gpus
from actors.observer import RunObserver
from actors.placement import Placement, place, reserve
from actors.placement_plan import PlacementError, Plan, plan
from config.data import DataOptions
from config.learner import LearnerOptions
from config.model import ModelOptions
from config.rollout import RolloutOptions, WorkerCount
from config.tree import ClusterOptions, Config, RunOptions


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def placing(*, workers: int = 2, ranks: int = 1, **cluster: Any) -> Config:
    """A configuration of so many workers and ranks."""
    return Config(
        run=RunOptions(name="placing"),
        model=ModelOptions(path="model"),
        data=DataOptions(),
        cluster=ClusterOptions(start_timeout_s=30.0, **cluster),
        rollout=RolloutOptions(workers=WorkerCount.fixed(workers)),
        learner=LearnerOptions(ranks=ranks),
    )


def check_slots_fit(made: Plan) -> None:
    """What the slots of a bundle take together is what the bundle holds, or less."""
    for g, group in enumerate(made.groups):
        for b, bundle in enumerate(group.bundles):
            slots = [s for s in (*made.learners, *made.workers) if (s.group, s.bundle) == (g, b)]
            assert sum(s.cpus for s in slots) <= bundle.get("CPU", 0) + 1e-9
            assert sum(s.gpus for s in slots) <= bundle.get("GPU", 0) + 1e-9
            for name in {n for s in slots for n in s.resources}:
                assert sum(s.resources[name] for s in slots) <= bundle[name]


@pytest.mark.parametrize(("workers", "ranks", "cpus"), [(1, 1, 2), (3, 1, 2), (3, 2, 1), (2, 1, 64)])
def test_embedded_fits_any_machine(workers: int, ranks: int, cpus: int) -> None:
    made = plan(ClusterOptions(), workers=workers, ranks=ranks, available_cpus=cpus)
    check_slots_fit(made)
    assert made.demand()["CPU"] <= cpus + 1e-9
    assert "GPU" not in made.demand()
    if cpus >= workers + ranks:
        assert made.demand() == {"CPU": workers + ranks}


def test_colocated_shares_every_gpu_of_a_node() -> None:
    made = plan(
        ClusterOptions(layout="colocated", gpus_per_worker=8, cpus_per_worker=4), workers=2, ranks=16, available_cpus=0
    )
    check_slots_fit(made)
    assert made.demand() == {"GPU": 16, "CPU": 24}
    assert {g.strategy for g in made.groups} == {"STRICT_PACK"}
    assert [(s.group, s.bundle) for s in made.workers] == [(0, 0), (1, 0)]
    assert {(s.group, s.bundle) for s in made.learners} == {(g, b) for g in range(2) for b in range(8)}
    assert {s.gpus for s in (*made.learners, *made.workers)} == {0.49}


@pytest.mark.parametrize(
    ("cluster", "ranks", "match"),
    [
        (ClusterOptions(layout="colocated", gpus_per_worker=0.5), 1, "gpus_per_worker=0.5"),
        (ClusterOptions(layout="colocated", gpus_per_learner=2), 1, "gpus_per_learner=2"),
        (ClusterOptions(layout="colocated"), 3, "3 learner ranks do not fit on the 2 GPUs"),
    ],
)
def test_colocated_contradictions_name_the_keys(cluster: ClusterOptions, ranks: int, match: str) -> None:
    with pytest.raises(PlacementError, match=match):
        plan(cluster, workers=2, ranks=ranks, available_cpus=8)


def test_disaggregated_spreads_workers_and_packs_ranks_on_their_own_nodes() -> None:
    cluster = ClusterOptions(
        layout="disaggregated", gpus_per_worker=8, rollout_resource="rollout", learner_resource="learner"
    )
    made = plan(cluster, workers=3, ranks=8, available_cpus=0)
    check_slots_fit(made)
    learner, rollout = made.groups
    assert (learner.strategy, len(learner.bundles)) == ("PACK", 8)
    assert (rollout.strategy, len(rollout.bundles)) == ("SPREAD", 3)
    assert all(b["GPU"] == 1 and b["learner"] > 0 and "rollout" not in b for b in learner.bundles)
    assert all(b["GPU"] == 8 and b["rollout"] > 0 and "learner" not in b for b in rollout.bundles)


class Where:
    def pid(self) -> int:
        return os.getpid()

    def gpus(self) -> list[int]:
        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def group_gpus(self, timeout_s: float) -> list[int] | None:
        return group_gpus(timeout_s)


@pytest.mark.ray
def test_embedded_places_actors_and_gives_all_back() -> None:
    free = ray.available_resources()["CPU"]
    config = placing(cpus_per_worker=free, cpus_per_learner=free)  # three times what there is
    with place(config) as placement:
        options = [placement.worker_options("a"), placement.worker_options("b"), placement.learner_options()[0]]
        actors: list[Any] = [ray.remote(Where).options(**o).remote() for o in options]
        pids = ray.get([a.pid.remote() for a in actors], timeout=60)
        assert len({*pids, os.getpid()}) == 4
        for name, kept in zip("ab", options, strict=False):
            found = placement.worker_options(name)["scheduling_strategy"].placement_group_bundle_index
            assert found == kept["scheduling_strategy"].placement_group_bundle_index, "a name keeps its place"
    with place(config):  # everything is free again, or this would wait in vain
        pass


@pytest.mark.ray
def test_colocated_actors_share_their_gpus() -> None:
    config = placing(ranks=4, layout="colocated", gpus_per_worker=2)
    with place(config) as placement:
        learners: list[Any] = [
            ray.remote(Where).options(**placement.learner_options()[rank]).remote() for rank in range(4)
        ]
        gpus = [gpu for ids in ray.get([a.gpus.remote() for a in learners], timeout=60) for gpu in ids]
        assert sorted(gpus) == [0, 1, 2, 3]  # one each
        first: Any = ray.remote(Where).options(**placement.worker_options("first")).remote()
        worker: Any = ray.remote(Where).options(**placement.worker_options("second")).remote()
        assert ray.get(worker.gpus.remote(), timeout=60) == gpus[2:3]
        assert placement.gpus_timeout_s is not None
        asked = [each.group_gpus.remote(placement.gpus_timeout_s) for each in (first, worker)]
        of_engines = ray.get(asked, timeout=60)
        assert of_engines == [gpus[:2], gpus[2:]], "the engine uses the GPUs of both bundles"


@pytest.mark.ray
def test_learner_and_rollout_have_gpus_of_their_own_on_one_node() -> None:
    with place(placing(ranks=2, layout="disaggregated")) as placement:
        options = placement.learner_options()
        options += [placement.worker_options("a"), placement.worker_options("b")]
        actors: list[Any] = [ray.remote(Where).options(**each).remote() for each in options]
        gpus = ray.get([actor.gpus.remote() for actor in actors], timeout=60)
        assert sorted(gpus) == [[0], [1], [2], [3]]


@pytest.mark.ray
def test_a_disaggregated_worker_sees_all_its_gpus() -> None:
    config = placing(workers=1, layout="disaggregated", gpus_per_worker=3, gpus_per_learner=1)
    with place(config) as placement:
        worker: Any = ray.remote(Where).options(**placement.worker_options("a")).remote()
        assert len(ray.get(worker.gpus.remote(), timeout=60)) == 3
        assert placement.gpus_timeout_s is None, "what Ray shows"


@pytest.mark.ray
def test_what_a_learner_waits_for_after_the_loss_of_its_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    where = plan(
        ClusterOptions(layout="disaggregated", learner_resource="learner"), workers=1, ranks=1, available_cpus=0
    )
    states = {"learners": "CREATED", "workers": "RESCHEDULING"}  # the other group is not the learner's
    groups: list[Any] = ["learners", "workers"]
    placed = Placement(where, groups, timeout_s=1.0)
    monkeypatch.setattr(
        placement, "placement_group_table", lambda group: {"state": states[group], "bundles_to_node_id": {0: "n"}}
    )
    monkeypatch.setattr(placement, "_free_by_node", lambda avoid: {"10.0.0.7": ({"CPU": 8.0}, {"CPU": 8.0})})
    assert placed.missing_learner() == ""
    states["learners"] = "RESCHEDULING"
    assert "10.0.0.7 (GPU: 1 needed, 0 free of 0; learner: 0.001 needed" in placed.missing_learner()


def test_missing_resources_are_named_within_the_deadline() -> None:
    cluster = ClusterOptions(layout="disaggregated", gpus_per_worker=8, cpus_per_worker=0.5, rollout_resource="spot")
    made = plan(cluster, workers=2, ranks=1, available_cpus=4)
    with pytest.raises(PlacementError, match=r"within 0.5 s .* missing GPU, spot .*GPU: 17 needed, \d free of 4"):
        reserve(made, timeout_s=0.5)


class Told(RunObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def event(self, kind: str, message: str) -> None:
        self.events.append((kind, message))


@dataclass(frozen=True, kw_only=True)
class Stopped(Context):
    """Asked to stop."""

    def check(self) -> None:
        raise TimeoutError("asked to stop")


@pytest.mark.ray
def test_who_waits_for_places_says_what_is_missing_and_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SLICE_S", 0.05)
    monkeypatch.setattr(placement, "_FIRST_WORD_S", 0.1)
    made = plan(ClusterOptions(layout="disaggregated", gpus_per_worker=8), workers=1, ranks=1, available_cpus=4)
    told = Told()
    with pytest.raises(PlacementError, match="missing GPU"):
        reserve(made, timeout_s=1.5, context=Context(observer=told))
    [(kind, message)] = told.events  # the next would come a minute later
    assert kind == "waiting"
    assert re.search(
        r"missing GPU .*GPU: 9 needed, \d free of 4.* of 1.5 s at most \(cluster.start_timeout_s\)", message
    )
    with pytest.raises(TimeoutError, match="asked to stop"):
        reserve(made, timeout_s=600.0, context=Stopped())


@pytest.mark.ray
def test_a_later_worker_has_a_reservation_of_its_own_that_comes_and_goes_alone() -> None:
    config = placing(workers=1, layout="disaggregated")
    with place(config) as placement:
        placement.worker_options("a")
        for name in "bc":  # the head has 4 GPUs
            placement.ask(name)
            eventually(lambda name=name: placement.ready(name))
        placement.ask("late")
        assert not placement.ready("late")
        assert re.fullmatch(
            r"missing on every node: [\d.]+ \(\w{8}\) \(GPU: 1 needed, 0 free of 4\)", placement.missing("late")
        )
        placement.let_go("b")
        eventually(lambda: placement.ready("late"))
        placement.let_go("a")
        placement.ask("e")
        assert placement.ready("e"), "a planned place that nobody has is there at once"


@pytest.mark.ray
def test_places_let_go_while_they_are_reserved_come_back() -> None:
    with place(placing(workers=1, layout="disaggregated")) as placement:
        placement.worker_options("a")
        for i in range(300):
            for name in "bcd":  # there is room for two
                placement.ask(name)
            time.sleep(0.001 * (i % 5))
            for name in "bcd":
                placement.let_go(name)
        eventually(lambda: ray.available_resources().get("GPU") == 2)


@pytest.mark.ray
def test_nothing_is_placed_on_a_node_that_is_to_be_avoided() -> None:
    here = ray.get_runtime_context().get_node_id()
    with place(placing(cpus_per_worker=0.001, cpus_per_learner=0.001)) as placement:
        for name in ("a", "b"):
            placement.ask(name)
        placement.let_go("b")
        placement.ask("c", avoid=[here])
        time.sleep(0.5)
        assert not placement.ready("c"), "neither on the planned place, which is there, nor anywhere else of the node"
        placement.ask("d", avoid=["0" * 56])
        eventually(lambda: placement.ready("d"))
