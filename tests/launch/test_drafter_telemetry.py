"""Trainers' events to the numbers of an RL step: hand-computed, lossless through the file, bounded in size."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from contracts.rollout import StrategyUse
from contracts.spot import Checkpointed, MicroStep, NeedData, TrainedWeights, TrainFailed, TrainStarted, TrainStopped
from launch.observe import DrafterMeter, Observer, SpeculationMeter, StepRecord
from launch.observe.drafter import MAX_UPDATES, updates_of
from launch.observe.journal import read
from models.manifest import WeightsManifest
from tests.launch.test_observer import make_config
from tests.windows import engine_window


def micro(
    step: int, loss: float = 1.0, top3: float = 0.5, *, tokens: int = 100, at_s: float = 0.0, **more: int
) -> MicroStep:
    settings = {"session": 1, "epoch": 1, "members": 1, "target_version": 3} | more
    means = {"loss": loss, "accuracy": top3 / 2, "top3_accuracy": top3}
    return MicroStep(step=step, tokens=tokens, started_s=at_s, seconds=0.1, **means, **settings)


def published(version: int) -> TrainedWeights:
    return TrainedWeights(WeightsManifest(version, 0, (), 0), np.zeros(0, np.uint8))


def test_metrics_of_a_step() -> None:
    meter = DrafterMeter()
    speculation = SpeculationMeter()
    use = StrategyUse(
        strategy="eagle:4",
        engine_steps=6,
        request_steps=60,
        drafted=200,
        accepted=90,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
        offered=(60, 50),
        taken=(40, 30),
    )
    other = StrategyUse(
        strategy="suffix:4",
        engine_steps=6,
        request_steps=60,
        drafted=200,
        accepted=180,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.4,
    )
    speculation.window(
        "rollout-0",
        engine_window(engine_steps=12, strategies=(use, other)),
    )
    for event in (
        TrainStarted(1, 1),
        NeedData(4096),
        micro(1, loss=2.0, top3=0.4, tokens=300, members=2),
        micro(2, loss=math.nan, top3=math.nan, tokens=0, at_s=0.2),
        published(2),
        Checkpointed(2, "somewhere", 0.01, 0.2),
        TrainStopped(1, 2, 0.03, cpu_s=0.5),
        TrainStopped(2, 2, 0.01, reason="no data"),
    ):
        meter.event("rollout-0", event)
    meter.event("rollout-1", micro(1, loss=1.0, top3=0.8, tokens=100, members=2, target_version=4))
    meter.event("rollout-1", TrainFailed("killed"))
    meter.swapped(2)
    meter.rolled_back(1)
    meter.buffer("node-a", sequences=9, bytes=1000)
    meter.buffer("node-a", sequences=10, bytes=2000)
    meter.buffer("node-b", sequences=1, bytes=50)
    meter.recorded(700, 0.25, 2)
    meter.recorded(300, 0.5)
    found = meter.take(6, speculation.take()).metrics()
    assert found == pytest.approx(
        {
            "drafter/micro_steps": 2.0,  # of two members the first
            "drafter/tokens": 400.0,
            "drafter/worker_s": 0.3,
            "drafter/loss": 1.75,
            "drafter/accuracy": 0.25,
            "drafter/top3_accuracy": 0.5,
            "drafter/version": 2.0,
            "drafter/stale_versions": 2.0,
            "drafter/acceptance": 90 / 200,
            "drafter/accept_length": 1 + 90 / 60,
            "drafter/published": 1.0,
            "drafter/rolled_back": 1.0,
            "drafter/preempted": 1.0,
            "drafter/failures": 1.0,
            "drafter/stop_s": 0.03,
            "drafter/buffer_sequences": 11.0,
            "drafter/buffer_bytes": 2050.0,
            "drafter/recorded_bytes": 1000.0,
            "drafter/recording_skipped": 2.0,
            "drafter/recording_s": 0.75,
            "drafter/cpu_s": 0.5,
        }
    )


def test_take_begins_anew_and_keeps_what_still_holds() -> None:
    meter = DrafterMeter()
    meter.event("rollout-0", micro(1))
    meter.swapped(1)
    meter.buffer("node-a", sequences=9, bytes=1000)
    meter.take(3)
    metrics = meter.take(5).metrics()
    assert metrics == {
        "drafter/micro_steps": 0.0,
        "drafter/tokens": 0.0,
        "drafter/worker_s": 0.0,
        "drafter/version": 1.0,
        "drafter/stale_versions": 2.0,
        "drafter/buffer_sequences": 9.0,
        "drafter/buffer_bytes": 1000.0,
        "drafter/published": 0.0,
        "drafter/rolled_back": 0.0,
        "drafter/preempted": 0.0,
        "drafter/failures": 0.0,
        "drafter/recorded_bytes": 0.0,
        "drafter/recording_skipped": 0.0,
        "drafter/recording_s": 0.0,
        "drafter/cpu_s": 0.0,
    }


def test_the_record_gives_back_the_updates(tmp_path: Path) -> None:
    meter = DrafterMeter()
    meter.event("a", micro(7, at_s=1e9 + 0.5, loss=1.25, top3=0.625))
    meter.event("a", micro(6, at_s=1e9, tokens=0, loss=math.nan, top3=math.nan))
    meter.event("b", micro(6, at_s=1e9 + 0.01, session=2))  # another session: another update
    taken = meter.take(4)
    with Observer(tmp_path, make_config()) as observer:
        observer.step(StepRecord(step=1, metrics={}, seconds={"step": 1.0}, drafter=taken))
    (record,) = read(tmp_path / "drafter.jsonl")
    assert record["step"] == 1
    found = updates_of(record)
    assert [(u.step, u.loss, u.top3_accuracy, u.tokens, u.target_version) for u in found] == [
        (6, None, None, 0, 3),
        (6, 1.0, 0.5, 100, 3),
        (7, 1.25, 0.625, 100, 3),
    ]
    assert [u.at_s for u in found] == pytest.approx([1e9, 1e9 + 0.01, 1e9 + 0.5])
    assert read(tmp_path / "metrics.jsonl")[0]["drafter/micro_steps"] == 3.0


@pytest.mark.parametrize("record", [{}, {"origin_s": 0.0}, {"origin_s": 0.0, "updates": [[1]]}, {"origin_s": "x"}])
def test_foreign_records_have_no_updates(record: dict[str, object]) -> None:
    assert updates_of(record) == []


def test_a_long_session_is_thinned_in_the_file_and_counted_in_full() -> None:
    meter = DrafterMeter()
    for i in range(3 * MAX_UPDATES):
        meter.event("a", micro(i + 1, at_s=float(i)))
    taken = meter.take(3)
    found = updates_of(json.loads(json.dumps(taken.to_json())))
    assert len(found) == MAX_UPDATES
    assert (found[0].step, found[-1].step) == (1, 3 * MAX_UPDATES)
    assert taken.metrics()["drafter/micro_steps"] == 3 * MAX_UPDATES
