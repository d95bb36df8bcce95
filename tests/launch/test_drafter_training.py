"""The driver's side: which weights engines draft with, over swaps, a collapse and a roll-back; with real actors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.engine.types import EngineWindow, StrategyUse
from actors.spot.types import MicroStep, TrainerFailed
from actors.spot_host import DrafterReady
from launch.drafter_training import DrafterTraining, drafter_training
from launch.observe import Observer
from launch.observe.journal import read
from models.manifest import WeightsManifest
from models.options import ModelOptions
from tests.report.synthetic import config

pytestmark = pytest.mark.ray


class Dispatcher:
    """Notes what engines are told to draft with."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.refs: list[Any] = []

    def set_drafter(self, name: str, manifest: WeightsManifest, ref: Any) -> None:
        assert name == "eagle"
        self.versions.append(manifest.version)
        self.refs.append(ref)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[DrafterTraining]:
    run_dir = tmp_path / "run"
    drafter = config(run_dir, steps=9).drafter.model_copy(update={"train": True})
    settings = config(run_dir, steps=9).model_copy(update={"drafter": drafter})
    with (
        Observer(run_dir, settings) as observer,
        drafter_training(settings, observer, run_dir, ModelOptions(path="model")) as training,
    ):
        assert training is not None
        yield training


def ready(version: int) -> DrafterReady:
    return DrafterReady(WeightsManifest(version, 0, (), 0), f"weights {version}")


def drafted(rate: float, tokens: int = 1000) -> EngineWindow:
    use = StrategyUse("eagle:4", 1, 10, tokens, round(tokens * rate), 0.5, 0.1, 0.4)
    other = StrategyUse("suffix:4", 1, 10, tokens, 0, 0.5, 0.1, 0.4)  # another drafter's, never counted
    return EngineWindow(0.0, 1.0, 1, 0, 0, 0, 0, 0, 0, (use, other))


def kinds(tmp_path: Path) -> list[str]:
    return [event["kind"] for event in read(tmp_path / "run/events.jsonl")]


def test_a_collapse_brings_the_last_good_weights_back(training: DrafterTraining, tmp_path: Path) -> None:
    engines = Dispatcher()
    training.event("rollout-0", ready(0))  # what the trainer starts with is what engines hold
    training.hand_out(engines, 0)  # type: ignore[arg-type]
    assert engines.versions == []
    for version, target in ((10, 1), (20, 2)):
        training.event("rollout-0", ready(version))
        training.hand_out(engines, target)  # type: ignore[arg-type]
        training.window(drafted(0.6))
    assert (engines.versions, engines.refs[-1]) == ([10, 20], "weights 20")

    training.event("rollout-1", ready(30))
    training.event("rollout-0", ready(29))  # older than what waits
    training.hand_out(engines, 3)  # type: ignore[arg-type]
    training.window(drafted(0.1))
    assert "drafter_rolled_back" in kinds(tmp_path)
    for _ in range(5):
        training.window(drafted(0.1))  # version 30 drafts until the next hand-out, and is no measure of version 20
    training.event("rollout-0", ready(25))  # made before the roll-back
    training.hand_out(engines, 4)  # type: ignore[arg-type]
    assert (engines.versions, engines.refs[-1]) == ([10, 20, 30, 20], "weights 20")
    training.window(drafted(0.2))  # a third of what version 20 had: the target has changed, nothing to go back to
    assert kinds(tmp_path).count("drafter_rolled_back") == 1
    assert "drafter_collapsed" in kinds(tmp_path)

    training.event("rollout-0", ready(31))
    training.hand_out(engines, 5)  # type: ignore[arg-type]
    assert engines.versions[-1] == 31
    record = training.take(5, None)
    assert (list(record.published), list(record.rolled_back), record.levels["version"]) == (
        [10, 20, 30, 25, 31],
        [30],
        31,
    )


def test_the_reason_of_a_lost_trainer_is_shown_and_its_absence_is_waited_for_by_nobody(
    training: DrafterTraining, tmp_path: Path
) -> None:
    training.begin(1)
    training.event("rollout-1", MicroStep(1, 1, 1, 1, 2.0, 0.1, 0.2, 100, 0, 5.0, 0.5))
    training.event("rollout-1", TrainerFailed("process 7 ended with signal SIGKILL"))
    training.sampled(1)
    record = training.take(1, None)
    assert (len(record.updates), record.counts["failures"]) == (1, 1)
    lost = [e["message"] for e in read(tmp_path / "run/events.jsonl") if e["kind"] == "trainer_lost"]
    assert lost == ["rollout-1: process 7 ended with signal SIGKILL"]
