"""A learner that is lost anywhere, any number of times, ends where one ends that is not; with a group that only counts:
its weights are all that it was given, so whatever is left out, done twice or in another order shows."""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.learner import Place
from actors.learner_group import RanksAwaited, StepUnderWay
from actors.loop import EventLoop, Look
from actors.training.checkpoint import CheckpointError
from actors.training.errors import LearnerLostError, LossKind, NonFiniteError
from contracts.training import StepResult, TrainSequence
from launch.failover import FailoverLearner, KeptSteps, LearnerStarted, LearnerStarts, LearnerWaits, WeightsRenewed
from launch.interrupt import Interrupt, Interrupted
from models.durable import seal
from models.manifest import WeightsManifest
from tests.context import run_context


@dataclass
class World:
    """All groups of one test, and when calls fail: by number, counted over all groups."""

    losses: dict[int, bool] = field(default_factory=dict)  # True: after the call has changed the group
    errors: dict[int, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    groups: "list[Group]" = field(default_factory=list)
    kind: LossKind = "ended"
    node: str = "n"  # of a group that starts
    ended = False  # of a step that is under way
    missing: str = ""  # of the reservation
    loop: EventLoop = field(default_factory=EventLoop)
    heard: list[Any] = field(default_factory=list)  # events of the learner
    reacts: Callable[[Any], object] = lambda event: None
    start: Callable[[], Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start = lambda: Group(self)

    def renewed(self) -> list[WeightsRenewed]:
        """What was said of weights in another buffer so far."""
        self.loop.turn()
        return [event for event in self.heard if isinstance(event, WeightsRenewed)]

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        number = len(self.calls)
        self.calls.append(name)
        if (error := self.errors.get(number)) is not None:
            raise error
        after = self.losses.get(number)
        result = do() if after is not False else None
        if after is not None:
            raise LearnerLostError(0, "n", name, "killed", self.kind)
        return result


class Group:
    """In place of LearnerGroup."""

    computes_with, quantise_s = "arithmetic", 0.0

    def __init__(self, world: World) -> None:
        self.world, self.state, self.closed = world, ["initial"], False
        self.places = [Place(world.node, "10.0.0.1", 1)]
        self.recorded: list[int] | None = None
        self.has_ended = False
        world.call("start", lambda: None)
        world.groups.append(self)

    def ask(self, name: str, do: Callable[[], Any] = lambda: None) -> Any:
        assert not self.closed, "a group that was lost is asked again"
        return self.world.call(name, do)

    def record_into(self, buffers: Any, **options: Any) -> None:
        def do() -> None:
            self.recorded = buffers[self.places[0].node_id]

        self.ask("record_into", do)

    def begin(self, optimizer: Any, total_steps: int) -> None:
        self.ask("begin", lambda: self.state.append(f"begin {total_steps}"))

    def load(self, directory: Path) -> None:
        def do() -> None:
            self.state = json.loads((directory / "state").read_text())

        self.ask("load", do)

    def save(self, directory: Path) -> None:
        def do() -> None:
            assert list(directory.iterdir()) == []
            (directory / "state").write_text(json.dumps(self.state))

        self.ask("save", do)

    def export(self, directory: Path) -> None:
        self.ask("export", lambda: directory.write_text(json.dumps(self.state)))

    def rest(self, *, optimizer: bool) -> None:
        self.ask("rest")

    def check(self) -> None:
        if self.has_ended:
            raise LearnerLostError(0, "n", "check", "killed")
        self.ask("check")

    def lost(self) -> bool:
        return self.has_ended

    def reference_kl(self, sequences: list[TrainSequence], step: int) -> list[int]:
        found: list[int] = self.ask(f"reference_kl {step}", lambda: [self._sum(), len(sequences)])
        return found

    def train_step(self, sequences: list[TrainSequence], step: int, *, asked: int | None) -> StepResult:
        def do() -> StepResult:
            tokens = [s.response_tokens.tolist() for s in sequences]
            self.state.append(f"{step} {asked} {tokens}")
            if self.recorded is not None:
                self.recorded.append(step)
            return StepResult(losses=(self._sum(),), grad_norms=(1.0,), metrics={}, tokens=1, seconds={})

        result: StepResult = self.ask(f"train_step {step}", do)
        return result

    def begin_step(self, sequences: list[TrainSequence], step: int, *, asked: int | None) -> StepUnderWay:
        return StepUnderWay(lambda: self.train_step(sequences, step, asked=asked), lambda: self.world.ended)

    def publish(self, version: int, *, masters: bool = False) -> tuple[WeightsManifest, Any]:
        found: tuple[WeightsManifest, Any] = self.ask(
            f"publish {version}", lambda: (WeightsManifest(version, self._sum(), (), 8), self)
        )
        return found

    def close(self, grace_s: float = 0.0) -> None:
        self.closed = True

    def _sum(self) -> int:
        return zlib.crc32(json.dumps(self.state).encode())


def sequences(step: int) -> list[TrainSequence]:
    tokens = np.array([step, step + 1], np.int32)
    return [
        TrainSequence(
            prompt_tokens=tokens,
            response_tokens=tokens,
            sampler_logprobs=np.zeros(2, np.float32),
            sampler_logprobs_t1=None,
            advantage=1.0,
        )
    ]


class Starter:
    """Of `world`'s groups."""

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self) -> Any:
        return self.world.start()

    def missing(self) -> str:
        return self.world.missing


def made(world: World, folder: Path, events: list[str], **options: Any) -> FailoverLearner:
    def react(event: Any) -> None:
        if isinstance(event, RanksAwaited):
            learner.awaited(event.waited_s)
        elif not isinstance(event, Look):
            world.heard.append(event)
            world.reacts(event)

    context = run_context(
        SimpleNamespace(learner=SimpleNamespace(max_restarts=options.pop("max_restarts", 100))),
        on_event=lambda kind, message: events.append(f"{kind}: {message}"),
        react=react,
        **{name: options.pop(name) for name in ("clock", "interrupt") if name in options},
    )
    world.loop = context.loop
    kept = KeptSteps(folder / "kept", in_memory_bytes=options.pop("in_memory_bytes", 0))
    learner = FailoverLearner(Starter(world), kept, context)
    assert not options
    learner.start()
    return learner


def run(learner: FailoverLearner, folder: Path, *, steps: int = 5, every: int = 2) -> Iterator[Any]:
    """As a run does: each yield is something that must not depend on losses."""
    learner.begin(None, 9)
    learner.record_into(lambda nodes: {node: [] for node in nodes})
    checksum = learner.publish(0)[0].checksum
    for step in range(1, steps + 1):
        learner.rest(optimizer=True)
        yield learner.reference_kl(sequences(step), step)
        yield learner.train_step(sequences(step), step, asked=step)
        checksum = learner.publish(step)[0].checksum
        yield checksum
        if step % every == 0:
            path = folder / f"{step}"
            path.mkdir()
            learner.save(path)
            learner.saved_as(path)
            yield (path / "state").read_text()
    learner.export(folder / "model")
    yield (folder / "model").read_text()


def outcome(world: World, **options: Any) -> tuple[list[Any], list[str]]:
    events: list[str] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        with made(world, folder, events, **options) as learner:
            found = list(run(learner, folder))
        assert not (folder / "kept").exists()
    return found, events


UNDISTURBED, _ = outcome(World())
CALLS = 1 + 3 + 5 * 4 + 2 + 1


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
        learner.record_into(lambda nodes: {node: recorded.setdefault(node, []) for node in nodes})
        for step in (1, 2):
            learner.train_step(sequences(step), step)
        world.losses, world.node = {len(world.calls): False}, "another"
        learner.train_step(sequences(3), 3)
    assert recorded == {"n": [1, 2], "another": [3]}, "the group's node may be one that has joined since"


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
        if isinstance(event, LearnerStarts | LearnerStarted):
            held.append(isinstance(event, LearnerStarts))
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
    assert sum(isinstance(event, LearnerWaits) for event in world.heard) == 10, (
        "while room is missing, from the tenth second on"
    )
    assert [event for event in events if event.startswith("learner_waits")] == ["learner_waits: for room: CPU"]


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
