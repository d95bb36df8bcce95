"""When the drafter is trained and until when, with which plan, and what is recorded of it."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.spot_host import RecordingReport
from config.model import ModelOptions
from config.rollout import EngineOptions
from contracts.rewards import Grade
from contracts.rollout import DraftCounts, DrafterFailed, SamplingParams
from contracts.spot import Checkpointed, TrainStopped
from launch.batch import Batch, Pick
from launch.drafter.actors import reachable_options
from launch.drafter.training import DrafterTraining, Moment, drafter_training
from launch.errors import PacelineError
from launch.observe import Observer, Span, StepSpeculation
from launch.observe.journal import read
from launch.run.collect import Collector
from policies.drafter.payoff import BEGINS_S, BLOCK
from tests.context import run_context
from tests.launch.drafter.conftest import (
    BUFFERS,
    Dispatcher,
    Driver,
    Make,
    drafted,
    kinds,
    micro_step,
    settings_of,
)
from tests.launch.graded import prompt_of, stats_of
from tests.launch.test_bad_records import rollout
from tests.spot.support import record


def test_a_collapse_makes_training_due(make: Make, driver: Driver) -> None:
    training, engines = make({"every_steps": 10}), Dispatcher()
    for step, rate in enumerate((0.6, 0.6, 0.05, 0.05, 0.05), 1):
        training.hand_out(engines, step)
        training.begin(step, engines)
        if driver.said[-1] == (step, True):
            training.event("rollout-0", micro_step(step))
        training.window(drafted(rate))
        training.take(step, 1_000.0, None)
    assert driver.said == [(1, True), (2, False), (3, False), (4, True), (5, False)]


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
        training.take(step, 1_000.0, None)
    assert [said for said in driver.said if isinstance(said, tuple)] == list(enumerate(due, 1))


@pytest.mark.parametrize("options", [{}, {"while_it_pays": False}, {"every_steps": 2}])
def test_training_that_wins_nothing_stops_by_the_run_s_own_records(
    make: Make, driver: Driver, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Acceptance does not move, recording takes a tenth of a second in each RL step. What the user wants is done."""
    training = make(options)
    for step in range(1, 2 * BLOCK + 3):
        training.begin(step, Dispatcher())
        if driver.said[-1] == (step, True):
            training.event("rollout-0", micro_step(step))
        training.event("rollout-0", RecordingReport(3, 1000, 0.1, 0))
        used = DraftCounts(request_steps=10_000, drafted=40_000, accepted=20_000, seconds=1.0)
        metrics = training.take(step, 1_000.0, StepSpeculation(strategies={"eagle:4": used}, traces={})).metrics()
    trained = [train for said in driver.said if isinstance(said, tuple) for train in said[1:]]
    if options:
        assert training.records
        assert trained == ([True] * len(trained) if "while_it_pays" in options else [True, False] * (len(trained) // 2))
        assert "drafter/worth_s" not in metrics
        return
    assert trained == [True] * (2 * BLOCK) + [False] * 2
    assert not training.records
    assert (metrics["drafter/worth_s"], metrics["drafter/cost_s"]) == (0.0, pytest.approx(0.1))
    assert kinds(tmp_path).count("drafter_training") == 1
    again = make()
    again.load_state_dict(json.loads(json.dumps(training.state_dict())))
    assert not again.records
    training._retrain("it collapsed")
    assert training.due(2 * BLOCK + 3)


@pytest.mark.parametrize("yields", [False, True])
def test_trainers_start_in_the_first_spare_time_that_has_room_for_one(
    make: Make, driver: Driver, tmp_path: Path, yields: bool
) -> None:
    """Workers that look ahead in it train in the next one."""
    training, engines = make(begun=False), Dispatcher()
    training.start_trainers(engines)
    training.idle([60.0], engines)  # no rollout yet
    training.begin(1, engines)
    training.yields = yields
    training.idle([], engines)
    training.idle([0.0, BEGINS_S - 0.1], engines)
    assert (driver.said, engines.trainers, training.may_begin) == ([(1, False)], 0, True)
    for more_s in (0.0, 0.25):
        training.idle([0.0, BEGINS_S + more_s], engines)
    assert (engines.trainers, training.may_begin) == (1, False)
    training.reached("sampled", 1)
    training.idle([60.0], engines)
    assert driver.said == ([(1, False), 1] if yields else [(1, False), (1, True), 1])
    assert (engines.trainers, training.records) == (1, True)
    assert kinds(tmp_path).count("drafter_training") == 1

    resumed, others = make(begun=False), Dispatcher()
    resumed.load_state_dict(json.loads(json.dumps(training.state_dict())))
    resumed.start_trainers(others)
    assert others.trainers == 1


def test_a_later_step_that_was_not_recorded_is_trained_on_from_the_next_one(make: Make, driver: Driver) -> None:
    """The buffer has nothing but states of old weights."""
    training, engines = make(begun=False), Dispatcher()
    for step in (1, 2):
        training.begin(step, engines)
        training.idle([BEGINS_S if step == 2 else 1.0], engines)
        training.reached("sampled", step)
        training.take(step, 1_000.0, None)
        assert training.records == (step == 2)
    assert driver.said == [(1, False), 1, (2, False), 2]
    assert engines.trainers == 1
    training.begin(3, engines)
    assert driver.said[-1] == (3, True)


def test_it_begins_only_where_a_session_could(make: Make, driver: Driver) -> None:
    training, engines = make(begun=False, coordinator={"threshold": 2}), Dispatcher()
    training.begin(1, engines)
    training.idle([60.0], engines)
    training.idle([60.0, 1.0], engines)
    assert engines.trainers == 0
    training.idle([60.0, BEGINS_S], engines)
    assert engines.trainers == 1
    unused = make(begun=False)
    unused.begin(1, engines)
    for worker in ("rollout-0", "rollout-1"):
        unused.event(worker, DrafterFailed("eagle", "it raises", final=True))
    unused.idle([60.0], engines)
    assert engines.trainers == 1


def test_a_collapse_promises_no_training_where_there_is_none(make: Make, tmp_path: Path) -> None:
    for begun in (False, True):
        make(begun=begun)._retrain("it collapsed")
    said = [row["message"] for row in read(tmp_path / "run/events.jsonl") if row["kind"] == "drafter_collapsed"]
    assert said == [
        "it collapsed: no worker is idle for long enough to train it",
        "it collapsed: retraining in the next RL step",
    ]


def test_training_that_need_not_pay_begins_at_once(make: Make) -> None:
    engines = Dispatcher()
    make({"while_it_pays": False}).start_trainers(engines)
    assert engines.trainers == 1


class Workers(Dispatcher):
    """Who sample one response, or are lost before."""

    done = False
    collector: Any = None

    def __init__(self, *, fail: bool) -> None:
        super().__init__()
        self.fail = fail

    def begin(self, requests: Any, *, watch: bool = False) -> None:
        pass

    def wait(self, until: Any) -> None:
        self.collector.ended(rollout(0))
        if self.fail:
            raise PacelineError("none is left")
        self.done = True

    def end(self, *, abort: bool) -> Any:
        return replace(stats_of(1), sampled_by={0: "rollout-0"})


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("layout", ["embedded", "colocated"])
def test_spare_time_begins_with_decoding_and_ends_with_the_rollout(
    make: Make, driver: Driver, layout: str, fails: bool
) -> None:
    workers, said = Workers(fail=fails), list[Any]()

    def drain() -> dict[int, Grade]:
        said.append(list(driver.said))
        return {0: Grade(value=0.0)}

    rewards: Any = SimpleNamespace(
        begin=lambda groups, same_step: said.append(list(driver.said)),
        submit=lambda key, item: said.append(list(driver.said)),
        drain=drain,
    )
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, **_: "")
    drafter = make(cluster={"layout": layout})
    collector = Collector(run_context(), cast(Any, workers), rewards, tokenizer, drafter=drafter)
    workers.collector = collector
    batch = Batch([Pick(0, prompt_of(0))], [1], SamplingParams(4), seed=0, expected_tokens=[1.0])
    with contextlib.suppress(PacelineError):
        collector.run(batch, "rollout", step=4, spare=True)
    begun = [(4, True)]
    graded = [begun + ([4] if layout == "embedded" else [])]
    assert said == [[], begun, *([] if fails else graded)]
    assert driver.said == [(4, True), 4]
    workers.done = False
    if not fails:
        collector.run(batch, "eval", step=4)
        assert driver.said == [(4, True), 4], "an evaluation trains nobody"


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


def test_what_happened_is_recorded_once(training: DrafterTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[Span] = []
    monkeypatch.setattr(Observer, "span", lambda self, span: spans.append(span))
    training.event("rollout-0", RecordingReport(3, 1000, 0.1, 0))
    training.event("rollout-1", RecordingReport(1, 24, 0.1, 2))
    training.event("rollout-1", micro_step(4))
    training.event("rollout-1", Checkpointed(4, "d", 0.001, 0.2))
    training.event("rollout-1", TrainStopped(1, 4, 0.25))
    training.learned(SimpleNamespace(metrics={"recording/bytes": 76.0}))
    metrics = training.take(1, 1_000.0, None).metrics()
    expected = {"micro_steps": 1, "recorded_bytes": 1100, "preempted": 1, "stop_s": 0.25, "failures": 0, "published": 0}
    assert {name: metrics[f"drafter/{name}"] for name in expected} == expected
    assert (metrics["drafter/buffer_sequences"], metrics["drafter/buffer_bytes"]) == (2, 2 * record(0).bytes)
    again = training.take(2, 1_000.0, None).metrics()
    assert again["drafter/micro_steps"] == again["drafter/recorded_bytes"] == 0
    assert spans == [Span("rollout-1", "train_drafter", 5.0, 5.5, 1)]


def test_a_workers_plan_names_what_its_trainer_begins_with(make: Make, tmp_path: Path) -> None:
    speculation = {"speculation": {"eagle": {"path": "drafts"}}}
    for training, init in ((make({"seed": 3}), 3), (make({"seed": 3}, rollout=speculation), "drafts")):
        plan = training.plan("rollout-1", EngineOptions(threads=2))
        assert (plan.endpoint, plan.stop_timeout_s) == ("tcp://127.0.0.1:1", 2.0)
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
    found = [(kwargs, args[0].of("n0")) for args, kwargs in asked]
    assert found == ([(options, BUFFERS["n0"])] if source == "learner" else [])


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
        training.plan("rollout-0", EngineOptions())
        buffers = dict(training._actors.buffers.by_node)
        assert buffers == {node["NodeID"]: training.buffer_of(node["NodeID"]) for node in ray.nodes()}
        assert training.take(1, 1_000.0, None).metrics()["drafter/buffer_sequences"] == 0
    assert kinds(tmp_path) == ["started", "coordinator"]  # its end is no loss
    for buffer in buffers.values():
        with pytest.raises(RayError):  # killed, it may still answer once or twice
            ray.get([buffer.stats.remote() for _ in range(1000)], timeout=30.0)
    off = settings.model_copy(update={"drafter": settings.drafter.model_copy(update={"train": False})})
    with Observer(run_dir, off) as observer, drafter_training(off, observer, run_dir, model) as training:
        assert training is None


@pytest.mark.parametrize(
    ("layout", "nodes", "workers", "attached", "host"),
    [
        ("embedded", 1, 2, False, "127.0.0.1"),
        ("embedded", 1, 2, True, "127.0.0.1"),
        ("embedded", 2, 2, True, "10.0.0.5"),
        ("embedded", 1, {"min": 1, "max": 2}, False, "127.0.0.1"),
        ("embedded", 1, {"min": 1, "max": 2}, True, "10.0.0.5"),
        ("colocated", 1, 2, False, "10.0.0.5"),
    ],
)
def test_the_coordinator_is_where_every_worker_reaches_it(
    layout: str,
    nodes: int,
    workers: object,
    attached: bool,
    host: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    there = dict([("n0", "10.0.0.5"), ("n1", "10.0.0.6")][:nodes])
    cluster = {"layout": layout, "address": "10.0.0.5:6379" if attached else None}
    settings = settings_of(tmp_path / "run", {}, cluster=cluster, rollout={"workers": workers})
    assert reachable_options(settings, there, "n0").host == host
    own = settings.coordinator.model_copy(update={"host": "10.9.9.9"})
    assert reachable_options(settings.model_copy(update={"coordinator": own}), there, "n0") is own
