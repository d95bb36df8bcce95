"""Whole runs whose learner is lost again and again end as one in which it is not: responses, rewards, losses, gradient
norms, evaluations, and the exported weights bit for bit. In one process, so that it can be lost at any call."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.learner import Place
from actors.training.checkpoint import checkpoints
from actors.training.errors import LearnerLostError, NonFiniteError
from contracts.training import StepResult
from launch import local
from launch.config import Config, load_config
from launch.context import RunContext
from launch.failover import FailoverLearner, KeptSteps
from launch.interrupt import Interrupt, Interrupted
from launch.local import RunRecord
from launch.run import train
from launch.run.deltas import DeltaChoice
from launch.run.job import Job
from launch.run.phases import SharedMemory
from launch.run.publish import Publisher
from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Everything that a restart could lose: the moments and the schedule, the reference, what is rounded.
SETTINGS = (
    *(SHARP, "run.steps=4", "rollout.quantization=w8a8", "objective.kl=k3", "objective.kl_coef=0.1", "eval.every=2"),
    *("objective.kl_in=reward", "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=2"),
)


VERSIONS = cast(Any, SimpleNamespace(refused={}))


class Group(local.LocalLearner):
    """As a group of one rank; whatever is asked of it may end it. Class attributes are of all groups of a run."""

    calls: list[str] = []  # noqa: RUF012
    fails: Callable[[int, str], Exception | None] = staticmethod(lambda number, name: None)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.places = [Place("n", "10.0.0.1", 1)]

    def ask(self, name: str, do: Callable[[], Any]) -> Any:
        """The work is done before it is lost: whoever took its result would notice."""
        result = do()
        Group.calls.append(name)
        if (error := Group.fails(len(Group.calls), name)) is not None:
            raise error
        return result

    def train_step(self, sequences: Any, step: int = 0, *, asked: int | None = None) -> StepResult:
        do = super().train_step
        return cast(StepResult, self.ask(f"train_step {step}", lambda: do(sequences, step, asked=asked)))

    def reference_kl(self, sequences: Any, step: int = 0) -> list[Any]:
        do = super().reference_kl
        return cast(list[Any], self.ask(f"reference_kl {step}", lambda: do(sequences, step)))

    def publish(self, version: int, *, masters: bool = False, delta_share: float = 0.0) -> Any:
        do = super().publish
        return self.ask(f"publish {version}", lambda: do(version, masters=masters))

    def export(self, directory: str | Path) -> None:
        do = super().export
        self.ask("export", lambda: do(directory))

    def save(self, directory: Path) -> None:
        self.ask("save", lambda: self._trainer.save(directory))

    def load(self, directory: Path) -> None:
        self.ask("load", lambda: self._trainer.load(directory))

    def close(self, grace_s: float = 0.0) -> None:
        pass


@contextmanager
def open_job(
    config: Config, observer: Any, interrupt: Interrupt, initial: Path, run_dir: Path, *_: object
) -> Iterator[Job]:
    with local.threads_of(config), local.open_job(config, observer, initial) as job:
        context = replace(job.context, interrupt=interrupt, run_dir=run_dir)
        starter = Starter(context)
        with FailoverLearner(starter, KeptSteps(run_dir / "kept"), context) as learner:
            learner.start()
            job.context = context
            job.learner, job.collector._context = learner, context
            job.memory = SharedMemory(learner, job.dispatcher, context)
            job.publisher = Publisher(learner, job.dispatcher, context, DeltaChoice("never", context.observer))
            yield job


@dataclass(frozen=True)
class Starter:
    context: RunContext

    def start(self) -> Any:
        return Group(self.context.config)

    def undecided(self) -> bool:
        return False

    def missing(self) -> str:
        return ""


class Outcome:
    def __init__(self, record: RunRecord, run_dir: Path) -> None:
        self.steps = [{k: v for k, v in step.metrics.items() if not is_own(k)} for step in record.steps]
        self.responses = {
            step: sorted((s.prompt, s.response, s.reward) for s in of) for step, of in record.responses.items()
        }
        self.evaluations = record.evaluations
        self.model = (run_dir / "model/model.safetensors").read_bytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and self.__dict__ == other.__dict__


def is_own(name: str) -> bool:
    return name.startswith(("learner/", "weights/quantise")) or name.endswith("per_s")


@pytest.fixture
def run(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunRecord]:
    monkeypatch.setattr(train, "open_job", open_job)
    monkeypatch.setattr(Group, "calls", [])

    def go(name: str, *extra: str, interrupt: Interrupt | None = None, resume: bool = False) -> RunRecord:
        Group.calls.clear()
        record = RunRecord(keep_responses=True)
        config = load_config(runs.config, runs.overrides(name, *SETTINGS, *extra)).config
        folder = tmp_path / name
        checkpoint = checkpoints(folder / "checkpoints")[-1] if resume else None
        asked = Interrupt() if interrupt is None else interrupt
        train.run(config, cast(Any, record), asked, folder, checkpoint, None, VERSIONS)
        return record

    return go


@pytest.mark.parametrize(
    ("adapters", "seeds"), [((), 1), (("learner.lora.rank=2",), 1), pytest.param((), 3, marks=pytest.mark.long)]
)
def test_a_run_that_loses_its_learner_at_any_calls_is_the_undisturbed_one(
    run: Callable[..., RunRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapters: tuple[str, ...],
    seeds: int,
) -> None:
    undisturbed = Outcome(run("whole", *adapters), tmp_path / "whole")
    kinds = {name.split()[0] for name in Group.calls}
    assert kinds == {"reference_kl", "train_step", "publish", "save", "export"}
    lost: set[str] = set()
    for seed in range(seeds):
        source = random.Random(seed)
        # One of each kind, at its 1st to 3rd call, and any calls on top: those of restarts too.
        left = {kind: source.randint(1, 3) for kind in kinds - {"export"}} | {"export": 1}
        more = {source.randint(1, 60) for _ in range(3)}
        with monkeypatch.context() as patch:
            patch.setattr(Group, "fails", staticmethod(partial(_fails, left, more, lost)))
            record = run(f"lost-{seed}", "learner.max_restarts=20", *adapters)
        events = [kind for kind, _ in record.events]
        assert events.count("learner_lost") >= len(kinds)
        assert "learner_differs" not in events
        assert Outcome(record, tmp_path / f"lost-{seed}") == undisturbed
        assert not (tmp_path / f"lost-{seed}/kept").exists()
    assert lost >= kinds


def _fails(left: dict[str, int], more: set[int], lost: set[str], number: int, name: str) -> Exception | None:
    kind = name.split()[0]
    left[kind] = left.get(kind, 0) - 1
    if left[kind] != 0 and number not in more:
        return None
    lost.add(kind)
    return LearnerLostError(0, "n", name, "killed")


def test_an_error_of_its_own_in_an_update_leaves_a_checkpoint_of_the_step_before(
    run: Callable[..., RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a resumed run goes on from, as if nothing had happened, whatever it loses itself."""
    undisturbed = Outcome(run("whole"), tmp_path / "whole")
    with monkeypatch.context() as patch:
        nan = NonFiniteError("loss nan")
        patch.setattr(Group, "fails", staticmethod(lambda _, name: nan if name == "train_step 4" else None))
        with pytest.raises(NonFiniteError):
            run("broken")
    assert [path.name for path in checkpoints(tmp_path / "broken/checkpoints")][-1] == "step_000003"
    with monkeypatch.context() as patch:
        left = {"load": 1, "train_step": 1, "publish": 3}  # the third repeats the one of step 3
        patch.setattr(Group, "fails", staticmethod(partial(_fails, left, set(), set())))
        resumed = run("broken", resume=True)
    assert [kind for kind, _ in resumed.events].count("learner_lost") == 3
    assert [step.metrics["loss/mean"] for step in resumed.steps] == [undisturbed.steps[3]["loss/mean"]]
    assert (tmp_path / "broken/model/model.safetensors").read_bytes() == undisturbed.model


def test_ctrl_c_in_a_step_whose_learner_is_lost_saves_that_step(
    run: Callable[..., RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt()

    def fails(number: int, name: str) -> Exception | None:
        if name != "train_step 3" or interrupt.requested:
            return None
        interrupt.signal_name, interrupt.requested = "SIGINT", True
        return LearnerLostError(0, "n", name, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(Group, "fails", staticmethod(fails))
        with pytest.raises(Interrupted):
            run("stopped", interrupt=interrupt)
    assert Group.calls.count("train_step 3") == 2
    assert checkpoints(tmp_path / "stopped/checkpoints")[-1].name == "step_000003"
