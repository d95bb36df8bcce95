"""A learner that is lost anywhere, any number of times, ends where one ends that is not; with a group that only counts:
its weights are all that it was given, so whatever is left out, done twice or in another order shows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.learner_group import RanksAwaited
from actors.training.checkpoint import CheckpointError
from actors.training.errors import LearnerLostError, NonFiniteError
from launch.failover import LearnerNews, WeightsRenewed
from launch.failover.learner import ANSWER_S
from launch.interrupt import Interrupt, Interrupted
from models.durable import seal
from tests.launch.failover_world import CALLS, UNDISTURBED, Group, World, made, outcome, sequences


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.integers(1, 3 * CALLS), st.booleans(), max_size=6), st.sampled_from([0, 10**9]))
def test_whatever_is_lost_whenever_the_run_is_the_same(losses: dict[int, bool], in_memory_bytes: int) -> None:
    world = World(losses)
    found, events = outcome(world, in_memory_bytes=in_memory_bytes)
    assert found == UNDISTURBED
    hit = [number for number in losses if number < len(world.calls)]
    assert sum(event.startswith("learner_lost") for event in events) == len(hit)
    assert not any(event.startswith("learner_differs") for event in events)
    assert all(group.closed for group in world.groups)


def test_an_undisturbed_run_makes_one_group_and_no_call_more() -> None:
    world = World()
    outcome(world)
    assert len(world.groups) == 1
    assert len(world.calls) == CALLS


def test_updates_that_are_repeated_record_nothing(tmp_path: Path) -> None:
    """Its own loss excepted: what it may have recorded before, the buffer knows."""
    world, recorded = World(), dict[str, list[int]]()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        buffers: Any = SimpleNamespace(of=lambda node: recorded.setdefault(node, []))
        learner.record_into(buffers)
        for step in (1, 2):
            learner.train_step(sequences(step), step)
        world.losses, world.node = {len(world.calls): False}, "another"
        learner.train_step(sequences(3), 3)
    assert recorded == {"n": [1, 2], "another": [3]}, "the group's node may be one that has joined since"


def test_a_step_that_is_not_recorded_is_not_by_a_new_group_either(tmp_path: Path) -> None:
    world, recorded = World(), list[int]()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.record_into(cast(Any, SimpleNamespace(of=lambda node: recorded)))
        learner.train_step(sequences(1), 1)
        learner.records = False
        world.losses = {len(world.calls): False}
        learner.train_step(sequences(2), 2)
        learner.records = True
        learner.train_step(sequences(3), 3)
    assert recorded == [1, 3]


def test_workers_that_come_later_get_the_published_weights_from_the_new_group(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        manifest, _ = learner.publish(1)
        world.losses = {len(world.calls): False}
        learner.rest(optimizer=True)
        assert world.renewed() == [WeightsRenewed(manifest, cast(Any, world.groups[1]))]
        learner.renew()  # nobody is lost; the buffer is
        assert world.renewed()[1:] == [WeightsRenewed(manifest, cast(Any, world.groups[1]))]
        world.losses = {len(world.calls): False}
        learner.renew()
        assert world.renewed()[2:] == [WeightsRenewed(manifest, cast(Any, world.groups[2]))]
        learner.call(lambda group: learner.renew())  # a worker is heard of while the learner works
        assert len(world.renewed()) == 3
        learner.train_step(sequences(2), 2)
        world.losses = {len(world.calls): True}
        learner.publish(2)  # what was published before is nobody's any more
        assert len(world.renewed()) == 3


def test_a_rank_that_is_lost_while_a_late_worker_gets_its_weights_ends_no_run(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        learner.publish(1)
        world.losses = {len(world.calls) + 1: False}  # after the check, in the publication
        assert learner.renew()
        assert (len(world.groups), [event.ref for event in world.renewed()]) == (2, [world.groups[1]])


def test_a_new_group_leaves_the_devices_to_the_engines_as_the_lost_one_did(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        learner.publish(1)
        learner.rest(optimizer=True)
        world.losses = {len(world.calls): False}
        learner.renew()
        assert world.calls[-3:] == ["publish 1", "rest", "check"], "the learner is not heard of before it rests"


def test_restarts_end_and_the_error_says_which_key(tmp_path: Path) -> None:
    world, events = World(dict.fromkeys(range(2, 100), False)), list[str]()
    with made(world, tmp_path, events, max_restarts=3) as learner:
        learner.begin(None, 9)
        with pytest.raises(LearnerLostError, match="lost in start") as lost:
            learner.train_step(sequences(1), 1)
        assert "all 3 restarts" in (lost.value.remedy or "")
        assert "learner.max_restarts" in (lost.value.remedy or "")
        assert learner.lost
        assert len(world.groups) == 1
    assert sum(event.startswith("learner_lost") for event in events) == 3


def test_without_restarts_a_loss_ends_the_run_and_nothing_is_kept(tmp_path: Path) -> None:
    world, events = World(), list[str]()
    with made(world, tmp_path, events, max_restarts=0) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        assert learner.take()[0]["learner/kept_bytes"] == 0
        world.losses = {len(world.calls): False}
        with pytest.raises(LearnerLostError) as lost:
            learner.publish(1)
        assert (lost.value.remedy, learner.lost, events) == (None, True, [])


def test_what_a_rank_raises_itself_is_not_repeated(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        world.errors = {len(world.calls): NonFiniteError("loss nan")}
        with pytest.raises(NonFiniteError):
            learner.train_step(sequences(1), 1)
        assert len(world.groups) == 1
        assert not learner.rewind()  # there is no step that a checkpoint would be of
        learner.train_step(sequences(1), 1)
        world.errors = {len(world.calls): NonFiniteError("loss nan")}
        state = list(world.groups[0].state)
        with pytest.raises(NonFiniteError):
            learner.train_step(sequences(2), 2)
        world.groups[0].state.append("half a step")
        assert learner.rewind()
        assert (len(world.groups), world.groups[1].state) == (2, state)


def test_a_rewinding_that_fails_is_said_and_hides_nothing(tmp_path: Path) -> None:
    world, events = World(), list[str]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        world.errors = {len(world.calls): OSError("no disk")}
        assert not learner.rewind()
        assert learner.lost
    assert events == ["not_rewound: the last complete step is not saved: no disk"]


def test_too_little_memory_twice_in_one_call_is_not_tried_a_third_time(tmp_path: Path) -> None:
    world = World(kind="memory")
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        first = len(world.calls)
        world.losses = {first: False, first + 3: False}  # its repetition, after start and begin
        with pytest.raises(LearnerLostError) as lost:
            learner.train_step(sequences(1), 1)
        assert "learner.micro_batch_tokens" in (lost.value.remedy or "")


def test_a_group_that_finds_no_place_is_not_waited_for_again(tmp_path: Path) -> None:
    """Each wait is cluster.start_timeout_s long, with all rollout workers idle."""
    world, events = World(kind="silent", missing="GPU: 8 needed, 0 free of 0"), list[str]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        first = len(world.calls)
        world.losses = {first: False, first + 1: False}
        with pytest.raises(LearnerLostError, match="lost in start") as lost:
            learner.train_step(sequences(1), 1)
        assert "GPU: 8 needed" in (lost.value.remedy or "")


def test_a_group_that_is_made_again_waits_for_its_places_with_nobody_beside_it(tmp_path: Path) -> None:
    """Whoever else waits for the only room would be given it and, with the driver waiting here, never use it."""
    world, events, waiting_too = World(), list[str](), [True]

    def start() -> Any:
        if world.groups and waiting_too[0]:
            raise LearnerLostError(0, "n", "start", "somebody else has its place", "silent")
        return Group(world)

    held: list[bool] = []

    def hold_back(event: Any) -> None:
        if event in (LearnerNews.STARTS, LearnerNews.STARTED):
            held.append(event is LearnerNews.STARTS)
            waiting_too[0] = not held[-1]

    world.start, world.reacts = start, hold_back
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        world.losses = {len(world.calls): False, len(world.calls) + 1: False}  # the new group is lost as well
        learner.train_step(sequences(1), 1)
        world.loop.turn()
    assert held == [True, False] * 3, "at first, and twice again"
    assert events[-1].startswith("learner_restarted")


def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_place(tmp_path: Path) -> None:
    """It says what is missing, once, and gives a group that comes up at once the time to."""
    world, events, interrupt = World(missing="CPU"), list[str](), Interrupt()

    def start() -> Any:
        if world.groups:
            for second in range(30):
                world.loop.tell(RanksAwaited(float(second)))
                world.loop.turn()
                if second == 15:
                    interrupt.signal_name, interrupt.requested = "SIGINT", True
        return Group(world)

    world.start = start
    learner = made(world, tmp_path, events, interrupt=interrupt)
    learner.begin(None, 9)
    world.losses = {len(world.calls): False}
    with pytest.raises(Interrupted):
        learner.train_step(sequences(1), 1)
    assert learner.lost
    assert world.heard.count(LearnerNews.WAITS) == 10, "while room is missing, from the tenth second on"
    assert [event for event in events if event.startswith("learner_waits")] == ["learner_waits: for room: CPU"]


def test_a_group_starts_again_once_a_node_that_joined_just_now_has_said_what_it_runs(tmp_path: Path) -> None:
    """A group that starts before is kept off the only node with room for it, until the run gives up."""
    world = World()
    seen = [True, True, True]
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        world.losses = {len(world.calls): False}
        world.undecided = lambda: bool(seen) and seen.pop()
        learner.train_step(sequences(1), 1)
    assert not seen
    assert len(world.groups) == 2


def test_a_node_that_never_says_what_it_runs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    world, now_s = World(), [0.0]

    def undecided() -> bool:
        now_s[0] += 10.0
        return True

    with made(world, tmp_path, [], clock=lambda: now_s[0]) as learner:
        learner.begin(None, 9)
        world.losses, world.undecided = {len(world.calls): False}, undecided
        learner.train_step(sequences(1), 1)
    assert len(world.groups) == 2
    assert ANSWER_S <= now_s[0] < 2 * ANSWER_S


def test_steps_that_cannot_be_kept_make_the_next_loss_the_last_until_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, events = World(), list[str]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        with monkeypatch.context() as patch:
            patch.setattr("launch.failover.kept.write_arrays", _full)
            learner.train_step(sequences(1), 1)
        assert events == ["steps_not_kept: disk full; a learner lost before the next checkpoint cannot be recovered"]
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        learner.save(folder)
        learner.saved_as(folder)
        world.losses = {len(world.calls): False}
        learner.train_step(sequences(2), 2)  # it goes on from the checkpoint
        with monkeypatch.context() as patch:
            patch.setattr("launch.failover.kept.write_arrays", _full)
            learner.train_step(sequences(3), 3)
        world.losses = {len(world.calls): False}
        with pytest.raises(LearnerLostError) as lost:
            learner.publish(3)
        assert "disk full" in (lost.value.remedy or "")


def _full(*_: object) -> None:
    raise OSError("disk full")


def test_other_losses_than_before_are_said(tmp_path: Path) -> None:
    """On a GPU sums need not be repeatable."""
    world, events = World(), list[str]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        learner.publish(1)
        world.losses = {len(world.calls): False}
        world.groups[0].state = []
        begin, Group.begin = Group.begin, lambda self, *_: self.ask("begin", lambda: self.state.append("noise"))  # type: ignore[method-assign]
        try:
            learner.publish(1)
        finally:
            Group.begin = begin  # type: ignore[method-assign]
    assert any(event.startswith("learner_differs: losses of step 1") for event in events)
    assert [event.manifest.version for event in world.renewed()] == [1], (
        "workers that come later need a buffer all the same"
    )


def test_a_base_that_was_damaged_meanwhile_is_not_gone_on_from(tmp_path: Path) -> None:
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        folder = tmp_path / "step_000001/learner"
        folder.mkdir(parents=True)
        learner.save(folder)
        seal(folder.parent)
        learner.saved_as(folder)
        world.losses = {len(world.calls): False}
        learner.train_step(sequences(2), 2)  # undamaged, it is
        (folder / "state").write_text("another")
        world.losses = {len(world.calls): False}
        with pytest.raises(CheckpointError, match="learner/state of step_000001 is damaged"):
            learner.train_step(sequences(3), 3)
    assert all(group.closed for group in world.groups)
