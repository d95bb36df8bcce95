"""A run from outside: what Prometheus gets of it, what Grafana asks for, what lies in its folder afterwards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from contracts.rollout import DraftCounts
from launch.observe import StepDrafter, StepSpeculation
from launch.observe.environment import read_starts
from tests.train.conftest import Runs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
RULED_ONLY = ("ray_paceline_budget_", "ray_paceline_abort_", "ray_paceline_skip_")
LISTENING_ONLY = {"ray_paceline_fleet_notices", "ray_paceline_fleet_drain_s"}  # on a cluster: launch/fleet/notices.py
DASHBOARD = Path(__file__).parents[2] / "launch/observe/grafana.json"


class Recorder:
    """In the place of ray.util.metrics.Gauge: which names and tags were exported."""

    exported: dict[str, set[str]] = {}  # noqa: RUF012 - emptied by the test

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._tags = self.exported.setdefault(name, set())
        self._keys = set(tag_keys)

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == self._keys
        self._tags |= set(tags)


def asked() -> dict[str, set[str]]:
    """Metric names that the dashboard queries, as Prometheus knows them, and the tags it shows of each."""
    names: dict[str, set[str]] = {}
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            tags = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name in re.findall(r"\bray_\w+", target["expr"]):
                names.setdefault(name, set()).update(tags)
    return names


def speculation_names() -> set[str]:
    """What an RL step exports that used and trained an EAGLE drafter, which a run so small may not come to."""
    used = DraftCounts(engine_steps=2, request_steps=2, drafted=4, accepted=2, seconds=1.0, saved_s=0.1)
    speculation = StepSpeculation(strategies={"eagle:2": used}, traces={}, requests=[(4, 2)])
    counts = dict.fromkeys(("published", "rolled_back", "preempted", "failures"), 1.0)
    drafter: dict[str, Any] = StepDrafter(
        updates=[], worker_s=1.0, counts=counts, levels={"version": 1.0}, drafted=used
    ).metrics()
    names = speculation.metrics() | drafter | dict.fromkeys(("drafter/accuracy", "drafter/top3_accuracy"), 1.0)
    return {"paceline_" + re.sub(r"\W", "_", name) for name in names}


def test_a_run_exports_what_the_dashboard_asks_for_and_leaves_its_record(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.metrics.Gauge", Recorder)
    monkeypatch.setattr(Recorder, "exported", {})
    runs.run("observed", "run.steps=1", "rollout.workers=2")
    wanted = asked()
    assert len(wanted) > 30
    exported = {f"ray_{name}": tags for name, tags in Recorder.exported.items()}
    always = {f"ray_{name}" for name in speculation_names()}
    always |= {name for name in wanted if name.startswith(RULED_ONLY)}  # of them test_ruled_programs.py
    assert wanted.keys() - exported.keys() - always - LISTENING_ONLY == set()
    for name, tags in wanted.items():
        assert tags <= exported.get(name, {"run"}), name
    folder = runs.root / "observed"
    assert read_starts(folder)[0]["packages"]["ray"]
    assert "finished: 1 RL steps" in (folder / "run.log").read_text(encoding="utf-8")
    held_out = [json.loads(line) for line in (folder / "eval_samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {sample["step"] for sample in held_out} == {0, 1}  # before and after
    logs = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "logs").iterdir()}
    assert set(logs) >= {"rollout-0", "rollout-1", "learner-0", "reward-0"}
    assert "weights of version 1 are loaded" in logs["rollout-1"]
    assert "learned from" in logs["learner-0"]


def test_a_run_begins_with_what_an_earlier_one_measured(runs: Runs, base: list[dict[str, Any]]) -> None:
    """Nobody has calibrated: what the engine of `base` measured in passing is there for the next run, which says so and
    predicts its engine steps from the first one on."""
    assert base[0]["engine/steps"] > 0
    files = {str(file): json.loads(file.read_text()) for file in (runs.root / "calibrations").glob("*.json")}
    (row,) = runs.run("second", "run.steps=1", "rollout.sampling.temperature=0.3")
    events = [json.loads(line) for line in (runs.root / "second/events.jsonl").read_text().splitlines()]
    (said,) = [event["message"] for event in events if event["kind"] == "calibration"]
    (kept,) = (file for file in files if said.endswith(file))
    before = files[kept]
    assert said.startswith(f"rollout-0 begins with {len(before['passes'])} measured passes for ")
    assert row["speculation/predicted_error"] > 0
    shares = [row[name] for name in row if name.startswith("speculation/reason/")]
    assert sum(shares) == pytest.approx(1.0)
    record = json.loads((runs.root / "second/speculation.jsonl").read_text().splitlines()[0])
    drafting = [use for name, use in record["strategies"].items() if name != "plain"]
    measured_s, timed_s = (sum(use[name] for use in drafting) for name in ("measured_s", "seconds"))
    assert measured_s == pytest.approx(
        timed_s, rel=0.2
    )  # of plain steps a sample is predicted, of the others nearly all
    assert json.loads(Path(kept).read_text(encoding="utf-8"))["key"] == before["key"]
