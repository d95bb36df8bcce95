"""What follows from what is heard about nodes: who leaves, where nobody trains, when a checkpoint comes first."""

from collections.abc import Callable, Collection
from typing import Any

import pytest

from actors.loop import Look
from actors.notices.types import SpotNotice, Withdrawn
from actors.notices.watch import Trouble, Watching
from launch.config import Config
from launch.fleet.feed import Gone, Heard, RayDrains
from launch.fleet.notices import LEAD_S, CheckpointWanted, Notices
from launch.run.opening import listens
from tests.context import run_context

HERE, LEARNER, SPOT = "aa" * 28, "bb" * 28, "cc" * 28
TWO_MINUTES = SpotNotice("EC2 will terminate it", True, 1000.0 + 120.0)


class Nodes:
    """Of what works somewhere."""

    def __init__(self, nodes: Callable[[], Collection[str]]) -> None:
        self._nodes = nodes

    @property
    def nodes(self) -> Collection[str]:
        return self._nodes()


class Training:
    """Of drafters."""

    def __init__(self) -> None:
        self.drained: dict[str, str] = {}

    def drain(self, node_id: str, reason: str) -> None:
        self.drained[node_id] = reason

    def undrain(self, node_id: str) -> None:
        del self.drained[node_id]


class World:
    """A feed, a fleet and clocks: everything that notices are about."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.workers = {SPOT: ["rollout-0", "rollout-1"], HERE: ["rollout-2"]}
        self.left: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self.training = Training()
        self.told_empty: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.saved = 0
        self.handing_back = False
        self.starting: set[str] = set()  # nodes where workers may come up
        self.others: set[str] = set()
        self.learners = {LEARNER}
        self.between = False  # no state of the learner's can be saved
        self.order: list[str] = []
        self.context = run_context(
            on_event=lambda kind, message: self.events.append((kind, message)),
            react=self._react,
            clock=lambda: self.now_s,
            wall=lambda: self.now_s,
        )
        world: Any = self  # feed and fleet
        learner: Any = Nodes(lambda: self.learners)
        others: Any = Nodes(lambda: self.others)
        training: Any = self.training
        self.notices = Notices(
            world,
            world,
            learner,
            others,
            training,
            self.context,
            here=HERE,
        )

    def _react(self, event: Any) -> None:
        match event:
            case Heard():
                self.notices.hear(event)
            case CheckpointWanted():
                if self._save():
                    self.notices.saved()
            case Look():
                self.notices.look()

    def look(self) -> None:
        """Whatever the driver waits for; and once more, for what that has led to."""
        for _ in range(2):
            self.context.loop.turn()

    def drain(self, node_id: str, reason: str) -> None:
        self.left.append((node_id, reason))
        self.order.append("drain")

    def drained(self, node_id: str, holds: bool) -> None:
        (self.told_empty.append if holds else self.told_empty.remove)(node_id)

    def admit(self, node_id: str, reason: str) -> None:
        self.left.remove((node_id, reason))

    def held(self, node_id: str) -> list[str]:
        return self.workers.get(node_id, [])

    def empty(self, node_id: str) -> bool:
        return not self.held(node_id) and node_id not in self.starting

    def forget(self, node_id: str) -> None:
        self.forgotten.append(node_id)

    def _save(self) -> bool:
        self.saved += not self.between
        self.order.append("save")
        return not self.between

    def hear(self, node_id: str, event: SpotNotice | Withdrawn | RayDrains | Gone | Trouble | Watching) -> None:
        self.context.loop.post(Heard(node_id, "10.0.0.5", event, self.now_s))
        self.look()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def test_a_notice_drains_its_node_and_nobody_trains_there_and_the_time_until_it_is_empty_is_told() -> None:
    world = World()
    world.hear(SPOT, TWO_MINUTES)
    assert world.left == [(SPOT, "EC2 will terminate it")]
    assert world.training.drained == dict(world.left)
    assert world.told_empty == []
    world.now_s += 0.5
    world.look()
    assert world.kinds() == ["spot_notice"]
    world.workers[SPOT] = []
    world.now_s += 0.25
    world.look()
    world.look()
    assert world.told_empty == [SPOT]
    assert world.events[0] == ("spot_notice", f"node {SPOT[:8]} (10.0.0.5): EC2 will terminate it, in 120 s")
    assert world.events[1:] == [
        ("node_cleared", f"node {SPOT[:8]} (10.0.0.5): no worker there has requests 0.8 s after the notice")
    ]
    assert world.notices.take() == {"fleet/notices": 1.0, "fleet/drain_s": 0.75}
    assert world.notices.take() == {"fleet/notices": 0.0}
    assert world.saved == 0
    assert not world.notices.endangered


def test_the_cloud_is_not_told_to_go_on_where_anything_of_the_run_is_left() -> None:
    world = World()
    world.workers[SPOT] = []
    world.starting = {SPOT}
    for node in (SPOT, LEARNER, HERE):
        world.hear(node, TWO_MINUTES)

    def told() -> list[str]:
        world.now_s += 1.0
        world.look()
        return world.told_empty

    assert told() == []
    world.starting, world.others = set(), {SPOT}
    assert told() == []
    world.others = {""}
    assert told() == [], "a reward worker has not said where it is"
    world.others, world.learners = set(), set()
    assert told() == [], "the learner is being made again"
    world.learners = {LEARNER}
    assert told() == [SPOT]
    assert told() == [SPOT], "never of the learner's node, nor of the driver's"


def test_what_is_heard_twice_of_one_node_is_obeyed_once() -> None:
    world = World()
    for event in (TWO_MINUTES, TWO_MINUTES, RayDrains(1120.0)):
        world.hear(SPOT, event)
    assert len(world.left) == 1
    assert world.kinds() == ["spot_notice", "spot_notice"]  # another source is said too
    assert world.notices.take()["fleet/notices"] == 1.0


def test_the_learners_node_is_drained_after_a_checkpoint_and_is_a_danger_until_it_has_gone() -> None:
    world = World()
    world.hear(LEARNER, RayDrains(None))
    assert world.saved == 1
    assert [node for node, _ in world.left] == [LEARNER]
    assert world.kinds()[:2] == ["spot_notice", "checkpoint_first"]
    before = world.notices.endangered
    world.hear(LEARNER, Gone())
    assert (before, world.notices.endangered) == (True, False)
    assert world.forgotten == [LEARNER]
    assert world.training.drained == {}


def test_all_nodes_are_drained_and_have_handed_back_before_the_driver_is_held_up_by_a_checkpoint() -> None:
    world = World()
    world.handing_back = True
    for node in (LEARNER, SPOT):
        world.context.loop.post(Heard(node, "", TWO_MINUTES, world.now_s))
    world.look()
    assert world.order == ["drain", "drain"]
    world.look()
    assert world.saved == 0
    world.handing_back = False
    world.look()
    world.look()
    assert world.order == ["drain", "drain", "save"]


def test_a_checkpoint_that_cannot_be_made_in_the_middle_of_an_update_is_made_after_it() -> None:
    world = World()
    world.between = True
    world.hear(LEARNER, TWO_MINUTES)
    world.look()
    assert world.saved == 0
    world.between = False
    for _ in range(2):
        world.look()
    assert world.saved == 1


def test_a_node_whose_notices_are_all_taken_back_is_used_again() -> None:
    world = World()
    world.hear(SPOT, TWO_MINUTES)
    world.hear(SPOT, RayDrains(None))
    world.workers[SPOT] = []
    world.now_s += 1.0
    world.look()
    assert world.told_empty == [SPOT]
    world.hear(SPOT, Withdrawn(TWO_MINUTES.what))
    assert world.left == [(SPOT, TWO_MINUTES.what)], "Ray drains it still"
    world.hear(SPOT, Withdrawn(RayDrains.WHAT))
    world.hear(SPOT, Withdrawn(RayDrains.WHAT))
    assert (world.left, world.training.drained, world.told_empty) == ([], {}, [])
    assert world.kinds()[-2:] == ["spot_withdrawn", "spot_withdrawn"]
    assert world.events[-1][1] == f"node {SPOT[:8]} (10.0.0.5): withdrawn: Ray drains it; it stays"
    world.hear(SPOT, TWO_MINUTES)
    assert world.left == [(SPOT, TWO_MINUTES.what)], "a new one is obeyed like the first"


def test_a_notice_that_is_taken_back_before_it_was_due_is_never_obeyed() -> None:
    world = World()
    later = SpotNotice("Azure announces Redeploy", True, world.now_s + 86_400)
    world.hear(LEARNER, later)
    world.hear(LEARNER, Withdrawn(later.what))
    world.now_s += 86_400
    world.look()
    assert (world.left, world.saved, world.training.drained) == ([], 0, {})


def test_a_learner_that_comes_to_a_node_that_ends_is_saved_as_one_that_was_there() -> None:
    """It was being made again when the notice came."""
    world = World()
    world.learners = set()
    world.hear(LEARNER, TWO_MINUTES)
    assert world.saved == 0
    world.learners = {LEARNER}
    for _ in range(2):
        world.look()
    assert world.saved == 1
    assert world.kinds().count("checkpoint_first") == 1


def test_an_earlier_time_of_the_same_notice_counts() -> None:
    world = World()
    world.hear(SPOT, SpotNotice("Azure announces Redeploy", True, world.now_s + 86_400))
    world.hear(SPOT, SpotNotice("Azure announces Redeploy", True, world.now_s + 90_000))
    assert len(world.events) == 1
    world.hear(SPOT, SpotNotice("Azure announces Redeploy", True, world.now_s + 30))
    assert world.left == [(SPOT, "Azure announces Redeploy")]


def test_the_drivers_node_keeps_its_workers_but_the_run_is_saved() -> None:
    world = World()
    world.hear(HERE, TWO_MINUTES)
    assert world.saved == 1
    assert world.left == []
    assert world.notices.endangered


def test_advice_moves_nothing_and_is_said() -> None:
    world = World()
    world.hear(SPOT, SpotNotice("EC2 recommends to rebalance", False))
    assert world.left == []
    assert world.training.drained == {}
    assert world.kinds() == ["spot_advice"]


def test_what_is_announced_days_ahead_is_said_at_once_and_obeyed_when_it_is_near() -> None:
    world = World()
    at_s = world.now_s + 3 * 86_400
    world.hear(SPOT, SpotNotice("Azure announces Redeploy", True, at_s))
    assert world.kinds() == ["spot_notice"]
    assert world.left == []
    world.now_s = at_s - LEAD_S - 1
    world.look()
    assert world.left == []
    world.now_s += 1
    world.look()
    assert len(world.left) == 1


def test_an_earlier_end_replaces_a_later_one() -> None:
    world = World()
    world.hear(SPOT, SpotNotice("Azure announces Redeploy", True, world.now_s + 86_400))
    world.hear(SPOT, SpotNotice("Azure announces Preempt", True, world.now_s + 30))
    assert world.left == [(SPOT, "Azure announces Preempt")]
    assert world.notices.take()["fleet/notices"] == 1.0


def test_a_node_that_goes_before_its_workers_have_left_is_said_so() -> None:
    world = World()
    world.hear(SPOT, TWO_MINUTES)
    world.hear(SPOT, Gone())
    assert world.events[-1] == (
        "node_gone",
        f"node {SPOT[:8]} (10.0.0.5): has ended, as announced, before its workers had left",
    )
    world.hear("dd" * 28, Gone())  # nobody had announced it: its loss is the workers' to tell
    assert world.forgotten[-1] == "dd" * 28, "it may have been refused"
    assert world.kinds()[-1] == "node_gone"
    assert len(world.events) == 2


def test_what_many_nodes_have_to_say_alike_is_said_once() -> None:
    world = World()
    for node in (SPOT, LEARNER, HERE):
        world.hear(node, Watching("aws"))
        world.hear(node, Trouble("aws: no whole answer in 2 s"))
    assert world.kinds() == ["spot_watch", "spot_trouble"]


@pytest.mark.parametrize(
    ("address", "provider", "environment", "expected"),
    [
        (None, "auto", None, False),
        ("local", "auto", "10.0.0.1:6379", False),
        ("10.0.0.1:6379", "auto", None, True),
        (None, "auto", "10.0.0.1:6379", True),
        (None, "gcp", None, True),
        (None, "none", None, False),
        ("10.0.0.1:6379", "none", None, True),  # Ray's own drains are heard
    ],
)
def test_a_head_of_the_runs_own_listens_only_where_a_cloud_is_named(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    provider: str,
    environment: str | None,
    *,
    expected: bool,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    cluster = {"address": address, "spot": {"provider": provider}}
    rest = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": "t"}}
    assert listens(Config.model_validate({**rest, "cluster": cluster})) is expected
