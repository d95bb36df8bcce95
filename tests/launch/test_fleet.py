"""The fleet with a pretended cluster, dispatcher and clock: who joins, who leaves, and what is said of it."""

from typing import Any

import pytest

from config.rollout import WorkerCount
from launch.dispatch import SeatState
from launch.fleet.fleet import PATIENCE_S
from launch.fleet.timings import FleetTimings
from tests.launch.fleet_world import ELASTIC, Asked, World


def test_the_rest_join_whenever_there_is_room_and_one_event_says_what_is_missing() -> None:
    world = World(ELASTIC, {"a": 1})
    world.passes(3 * PATIENCE_S)
    assert world.names == ["rollout-0"]
    assert world.events == [
        (
            "worker_unplaced",
            "rollout-1 joins when the cluster has room (nobody adds nodes to this cluster by itself): "
            "missing on every node: all (GPU: 1 needed)",
        )
    ]
    world.cluster.room["b"] = 1  # a node joins
    world.passes(8)
    assert world.names == ["rollout-0", "rollout-1"]
    assert world.fleet.state.up == ("rollout-0", "rollout-1")
    world.passes(3 * PATIENCE_S)
    assert [message[:9] for _, message in world.events] == ["rollout-1", "rollout-2"], "said again for the next one"
    assert world.fleet.take()["fleet/joined"] == 1


def test_what_waits_for_a_place_gives_way_to_a_learner_that_needs_one() -> None:
    """Ray gives a node that joins to whoever waits: a place of the fleet would be held by nobody while the learner's
    start, which the driver waits in, never gets it."""
    world = World(ELASTIC, {"a": 1})
    world.passes(PATIENCE_S)
    assert world.asked() == 2
    world.fleet.hold_back(True)
    assert (world.asked(), set(world.cluster.places)) == (0, {"rollout-0"})
    world.passes(PATIENCE_S)
    world.fleet.drain("b", "spot")  # a notice is obeyed all the same
    assert (world.asked(), set(world.cluster.places)) == (0, {"rollout-0"})
    world.fleet.hold_back(False)
    world.passes(1)
    assert world.asked() == 2, "now they wait for what the learner leaves"
    assert world.names == ["rollout-0"]


def test_a_drained_node_is_left_and_replaced_elsewhere_and_may_come_back() -> None:
    world = World(WorkerCount.fixed(2), {"a": 2, "b": 1})
    world.fleet.drain("a", "spot notice")
    world.fleet.drain("a", "spot notice")  # said twice, done once
    assert [kind for kind, _ in world.events] == ["node_drained"]
    assert [name for name, _ in world.left] == ["rollout-0", "rollout-1"]
    assert "spot notice" in world.left[0][1]
    assert world.fleet.held("a") == []
    world.passes(6)
    assert world.names == ["rollout-2"], "the lowest number that nobody had; there is room for one"
    assert world.cluster.places["rollout-2"] == "b"
    world.fleet.drain("a", "it has another torch")
    world.fleet.admit("a", "spot notice")
    world.passes(8)
    assert world.names == ["rollout-2"], "there was another reason"
    world.fleet.admit("a", "it has another torch")
    assert world.events[-1][0] == "node_returned"
    world.passes(8)
    assert world.names == ["rollout-0", "rollout-2"], "what waits for room takes it there too"
    world.fleet.admit("unknown", "spot notice")


def test_a_worker_that_starts_on_a_drained_node_leaves_at_once() -> None:
    world = World(WorkerCount.fixed(1), {"a": 1, "b": 1})
    world.fleet.drain("a", "it goes")
    world.passes(0.25)
    assert not world.fleet.empty("b")
    world.fleet.drain("b", "so does this")  # while the replacement starts there
    assert [name for name, _ in world.left] == ["rollout-0", "rollout-1"]
    assert not world.fleet.empty("b"), "who waits for a place may get one there, for all that is known"
    world.passes(6)
    assert world.names == ["rollout-0"], "the run waits for it: there is nobody else"
    assert world.cluster.places["rollout-0"] == ""
    world.cluster.room["c"] = 1
    world.passes(6)
    assert world.fleet.state.up == ("rollout-0",)


def test_the_dead_take_no_place_of_those_that_are_wanted_and_are_fewer_at_the_most() -> None:
    world = World(WorkerCount(min=1, max=6), {"a": 4})
    world.waiting = (400, 40_000.0)
    world.running = {"rollout-0": 4}
    world.passes(8)
    assert len(world.names) == 4
    world.dead = {"rollout-1", "rollout-2", "rollout-3"}
    world.passes(0.25)
    assert set(world.cluster.places) - world.dead == set(world.cluster.places), "their places are given back"
    world.passes(8)
    assert list(world.fleet.state.up) == ["rollout-0", "rollout-4", "rollout-5"]
    world.dead |= {"rollout-4"}
    world.passes(8)
    assert list(world.fleet.state.up) == ["rollout-0", "rollout-5"], "four of six are dead"
    fixed = World(WorkerCount.fixed(2), {"a": 3})
    fixed.dead = {"rollout-1"}
    fixed.passes(8)
    assert fixed.names == ["rollout-0", "rollout-1"]


def test_workers_without_requests_go_between_two_rollouts_and_are_back_in_time() -> None:
    world = World(ELASTIC, {"a": 9})
    world.passes(8)
    assert len(world.names) == 3
    world.measured(gap_s=60)
    world.fleet.begins("rollout")
    for name in world.names:
        world.running[name] = 4
    world.passes(10)
    assert world.left == [], "nobody with requests goes"
    del world.running["rollout-1"]
    world.passes(10)
    assert [name for name, _ in world.left] == ["rollout-1"], "in the tail: the next rollout is far away"
    world.running.clear()
    world.fleet.ends(10_000)
    world.passes(10)
    assert world.names == ["rollout-0"], "never below the least"
    assert set(world.cluster.places) == {"rollout-0"}, "their places are given back"
    world.passes(49)
    assert world.names == ["rollout-0", "rollout-1", "rollout-2"]
    assert all(now.state is SeatState.READY for now in world.workers().values()), "before the 60 s are over"
    metrics = world.fleet.take()
    assert (metrics["fleet/joined"], metrics["fleet/left"]) == (4, 2)
    assert metrics["fleet/idle_seconds"] < metrics["fleet/worker_seconds"]


def test_the_training_hears_how_long_workers_have_had_nothing_to_do_in_this_rollout() -> None:
    """One that loads weights has something to do."""
    world = World(WorkerCount(min=2, max=2), {"a": 9})
    world.passes(8)
    world.fleet.begins("rollout")
    world.running |= {"rollout-0": 4, "rollout-1": 4}
    world.idle_s.clear()
    world.passes(0.25)
    del world.running["rollout-1"]
    world.passes(0.75)
    world.loading.add("rollout-1")
    world.passes(0.25)
    world.loading.clear()
    del world.running["rollout-0"]
    world.passes(0.5)
    assert world.idle_s == [[], [0.0], [0.25], [0.5], [], [0.0, 1.0], [0.25, 1.25]]
    world.fleet.begins("rollout")  # the next one: what was before does not count
    world.passes(0.25)
    assert world.idle_s[-1] == [0.25, 0.25]


def test_workers_stay_until_it_is_known_whether_their_tail_has_room_for_training() -> None:
    world = World(ELASTIC, {"a": 9})
    world.passes(8)
    world.measured(gap_s=60)
    world.fleet.begins("rollout")
    for name in world.names[1:]:
        world.running[name] = 4
    world.may_begin = True
    world.passes(10)
    assert world.left == []
    world.may_begin = False
    world.passes(0.25)
    assert [name for name, _ in world.left] == ["rollout-0"]


def test_nobody_is_kept_or_called_back_after_the_last_rollout() -> None:
    world = World(ELASTIC, {"a": 9})
    world.passes(8)
    world.measured(gap_s=6)
    world.rollouts_left = 1
    world.fleet.begins("rollout")
    world.running["rollout-2"] = 1
    world.passes(10)
    assert world.names == ["rollout-2"], "though the next rollout used to be 6 s away, in its tail"
    world.running.clear()
    world.fleet.ends(10_000)
    world.passes(60)
    assert world.names == ["rollout-2"], "the least stays"


def test_a_worker_is_counted_from_its_start_to_its_end() -> None:
    world = World(ELASTIC, {"a": 2})
    world.fleet.take()
    world.passes(4)
    assert world.names == ["rollout-0", "rollout-1"]
    started_s = world.up_s["rollout-1"] - world.start_s
    assert world.fleet.take()["fleet/worker_seconds"] == world.now_s + (world.now_s - started_s) - world.start_s


@pytest.mark.parametrize("why", ["fixed", "training", "soon", "nothing measured"])
def test_nobody_goes(why: str) -> None:
    world = World(WorkerCount.fixed(3) if why == "fixed" else ELASTIC, {"a": 3})
    world.passes(8)
    world.trains = why == "training"
    if why != "nothing measured":
        world.measured(gap_s=6 if why == "soon" else 60)
    world.fleet.begins("rollout")
    world.passes(10)
    assert world.left == []
    assert len(world.names) == 3


def test_what_waits_decides_how_many_are_asked_for() -> None:
    world = World(WorkerCount(min=1, max=9), {"a": 1})
    world.measured(tokens_per_s=100, gap_s=0)
    world.rollouts_left = 0
    world.fleet.timings._tokens.clear()  # nothing is known of what comes next
    world.fleet.begins("rollout")
    world.running["rollout-0"] = 4
    world.waiting = (2, 300.0)
    world.passes(1)
    assert world.asked() == 0, "done before anybody could come"
    world.waiting = (40, 1000.0)
    world.passes(1)
    assert world.asked() == 2, "each of three has work for a margin (2 s) after 4 s"
    world.waiting = (40, 9000.0)
    world.passes(1)
    assert world.asked() == 8
    world.waiting = (0, 0.0)
    world.passes(1)
    assert world.asked() == 0, "what nobody needs any more is not waited for"
    assert set(world.cluster.places) == {"rollout-0"}


def test_timings_are_of_what_was_seen() -> None:
    timings = FleetTimings()
    assert (timings.start_s, timings.tokens_per_s, timings.next_in_s(5.0)) == (None, 0.0, 0.0)
    timings.begins("rollout", 0.0)
    timings.looked(9, 1.0)
    timings.window(100, 1.0, waiting=True)
    timings.window(30, 1.0, waiting=False)  # in the tail: fewer requests than it could run
    timings.looked(0, 2.0)
    timings.ends(130, 12.0)
    assert timings.tokens_per_s == 100.0
    assert timings.next_in_s(13.0) == 0.0, "nothing has followed a rollout yet"
    timings.begins("eval", 42.0)
    timings.ends(10, 43.0)
    timings.begins("rollout", 44.0)
    timings.looked(0, 44.5)
    assert timings.next_in_s(46.5) == 10.0 - 2.0 + 30.0
    timings.looked(3, 47.0)  # a worker was lost: requests wait again
    assert timings.next_in_s(48.0) == 0.0
    timings.looked(0, 49.0)
    timings.ends(130, 52.0)
    assert timings.next_in_s(60.0) == 22.0
    assert timings.between_s == 33.0
    for seconds in (9.0, 5.0, 6.0, 7.0):
        timings.started(seconds)
    assert timings.start_s == 7.0


def test_the_autoscaler_is_asked_where_there_is_one_and_once() -> None:
    asked: list[Any] = []
    autoscaler = Asked(asked)
    for workers in (2, 2, 1, 0):
        autoscaler.want(workers)
    one = [{"CPU": 1.0}, {"CPU": 1.0}, {"GPU": 2.0, "CPU": 2.0}]
    assert asked.pop(0) == [], "of a run that was killed"
    assert asked == [[*one, {"GPU": 2.0, "CPU": 2.0}], one]
    autoscaler.close()
    assert asked[-1] == []

    class Refused(Asked):
        def _request(self, wanted: Any) -> None:
            raise RuntimeError("no monitor")

    Refused([]).want(3)
    nobody = Asked(asked, there=False)
    nobody.want(5)
    nobody.close()
    assert len(asked) == 3, "an equal request is not repeated"


def test_nobody_joins_on_a_node_that_is_not_vouched_for_and_elsewhere_once_it_is_drained() -> None:
    good = {"a"}
    world = World(ELASTIC, {"a": 1}, vouched=lambda node: node in good)
    world.waiting = (40, 4000.0)
    world.running = {"rollout-0": 4}
    world.cluster.room["b"] = 2  # a node joins, and what is asked for is reserved there
    world.passes(3)
    assert world.names == ["rollout-0"]
    assert "b" in world.cluster.places.values()
    world.fleet.drain("b", "it has another torch")
    assert "b" not in world.cluster.places.values()
    world.cluster.room["c"] = 2
    good.add("c")
    world.passes(8)
    assert world.names == ["rollout-0", "rollout-1", "rollout-2"]
    assert set(world.cluster.places.values()) == {"a", "c"}


def test_where_an_engine_may_not_start_now_nobody_joins_and_notices_are_obeyed_all_the_same() -> None:
    """Of a GPU that it would share with a learner that works."""
    world = World(WorkerCount.fixed(2), {"a": 2, "b": 2})
    world.startable = False
    world.fleet.drain("a", "spot notice")
    world.passes(8)
    assert [name for name, _ in world.left] == ["rollout-0", "rollout-1"]
    assert (world.names, world.asked()) == ([], 2)
    world.startable = True
    world.passes(8)
    assert len(world.names) == 2
    assert set(world.cluster.places.values()) == {"b"}


def test_who_loads_weights_leaves_a_drained_node_with_them() -> None:
    """Others may be getting the same pieces, which end with the first that goes."""
    world = World(WorkerCount.fixed(1), {"a": 1, "b": 1})
    world.loading = {"rollout-0"}
    world.fleet.drain("a", "spot notice")
    world.passes(1)
    assert world.left == []
    world.loading = set()
    world.passes(1)
    assert [name for name, _ in world.left] == ["rollout-0"]


def test_a_look_lists_the_workers_once() -> None:
    world = World(WorkerCount(min=1, max=9), {"a": 9})
    world.passes(16)
    assert len(world.names) == 9
    world.listed = 0
    world.passes(1)
    assert world.listed == 4


@pytest.mark.parametrize("count", [WorkerCount.fixed(2), ELASTIC], ids=str)
def test_every_run_takes_back_what_a_killed_one_has_asked_for_and_an_elastic_one_asks(count: WorkerCount) -> None:
    world = World(count, {"a": 9}, scaled=True)
    world.passes(8)
    assert world.demands[0] == []
    assert len(world.demands) == (1 if count is not ELASTIC else 2)
    world.fleet.drain("a", "spot notice")
    world.passes(8)
    assert not any("adds nodes to this cluster by itself" in message for _, message in world.events), "somebody does"


def test_further_workers_make_way_for_a_learner_that_has_no_room_one_by_one_and_come_back() -> None:
    world = World(WorkerCount(min=2, max=5), {"a": 2, "b": 2, "c": 1})
    world.passes(16)
    assert len(world.names) == 5
    world.cluster.large = {"b"}
    world.running = {"rollout-2": 3}
    world.fleet.hold_back(True)
    left = set(world.names)
    for _ in range(4):
        world.fleet.make_way()
        world.passes(1)
    gone = [name for name, reason in world.left if reason == "the learner needs its room"]
    assert gone == sorted(gone, key=lambda name: name in world.running), "first who has no requests"
    assert {world.names[0], *gone} <= left
    assert len(gone) == 2
    assert [world.cluster.places[name] for name in world.names].count("b") == 0
    world.fleet.hold_back(False)
    world.passes(8)
    assert len(world.names) == 5


def test_the_last_worker_makes_way_for_nobody() -> None:
    world = World(ELASTIC, {"a": 1, "b": 1})
    world.passes(8)
    world.cluster.large = {"a", "b"}
    world.fleet.drain("a", "spot notice")
    world.fleet.hold_back(True)
    for _ in range(4):
        world.fleet.make_way()
        world.passes(1)
    assert len(world.names) == 1
