"""The order of steps, evaluations and checkpoints, with everything that works replaced: no Ray, no network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.training.checkpoint import CheckpointError
from actors.training.errors import LearnerLostError
from launch.config import Config, load_config
from launch.errors import PacelineError
from launch.interrupt import Interrupt, Interrupted
from launch.run import checkpoints, train
from launch.run.checkpoints import DRAFTERS_DIR

Write = Callable[..., Path]
ORDER = ["begin", "publish", "eval 0", "step 1", "step 2", "eval 2", "save 2", "step 3", "eval 3", "save 3", "export"]


class Stand(SimpleNamespace):
    """In place of a job."""

    @property
    def unsaved(self) -> bool:
        return bool(self.steps_done > self.saved)


class Stage:
    """A job whose parts write down what they are asked for; `faults` are raised once, at the named call."""

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.log = config, list[str]()
        self.faults: dict[str, BaseException] = {}
        self.saved: dict[str, Any] = {"steps_done": 0, "evaluations": {}}
        self.notices = SimpleNamespace(endangered=False)
        self.noticed: set[str] = set()  # calls in the middle of which the learner's node gets a notice
        self.events: list[str] = []
        self.answers: list[bool] = []
        monkeypatch.setattr(train, "warm_start", lambda *args: Path())
        monkeypatch.setattr(train, "open_job", self.open_job)
        monkeypatch.setattr(train, "rl_step", self.step)
        monkeypatch.setattr(train, "note_end_tokens", lambda *_: None)
        monkeypatch.setattr(train, "note_evaluation", lambda *_: None)
        monkeypatch.setattr(train, "evaluate_job", self.evaluate)
        monkeypatch.setattr(checkpoints, "write", self.save)
        monkeypatch.setattr(train, "read_state", lambda path: self.saved)

    def run(self, *, resume: bool = False) -> list[str]:
        self.log.clear()
        train.run(
            self.config,
            SimpleNamespace(progress=lambda phase: None, event=lambda kind, message: self.events.append(kind)),
            Interrupt(),
            Path("r"),
            Path("c") if resume else None,
            None,
            SimpleNamespace(refused={}),
        )
        return self.log

    def fails(self, call: str, error: BaseException) -> list[str]:
        self.faults[call] = error
        with pytest.raises(type(error)):
            self.run()
        return self.log

    @contextmanager
    def open_job(self, *_: object) -> Iterator[SimpleNamespace]:
        self.job = job = Stand(
            config=self.config,
            steps_done=0,
            evaluations={},
            boundary=None,
            drafter=None,
            prompts=[],
            saved=0,
            saving=False,
            sampling=SimpleNamespace(stop_token_ids=()),
            observer=SimpleNamespace(event=lambda kind, message: self.events.append(kind)),
        )
        job.notices = self.notices
        job.state_dict = lambda: {"steps_done": job.steps_done, "evaluations": dict(job.evaluations)}
        job.load_state_dict = lambda state: job.__dict__.update(state)
        job.publish = lambda: self.note("publish")
        job.learner = SimpleNamespace(
            begin=lambda *_: self.note("begin"),
            load=lambda _: self.note("load"),
            export=lambda _: self.note("export"),
            lost=False,
            busy=False,
        )
        yield job

    def note(self, call: str) -> None:
        self.log.append(call)
        if (error := self.faults.pop(call, None)) is not None:
            self.job.learner.lost = isinstance(error, LearnerLostError)
            raise error

    def step(self, job: SimpleNamespace) -> None:
        self._notice(f"rollout {job.steps_done + 1}")
        job.boundary = None
        self._notice(f"learn {job.steps_done + 1}")
        self.note(f"step {job.steps_done + 1}")
        job.steps_done += 1
        job.boundary = job.state_dict()
        if (call := f"published {job.steps_done}") in self.faults:
            self.note(call)

    def _notice(self, call: str) -> None:
        if call in self.noticed:
            self.notices.endangered = True
            self.answers.append(checkpoints.save_first(cast(Any, self.job)))

    def evaluate(self, job: SimpleNamespace) -> None:
        key = str(job.steps_done)
        if key not in job.evaluations:
            self.note(f"eval {key}")
            job.evaluations[key] = {}

    def save(self, job: SimpleNamespace) -> int:
        self.note(f"save {job.boundary['steps_done']}")
        self.saved = {**job.boundary, "evaluations": dict(job.evaluations)}
        return int(job.steps_done)


@pytest.fixture
def stage(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> Stage:
    overrides = ["run.steps=3", "eval.every=2", "data.eval=e.jsonl", "checkpoint.every=2"]
    return Stage(load_config(write_config(), overrides).config, monkeypatch)


def test_order(stage: Stage) -> None:
    assert stage.run() == ORDER
    assert stage.run(resume=True) == ["begin", "load", "publish", "export"]  # of a complete run: nothing twice


@pytest.mark.parametrize("call", [entry for entry in ORDER if entry[:4] in ("step", "eval")])
def test_interrupted_anywhere_and_resumed_owes_nothing(
    stage: Stage, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations included: one that was interrupted is made up for."""
    if call.startswith("step"):
        stage.faults[call] = Interrupted("SIGINT")  # a step is interrupted before it changes anything
        original = stage.step

        def step(job: SimpleNamespace) -> None:
            boundary = job.boundary
            try:
                original(job)
            except Interrupted:
                job.boundary = boundary
                raise

        monkeypatch.setattr(train, "rl_step", step)
    log = [*stage.fails(call, Interrupted("SIGINT"))]
    assert log.pop(log.index(call)) == call  # it did not happen
    resumed = stage.run(resume=stage.saved["steps_done"] > 0)
    happened = [entry for entry in [*log, *resumed] if entry[:4] in ("step", "eval")]
    wanted = [entry for entry in ORDER if entry[:4] in ("step", "eval")]
    assert sorted(set(happened)) == sorted(wanted)
    assert [entry for entry in happened if entry.startswith("step")] == ["step 1", "step 2", "step 3"]


def test_a_complete_step_whose_weights_reach_nobody_is_saved(stage: Stage) -> None:
    assert stage.fails("published 1", PacelineError("none is left"))[-1] == "save 1"


def test_a_learner_in_between_or_lost_is_not_saved(stage: Stage) -> None:
    assert stage.fails("step 2", RuntimeError("in the middle of an update"))[-1] == "step 2"
    assert stage.fails("published 1", LearnerLostError(0, "n", "publish", "killed"))[-1] == "published 1"


def test_a_notice_for_the_learners_node_saves_the_step_before_and_every_one_from_then_on(stage: Stage) -> None:
    stage.noticed = {"rollout 2"}
    assert stage.run() == [
        *ORDER[:4],
        *("save 1", "step 2", "save 2", "eval 2", "save 2", "step 3", "save 3", "eval 3", "save 3", "export"),
    ]
    stage.notices.endangered, stage.noticed = False, {"learn 1"}  # nothing is there to save then
    assert stage.run()[3:-1] == [
        *("step 1", "save 1", "step 2", "save 2", "eval 2", "save 2", "step 3", "save 3", "eval 3", "save 3")
    ], "before an evaluation, which takes its time, and where one is due with its result"


def test_what_the_learner_does_meanwhile_is_not_disturbed_by_a_checkpoint(stage: Stage) -> None:
    stage.noticed = {"rollout 2"}
    step = stage.step

    def within_a_call(job: SimpleNamespace) -> None:
        job.learner.busy = job.steps_done == 1
        step(job)
        job.learner.busy = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "rl_step", within_a_call)
        assert "save 1" not in stage.run()
    assert stage.answers == [False], "it is to be asked again"


def test_a_checkpoint_that_only_a_notice_wants_may_fail(stage: Stage) -> None:
    stage.noticed = {"rollout 2"}
    stage.faults["save 1"] = CheckpointError("disk full")
    assert stage.run()[-2:] == ["save 3", "export"]
    assert stage.events == ["checkpoint_failed"]


def test_a_failed_checkpoint_is_not_tried_again(stage: Stage) -> None:
    assert stage.fails("save 2", CheckpointError("disk full"))[-1] == "save 2"


@pytest.mark.parametrize("failure", [None, "rollout-0: disk full"])
def test_a_checkpoint_needs_no_drafters(tmp_path: Path, failure: str | None) -> None:
    """Where their state cannot be written, nothing half-written stays, and an event says so."""
    events: list[tuple[str, str]] = []
    places: list[str] = []
    unheard: list[str] = []

    @contextmanager
    def excused() -> Iterator[None]:
        unheard.append("begins")
        yield
        unheard.append("ends")

    bases: list[Path] = []  # that a learner which is lost would go on from

    def write(directory: str) -> str | None:
        (Path(directory) / "half").mkdir(parents=True)
        return failure

    job: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(keep=1)),
        boundary={"steps_done": 4},
        evaluations={},
        speculation=object(),
        drafter=None,
        dispatcher=SimpleNamespace(drafters=SimpleNamespace(save=write, saved_as=places.append), unheard=excused),
        learner=SimpleNamespace(save=lambda directory: (directory / "tensors").touch(), saved_as=bases.append),
        observer=SimpleNamespace(
            event=lambda *event: events.append(event), progress=lambda *_: None, sync=lambda: unheard.append("synced")
        ),
        context=SimpleNamespace(run_dir=tmp_path, learner_span=lambda _: nullcontext()),
    )
    assert checkpoints.write(job) == 4
    assert unheard == ["begins", "synced", "ends"], "workers are not late because nobody listened"
    checkpoint = tmp_path / "checkpoints/step_000004"
    assert (checkpoint / "learner/tensors").is_file()
    assert bases == [checkpoint / "learner"]
    assert (checkpoint / DRAFTERS_DIR).is_dir() == (failure is None)
    assert places == ([str(checkpoint / DRAFTERS_DIR)] if failure is None else [])
    assert [kind for kind, _ in events] == (["drafters_not_saved"] if failure else []) + ["checkpoint"]
    assert failure is None or failure in events[0][1]
