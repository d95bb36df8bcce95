"""The driver's side: when the drafter is trained, and which weights engines draft with, over swaps, a collapse, a
roll-back and a restart. The actors are Ray's in the last test only; elsewhere they are not needed to decide.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.engine.options import EngineOptions
from actors.engine.types import DrafterFailed, DrafterLoaded, EngineWindow, StrategyUse
from actors.spot.types import Checkpointed, MicroStep, TrainFailed, TrainStopped
from actors.spot_host import RecordingReport
from drafter.training.buffer import DataBuffer
from launch.config.tree import Config
from launch.dispatch import NoWorkersError, Weights
from launch.drafter.actors import DrafterActors
from launch.drafter.training import DrafterTraining, Moment, drafter_training
from launch.observe import Observer, Span
from launch.observe.journal import read
from launch.run.rl_step import spare_time
from models.checksum import checksum
from models.manifest import WeightsManifest
from models.options import ModelOptions
from policies.drafter.lineage import micro_steps, returning
from policies.drafter.options import BufferOptions
from tests.report.synthetic import config
from tests.spot.support import record

BUFFERS = {"n0": "buffer of n0", "n1": "buffer of n1"}


class Dispatcher:
    """Notes what engines are told to draft with."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.stopped_within_s: list[float] = []
        self.payloads: list[NDArray[np.uint8]] = []

    late: tuple[str, ...] = ()

    @property
    def drafters(self) -> "Dispatcher":
        return self

    def stop_training(self, timeout_s: float) -> list[str]:
        self.stopped_within_s.append(timeout_s)
        return list(self.late)

    @property
    def last(self) -> str:
        """The weights that were handed out last."""
        return self.payloads[-1].tobytes().decode()

    def update(self, name: str, weights: Weights) -> None:
        assert name == "eagle"
        self.versions.append(weights.manifest.version)
        self.payloads.append(weights.ref)


class Driver:
    """Notes what the coordinator is told: (step, whether to train) at the start, and the step at the end."""

    def __init__(self) -> None:
        self.said: list[tuple[int, bool] | int] = []

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        self.said.append((step, train))

    def rollout_complete(self, step: int) -> None:
        self.said.append(step)


Make = Callable[..., DrafterTraining]


def settings_of(run_dir: Path, drafter: dict[str, Any], **sections: Any) -> Config:
    values = config(run_dir, steps=9).model_dump() | sections
    return Config.model_validate(values | {"drafter": {"train": True, **drafter}})


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def make(tmp_path: Path, driver: Driver) -> Iterator[Make]:
    """Makes what is tested: keyword `drafter` is that section of the configuration, others are other sections."""
    buffer = DataBuffer(BufferOptions(), 0)
    buffer.add([record(0), record(1)])
    watch = SimpleNamespace(look=lambda: {"n0": buffer.stats})
    with ExitStack() as stack:

        def make_one(drafter: dict[str, Any] | None = None, **sections: Any) -> DrafterTraining:
            settings = settings_of(tmp_path / "run", drafter or {}, **sections)
            observer = stack.enter_context(Observer(tmp_path / "run", settings))
            actors = DrafterActors("coordinator", ("rollout-0", "rollout-1"), "tcp://127.0.0.1:1", BUFFERS)
            model = ModelOptions(path="model")
            made = DrafterTraining(settings, observer, tmp_path / "run", model, actors, driver, watch)
            for worker in actors.workers:
                made.plan(worker, EngineOptions())
            return made

        yield make_one


@pytest.fixture
def training(make: Make) -> DrafterTraining:
    return make()


def ready(version: int) -> Weights:
    """Without Ray a reference is the bytes."""
    payload: Any = payload_of(version)
    return Weights(WeightsManifest(version, checksum(payload), (), payload.size), payload)


@pytest.fixture(autouse=True)
def no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("ray"):
        monkeypatch.setattr("launch.drafter.weights.ray.get", lambda ref, timeout: ref)
        monkeypatch.setattr("launch.drafter.weights.ray.put", lambda payload: payload)


def payload_of(version: int) -> NDArray[np.uint8]:
    return np.frombuffer(f"weights {version}".encode(), np.uint8)


def drafted(rate: float, tokens: int = 1000) -> EngineWindow:
    use = StrategyUse(
        strategy="eagle:4",
        engine_steps=1,
        request_steps=10,
        drafted=tokens,
        accepted=round(tokens * rate),
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )
    other = StrategyUse(
        strategy="suffix:4",
        engine_steps=1,
        request_steps=10,
        drafted=tokens,
        accepted=0,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )  # another drafter's, never counted
    return EngineWindow(
        start_s=0.0,
        end_s=1.0,
        engine_steps=1,
        prefill_tokens=0,
        decode_tokens=0,
        running=0,
        waiting=0,
        kv_tokens_used=0,
        preempted=0,
        strategies=(use, other),
    )


def micro_step(number: int = 1) -> MicroStep:
    return MicroStep(
        step=number,
        session=1,
        epoch=1,
        members=1,
        loss=2.0,
        accuracy=0.1,
        top3_accuracy=0.2,
        tokens=100,
        target_version=0,
        started_s=5.0,
        seconds=0.5,
    )


def kinds(tmp_path: Path) -> list[str]:
    return [event["kind"] for event in read(tmp_path / "run/events.jsonl")]


def test_a_collapse_brings_the_last_good_weights_back(
    training: DrafterTraining, driver: Driver, tmp_path: Path
) -> None:
    engines: Any = Dispatcher()
    training.published("rollout-0", ready(0))  # what the trainer starts with is what engines hold
    training.hand_out(engines, 0)
    assert engines.versions == []
    for version, target in ((10, 1), (20, 2)):
        training.published("rollout-0", ready(version))
        training.hand_out(engines, target)
        training.window(drafted(0.6))
    assert (engines.versions, engines.last) == ([10, 20], "weights 20")

    training.published("rollout-1", ready(30))
    training.published("rollout-0", ready(29))  # older than what waits
    training.hand_out(engines, 3)
    training.begin(3, engines)
    training.published("rollout-0", ready(35))  # made of the bad weights, before anybody knew
    training.window(drafted(0.1))
    assert driver.said[-1] == 3, "who trains now trains on from the bad weights"
    assert "drafter_rolled_back" in kinds(tmp_path)
    for _ in range(5):
        training.window(drafted(0.1))  # version 30 drafts until the next hand-out, and is no measure of version 20
    training.published("rollout-0", ready(41))  # made of the bad weights, and late
    training.hand_out(engines, 4)
    assert (engines.versions, engines.last) == ([10, 20, 30, returning(20, 35)], "weights 20")
    training.window(drafted(0.2))  # a third of what version 20 had: the target has changed, nothing to go back to
    assert kinds(tmp_path).count("drafter_rolled_back") == 1
    assert "drafter_collapsed" in kinds(tmp_path)

    training.published("rollout-0", ready(returning(20, 35) + 11))
    training.hand_out(engines, 5)
    assert micro_steps(engines.versions[-1]) == 31
    record = training.take(5, None)
    assert (list(record.published), list(record.rolled_back), record.levels["version"]) == (
        [10, 20, 30, 35, 31],
        [30],
        31,
    )


def test_a_collapse_makes_training_due(make: Make, driver: Driver) -> None:
    training, engines = make({"every_steps": 10}), Dispatcher()
    for step, rate in enumerate((0.6, 0.6, 0.05, 0.05, 0.05), 1):
        training.hand_out(engines, step)
        training.begin(step, engines)
        if driver.said[-1] == (step, True):
            training.event("rollout-0", micro_step(step))
        training.window(drafted(rate))
        training.take(step, None)
    assert driver.said == [(1, True), (2, False), (3, False), (4, True), (5, False)]


def test_a_drafter_that_no_engine_has_is_not_trained(make: Make, driver: Driver, tmp_path: Path) -> None:
    """Until one has it again, as an engine that was restarted has."""
    training = make()
    for step in range(1, 5):
        if step == 2:
            training.event("rollout-0", DrafterFailed("eagle", "RuntimeError: no", final=True))
            training.event("rollout-1", DrafterFailed("eagle", "RuntimeError: no", final=False))
            training.event("rollout-1", DrafterFailed("suffix", "RuntimeError: no", final=True))
        if step == 3:
            training.event("rollout-1", DrafterFailed("eagle", "RuntimeError: no", final=True))
            training.event("rollout-1", DrafterLoaded("eagle", 5, 0, 0.1, "there is no drafter"))
        if step == 4:
            training.event("rollout-0", DrafterLoaded("eagle", 5, 0, 0.1))
        training.begin(step, Dispatcher())
    assert [said for said in driver.said if isinstance(said, tuple)] == [(1, True), (2, True), (3, False), (4, True)]
    assert kinds(tmp_path).count("drafter_given_up") == 1


def test_the_reason_of_a_lost_trainer_is_shown_and_its_absence_is_waited_for_by_nobody(
    training: DrafterTraining, tmp_path: Path
) -> None:
    training.begin(1, Dispatcher())
    training.event("rollout-1", micro_step())
    training.event("rollout-1", TrainFailed("process 7 ended with signal SIGKILL"))
    training.reached("sampled", 1)
    record = training.take(1, None)
    assert (len(record.updates), record.counts["failures"]) == (1, 1)
    lost = [e["message"] for e in read(tmp_path / "run/events.jsonl") if e["kind"] == "trainer_lost"]
    assert lost == ["rollout-1: process 7 ended with signal SIGKILL"]


def test_a_roll_back_finds_the_last_good_weights_however_long_ago_they_passed(training: DrafterTraining) -> None:
    engines: Any = Dispatcher()
    training.published("rollout-0", ready(10))
    training.hand_out(engines, 1)
    training.window(drafted(0.6))
    for version, target in ((20, 2), (30, 3), (40, 4)):  # each is on trial when the next one comes
        training.published("rollout-0", ready(version))
        training.hand_out(engines, target)
        training.window(drafted(0.1, tokens=10))
    training.window(drafted(0.1))
    training.hand_out(engines, 5)
    assert (engines.versions, engines.last) == ([10, 20, 30, 40, returning(10, 40)], "weights 10")


def test_engines_that_draft_with_the_wanted_weights_are_told_nothing(training: DrafterTraining) -> None:
    engines: Any = Dispatcher()
    training.hand_out(engines, 0)
    training.published("rollout-0", ready(0))
    training.hand_out(engines, 1)
    training.published("rollout-0", ready(5))
    training.hand_out(engines, 2)
    training.published("rollout-1", ready(5))  # a member of the same session, or a trainer that has started again
    training.published("rollout-1", ready(4))
    training.hand_out(engines, 3)
    assert engines.versions == [5]


def test_what_comes_too_late_is_handed_out_before_anyone_trains_again(
    training: DrafterTraining, driver: Driver
) -> None:
    """Else two workers in turn would train from the same old weights, and one's work would be lost."""
    engines: Any = Dispatcher()
    training.hand_out(engines, 1)
    training.published("rollout-0", ready(5))
    assert engines.versions == []
    said: list[int] = []
    driver.rollout_started = lambda step, *, train=True: said.extend(engines.versions)  # type: ignore[method-assign]
    training.begin(2, engines)
    assert said == [5]


@pytest.mark.parametrize(
    ("options", "trained", "rates", "due"),
    [
        ({}, {1, 2, 3}, [0.6] * 4, [True] * 4),  # always
        ({"every_steps": 3}, {1, 4}, [0.6] * 4, [True, False, False, True]),
        ({"every_steps": 3}, {2}, [0.6] * 4, [True, True, False, False]),  # it could not be trained at first
        ({"drift": 0.5}, {1}, [0.6, 0.6, 0.2, 0.2], [True, False, False, True]),  # measured after the training
    ],
)
def test_when_the_drafter_is_trained(
    make: Make, driver: Driver, options: dict[str, Any], trained: set[int], rates: list[float], due: list[bool]
) -> None:
    training = make(options)
    for step, rate in enumerate(rates, 1):
        training.begin(step, Dispatcher())
        training.window(drafted(rate))
        if step in trained:
            training.event("rollout-0", micro_step(step))
        training.reached("sampled", step)
        training.take(step, None)
    assert [said for said in driver.said if isinstance(said, tuple)] == list(enumerate(due, 1))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("layout", ["embedded", "colocated"])
def test_spare_time_begins_with_decoding_and_ends_with_the_rollout(
    make: Make, driver: Driver, layout: str, fails: bool
) -> None:
    job: Any = SimpleNamespace(drafter=make(cluster={"layout": layout}), dispatcher=Dispatcher(), steps_done=3)
    with contextlib.suppress(NoWorkersError), spare_time(job) as (decoding, sampled):
        assert driver.said == []
        decoding()
        assert driver.said == [(4, True)]
        sampled()
        assert driver.said[1:] == ([4] if layout == "embedded" else [])
        if fails:
            raise NoWorkersError("none is left")
    assert driver.said == [(4, True), 4]
    with spare_time(SimpleNamespace(drafter=None, steps_done=3)) as calls:
        for call in calls:
            call()


@pytest.mark.parametrize(
    ("layout", "ended_by"), [("embedded", "sampled"), ("colocated", "graded"), ("disaggregated", "publishing")]
)
def test_training_ends_when_its_machine_is_needed(make: Make, driver: Driver, layout: str, ended_by: Moment) -> None:
    training = make(cluster={"layout": layout})
    training.begin(7, Dispatcher())
    moments: tuple[Moment, ...] = ("sampled", "graded", "publishing")
    for moment in moments:
        before = len(driver.said)
        training.reached(moment, 7)
        assert driver.said[before:] == ([7] if moment == ended_by else [])


@pytest.mark.parametrize("layout", ["embedded", "colocated", "disaggregated"])
def test_the_learner_waits_for_trainers_on_its_gpus_and_names_who_is_late(make: Make, layout: str) -> None:
    training, engines = make({"stop_timeout_s": 3.0}, cluster={"layout": layout}), Dispatcher()
    engines.late = ("rollout-1",)
    training.make_room(engines)
    assert engines.stopped_within_s == ([8.0] if layout == "colocated" else [])


def test_a_resumed_run_knows_when_it_trained_and_how_well_was_drafted(
    make: Make, driver: Driver, tmp_path: Path
) -> None:
    training, engines = make({"every_steps": 3}), Dispatcher()
    training.published("rollout-0", ready(20))
    training.hand_out(engines, 1)
    training.window(drafted(0.6))
    training.event("rollout-0", micro_step())
    training.take(1, None)
    training.hand_out(engines, 2)
    state = json.loads(json.dumps(training.state_dict()))

    training.save(tmp_path / "weights")

    resumed, engines = make({"every_steps": 3}), Dispatcher()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for step in (2, 3, 4):
        resumed.begin(step, engines)
    assert driver.said == [(2, False), (3, False), (4, True)]
    resumed.load(tmp_path / "weights")
    resumed.hand_out(engines, 2)
    assert engines.versions == [20], "engines draft with what they drafted with, before any trainer is up"
    resumed.published("rollout-0", ready(20))  # from the trainer's checkpoint
    resumed.published("rollout-1", ready(23))  # from a newer one
    resumed.hand_out(engines, 4)
    resumed.window(drafted(0.1))  # against 0.6, of before the restart
    resumed.hand_out(engines, 5)
    assert engines.versions == [20, 23, returning(20, 23)]
    assert engines.payloads[2].tobytes() == engines.payloads[0].tobytes() == payload_of(20).tobytes()
    assert "drafter_rolled_back" in kinds(tmp_path)


def test_a_resumed_run_whose_drafter_weights_are_lost_trusts_what_a_trainer_brings(make: Make, tmp_path: Path) -> None:
    """Its checkpoint is newer or older than the run's; there is nothing to go back to, and nobody says there is."""
    for brought in (8, 30):
        training, engines = make(), Dispatcher()
        for version in (10, 20):
            training.published("rollout-0", ready(version))
            training.hand_out(engines, 1)
            training.window(drafted(0.6))
        resumed, engines = make(), Dispatcher()
        resumed.load_state_dict(json.loads(json.dumps(training.state_dict())))
        resumed.load(tmp_path / "nothing")
        resumed.published("rollout-0", ready(brought))
        resumed.hand_out(engines, 2)
        resumed.window(drafted(0.05))
        resumed.published("rollout-0", ready(brought + 1))
        resumed.hand_out(engines, 3)
        assert engines.versions == [brought, brought + 1]
        resumed.window(drafted(0.5))
        resumed.published("rollout-0", ready(brought + 2))
        resumed.hand_out(engines, 4)
        resumed.window(drafted(0.05))
        resumed.hand_out(engines, 5)
        assert engines.versions[3:] == [returning(brought + 1, brought + 2)], "and is judged from then on"


def test_what_happened_is_recorded_once(training: DrafterTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[Span] = []
    monkeypatch.setattr(Observer, "span", lambda self, span: spans.append(span))
    training.event("rollout-0", RecordingReport(3, 1000, 0.1, 0))
    training.event("rollout-1", RecordingReport(1, 24, 0.1, 2))
    training.event("rollout-1", micro_step(4))
    training.event("rollout-1", Checkpointed(4, "d", 0.001, 0.2))
    training.event("rollout-1", TrainStopped(1, 4, 0.25))
    training.learned(SimpleNamespace(metrics={"recording/bytes": 76.0}))
    metrics = training.take(1, None).metrics()
    expected = {"micro_steps": 1, "recorded_bytes": 1100, "preempted": 1, "stop_s": 0.25, "failures": 0, "published": 0}
    assert {name: metrics[f"drafter/{name}"] for name in expected} == expected
    assert (metrics["drafter/buffer_sequences"], metrics["drafter/buffer_bytes"]) == (2, 2 * record(0).bytes)
    again = training.take(2, None).metrics()
    assert again["drafter/micro_steps"] == again["drafter/recorded_bytes"] == 0
    assert spans == [Span("rollout-1", "train_drafter", 5.0, 5.5, 1)]


def test_a_workers_plan_names_what_its_trainer_begins_with(make: Make, tmp_path: Path) -> None:
    speculation = {"speculation": {"eagle": {"path": "drafts"}}}
    for training, init in ((make({"seed": 3}), 3), (make({"seed": 3}, rollout=speculation), "drafts")):
        plan = training.plan("rollout-1", EngineOptions(threads=2))
        assert (plan.buffers, plan.endpoint, plan.stop_timeout_s) == (BUFFERS, "tcp://127.0.0.1:1", 2.0)
        asked = plan.factory.keywords  # type: ignore[attr-defined]
        assert (asked["init"], asked["threads"], asked["name"]) == (init, 2, "rollout-1-trainer")
        assert asked["checkpoint_dir"] == str(tmp_path / "run/drafter")


@pytest.mark.parametrize("source", ["engine", "learner"])
def test_the_learner_records__only_where_it_is_asked_to(make: Make, source: str) -> None:
    asked: list[Any] = []
    learner: Any = SimpleNamespace(record_into=lambda *args, **kwargs: asked.append((args, kwargs)))
    recording = {"source": source, "max_bytes_per_step": 1 << 20}
    make({"algorithm": "eagle3", "layers": (0, 1, 2), "seed": 5, "recording": recording}).record_from(learner)
    options = {"max_bytes": 1 << 20, "eagle3": True, "layers": (0, 1, 2), "seed": 5}
    assert asked == ([((BUFFERS,), options)] if source == "learner" else [])


@pytest.mark.ray
def test_its_actors_live_as_long_as_the_job(tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayError

    settings, run_dir = settings_of(tmp_path / "run", {}), tmp_path / "run"
    model = ModelOptions(path="model")
    with (
        Observer(run_dir, settings) as observer,
        drafter_training(settings, observer, run_dir, model) as training,
    ):
        assert training is not None
        plan = training.plan("rollout-0", EngineOptions())
        assert set(plan.buffers) == {node["NodeID"] for node in ray.nodes()}
        assert training.take(1, None).metrics()["drafter/buffer_sequences"] == 0
    assert kinds(tmp_path) == ["started", "coordinator"]  # its end is no loss
    for buffer in plan.buffers.values():
        with pytest.raises(RayError):  # killed, it may still answer once or twice
            ray.get([buffer.stats.remote() for _ in range(1000)], timeout=30.0)
    off = settings.model_copy(update={"drafter": settings.drafter.model_copy(update={"train": False})})
    with Observer(run_dir, off) as observer, drafter_training(off, observer, run_dir, model) as training:
        assert training is None
