"""A learner whose groups are lost when a test says so, and what a run with it comes to."""

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.learner import Place
from actors.learner_group import RanksAwaited
from actors.loop import EventLoop, Look
from actors.training.errors import LearnerLostError, LossKind
from contracts.training import StepResult, TrainSequence
from launch.failover import FailoverLearner, KeptSteps, WeightsRenewed
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
    undecided: Callable[[], bool] = lambda: False  # nodes have yet to say what they run
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
    records = True

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
            if self.recorded is not None and self.records:
                self.recorded.append(step)
            return StepResult(losses=(self._sum(),), grad_norms=(1.0,), metrics={}, tokens=1, seconds={})

        result: StepResult = self.ask(f"train_step {step}", do)
        return result

    def begin_step(self, sequences: list[TrainSequence], step: int, *, asked: int | None) -> None:
        self.begun = partial(self.train_step, sequences, step, asked=asked)

    def step_result(self) -> StepResult:
        return self.begun()

    @property
    def step_ended(self) -> bool:
        return self.world.ended

    def publish(self, version: int, *, masters: bool = False, delta_share: float = 0.0) -> tuple[WeightsManifest, Any]:
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

    def undecided(self) -> bool:
        return self.world.undecided()


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
    buffers: Any = SimpleNamespace(of=lambda node: [])
    learner.record_into(buffers)
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
