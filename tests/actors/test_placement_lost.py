"""Places whose node is lost, or must not be used any more, with pretended groups of Ray."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from actors import placement
from actors.placement import Placement
from actors.placement_plan import plan
from config.tree import ClusterOptions


class Group(str):
    """Ray's of that name."""

    __slots__ = ()

    @property
    def id(self) -> Any:
        return SimpleNamespace(hex=lambda: str(self))

    def wait(self, timeout_s: int) -> bool:
        return True


class Groups:
    """In place of Ray: `where` says on which nodes the bundles of each group are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where: dict[Any, list[str]] = {}
        self.asked = 0
        self.removed: list[Any] = []
        monkeypatch.setattr(placement, "placement_group_table", self.table)
        monkeypatch.setattr(placement, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(placement, "_create", self.create)

    def table(self, group: Any = None) -> dict[str, Any]:
        self.asked += 1
        return self._of(group) if group is not None else {name: self._of(name) for name in self.where}

    def _of(self, group: Any) -> dict[str, Any]:
        nodes = self.where[group]
        if nodes == ["no answer"]:
            raise RuntimeError("no head")
        return {"state": "CREATED" if all(nodes) else "RESCHEDULING", "bundles_to_node_id": dict(enumerate(nodes))}

    def create(self, group: Any, avoid: Collection[str] = ()) -> Any:
        made = Group(f"off {sorted(avoid)} {len(self.where)}")
        self.where[made] = [""] * len(group.bundles)
        return made


@pytest.mark.parametrize("nodes", [["a", "bad"], ["a", ""]])
def test_ranks_that_start_again_keep_off_refused_nodes(nodes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"learners": nodes, "workers": ["a", "bad"]}
    wanted = plan(ClusterOptions(layout="disaggregated"), workers=2, ranks=2, available_cpus=8.0)
    place = Placement(wanted, cast(Any, [Group("learners"), Group("workers")]), 1.0)
    place.learners_off([])
    assert groups.removed == [], "Ray reserves it again by itself"
    assert not place.learners_are_off(["bad"])
    place.learners_off(["bad"])
    assert groups.removed == ["learners"]
    assert not place.learners_are_off(["bad"]), "it is not reserved yet"
    assert place.learner_options()[0]["scheduling_strategy"].placement_group == "off ['bad'] 2"
    groups.where["off ['bad'] 2"] = ["a", "c"]
    assert place.learners_are_off(["bad"])
    assert not place.learners_are_off(["c"])
    place.learners_off(["bad"])
    assert groups.removed == ["learners"], "it is there"


def test_a_worker_that_shares_the_ranks_node_moves_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"first": ["bad"], "second": ["a"]}
    wanted = plan(ClusterOptions(layout="colocated"), workers=2, ranks=2, available_cpus=8.0)
    place = Placement(wanted, cast(Any, [Group("first"), Group("second")]), 1.0)
    for name in ("rollout-0", "rollout-1"):
        place.worker_options(name)
    place.learners_off(["bad"])
    assert groups.removed == ["first"]
    made = "off ['bad'] 2"
    options = [place.learner_options()[0], place.learner_options()[1], place.worker_options("rollout-0")]
    assert [o["scheduling_strategy"].placement_group for o in options] == [made, "second", made]
    place.let_go("rollout-0")
    groups.where[made] = ["c"]
    place.ask("rollout-2", avoid=["bad"])
    assert place.node("rollout-2") == "c", "who leaves such a place leaves the new one"


@pytest.mark.parametrize(("learner", "moves"), [("bad", True), ("", True), ("a", False)])
def test_ranks_move_out_of_a_group_whose_workers_are_on_other_nodes(
    learner: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"all": [learner, "a", ""]}  # a worker's node is lost in any case
    wanted = plan(ClusterOptions(layout="embedded"), workers=2, ranks=1, available_cpus=8.0)
    place = Placement(wanted, cast(Any, [Group("all")]), 1.0)
    place.learners_off(["bad"])
    assert groups.removed == [], "workers stay where they are"
    options = place.learner_options()[0]
    strategy = options["scheduling_strategy"]
    assert strategy.placement_group == ("off ['bad'] 1" if moves else "all")
    assert (strategy.placement_group_bundle_index, options["num_cpus"]) == (0, 1.0)
    if moves:
        assert place.missing_learner(), "it is not there yet"
        groups.where["off ['bad'] 1"] = ["c"]
        place.learners_off(["bad"])
    assert len(groups.where) == 1 + moves, "it is there"
    place.release()
    assert len(groups.removed) == 1 + moves


def test_a_place_is_nowhere_while_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"both": ["no answer"]}
    place = Placement(plan(ClusterOptions(layout="colocated"), workers=1, ranks=1, available_cpus=8.0), ["both"], 1.0)  # type: ignore[list-item]
    monkeypatch.setattr(placement, "_free_by_node", lambda avoid=(): 1 / 0)
    place.worker_options("rollout-0")
    assert not place.there("rollout-0")
    assert not place.ready("rollout-0")
    assert "Ray did not report" in place.missing("rollout-0")
    assert "Ray did not report" in place.missing_learner()


@pytest.mark.parametrize(("layout", "questions"), [("disaggregated", 1 + 8), ("colocated", 1 + 8)])
def test_a_look_at_many_places_asks_once_about_each_group_and_about_many_at_once(
    layout: str, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight workers wait for places while forty planned ones lie on a node that is not to be used."""
    groups, workers = Groups(monkeypatch), 40
    wanted = plan(ClusterOptions(layout=layout), workers=workers, ranks=1, available_cpus=99.0)
    made = [Group(f"planned {i}") for i in range(len(wanted.groups))]
    groups.where |= {name: ["bad"] * len(group.bundles) for name, group in zip(made, wanted.groups, strict=True)}
    place = Placement(wanted, cast(Any, made), 1.0)
    waiting = [f"rollout-{workers + i}" for i in range(8)]
    with place.look():
        for name in waiting:
            place.ask(name, avoid=["bad"])
        assert groups.asked == 1
        assert not any(place.ready(name) for name in waiting)
        assert place.nodes(waiting) == dict.fromkeys(waiting, "")
    assert groups.asked == questions
    for name in waiting:
        groups.where[place.worker_options(name)["scheduling_strategy"].placement_group] = ["good"]
    with place.look():
        assert all(place.ready(name) for name in waiting), "what was said is of one look"


def test_a_place_that_is_left_within_a_look_is_found_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {Group("both"): ["a"]}
    place = Placement(
        plan(ClusterOptions(layout="colocated"), workers=1, ranks=1, available_cpus=8.0),
        cast(Any, [Group("both")]),
        1.0,
    )
    place.worker_options("rollout-0")
    with place.look():
        place.ask("rollout-1", avoid=["bad"])
        assert place.own("rollout-1")
        place.let_go("rollout-0")
        assert place.ready("rollout-1")
        assert (place.own("rollout-1"), place.node("rollout-1")) == (False, "a")


def test_who_is_in_a_learners_way_has_a_place_of_its_own_where_a_rank_would_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"learner": ["a"], "workers": ["large"]}
    shape = ClusterOptions(layout="disaggregated", learner_resource="learner", cpus_per_learner=4.0)
    place = Placement(plan(shape, workers=1, ranks=1, available_cpus=8.0), cast(Any, ["learner", "workers"]), 1.0)
    resources = {"small": {"CPU": 2.0, "GPU": 1.0, "learner": 1.0}, "large": {"CPU": 8.0, "GPU": 1.0, "learner": 1.0}}
    nodes = [{"NodeID": node, "Alive": True, "Resources": has} for node, has in resources.items()]
    nodes.append({"NodeID": "untagged", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 8.0}})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    names = ["planned", "on large", "on small", "on untagged", "waits"]
    for name in names:
        group = place.worker_options(name)["scheduling_strategy"].placement_group
        groups.where[group] = [name.removeprefix("on ") if name.startswith("on ") else groups.where[group][0]]
    assert place.in_the_way(names) == [], "all ranks have their places"
    groups.where["learner"] = [""]
    assert place.in_the_way(names) == ["on large"]
    monkeypatch.setattr(ray, "nodes", lambda: 1 / 0)
    assert place.in_the_way(names) == []
