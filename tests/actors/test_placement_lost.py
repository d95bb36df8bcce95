"""Places whose node is lost, or must not be used any more, with pretended groups of Ray."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from actors import placement
from actors.placement import Placement, plan


class Groups:
    """In place of Ray: `where` says on which nodes the bundles of each group are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.where: dict[Any, list[str]] = {}
        self.asked = 0
        self.removed: list[Any] = []
        monkeypatch.setattr(placement, "placement_group_table", self.table)
        monkeypatch.setattr(placement, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(placement, "_create", self.create)

    def table(self, group: Any) -> dict[str, Any]:
        self.asked += 1
        nodes = self.where[group]
        if nodes == ["no answer"]:
            raise RuntimeError("no head")
        return {"state": "CREATED" if all(nodes) else "RESCHEDULING", "bundles_to_node_id": dict(enumerate(nodes))}

    def create(self, group: Any, avoid: Collection[str] = ()) -> Any:
        made = f"off {sorted(avoid)} {len(self.where)}"
        self.where[made] = [""] * len(group.bundles)
        return made


def cluster(layout: str) -> Any:
    return SimpleNamespace(
        layout=layout,
        gpus_per_worker=1,
        gpus_per_learner=1,
        cpus_per_worker=1.0,
        cpus_per_learner=1.0,
        rollout_resource=None,
        learner_resource=None,
    )


@pytest.mark.parametrize("nodes", [["a", "bad"], ["a", ""]])
def test_ranks_that_start_again_keep_off_refused_nodes(nodes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"learners": nodes, "workers": ["a", "bad"]}
    wanted = plan(cluster("disaggregated"), workers=2, ranks=2, available_cpus=8.0)
    place = Placement(wanted, ["learners", "workers"], 1.0)  # type: ignore[list-item]
    place.learners_off([])
    assert groups.removed == [], "Ray reserves it again by itself"
    place.learners_off(["bad"])
    assert groups.removed == ["learners"]
    assert place.learner_options(0)["scheduling_strategy"].placement_group == "off ['bad'] 2"
    groups.where["off ['bad'] 2"] = ["a", "c"]
    place.learners_off(["bad"])
    assert groups.removed == ["learners"], "it is there"


def test_a_group_that_workers_share_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"both": ["bad"]}
    place = Placement(plan(cluster("colocated"), workers=1, ranks=1, available_cpus=8.0), ["both"], 1.0)  # type: ignore[list-item]
    place.learners_off(["bad"])
    assert groups.removed == []


def test_a_place_is_nowhere_while_ray_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    groups.where |= {"both": ["no answer"]}
    place = Placement(plan(cluster("colocated"), workers=1, ranks=1, available_cpus=8.0), ["both"], 1.0)  # type: ignore[list-item]
    monkeypatch.setattr(placement, "_free_by_node", lambda avoid=(): 1 / 0)
    place.worker_options("rollout-0")
    assert not place.there("rollout-0")
    assert not place.ready("rollout-0")
    assert "Ray does not say" in place.missing("rollout-0")
    assert "Ray does not say" in place.missing_learner()
