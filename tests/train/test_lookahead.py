"""Looking ahead changes nothing but time: tokens, log-probs, losses and weights are those of a run without it, with two
and three workers, with a worker killed, and after a resume."""

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_losses import first_difference
from launch.observe.journal import read
from launch.run.train import EXIT_INTERRUPTED
from tests.params import long
from tests.train.conftest import Runs
from tests.train.killing import Moment, kill_at, reasons
from tests.train.test_resume import start, wait_for_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
# Few places and long responses: one worker decodes the last ones while the other has nothing.
TAIL = (
    *("rollout.sampling.temperature=0.8", "rollout.sampling.max_new_tokens=120", "rollout.workers=2"),
    *("rollout.engine.kv_tokens=16384", "checkpoint.every=0", "eval.every=2"),
)
AHEAD = (*TAIL, "rollout.lookahead=always")
APART = (  # by default: the learner has a place of its own, so that workers look ahead while it works
    *TAIL,
    "cluster={layout: disaggregated, gpus_per_worker: 0, gpus_per_learner: 0, cpus_per_worker: 0.3, "
    "cpus_per_learner: 0.3, weights: store}",
    *("rollout.engine.device=cpu", "learner.device=cpu"),
)


@pytest.fixture(scope="module")
def plain(runs: Runs, ray_head: str) -> Path:
    """A run without it."""
    runs.run("not-ahead", *TAIL)
    return runs.root / "not-ahead"


def digest(folder: Path) -> str:
    """Of the weights that the run ended with."""
    return hashlib.sha256((folder / "model/model.safetensors").read_bytes()).hexdigest()


def summed(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows)


ARMS = {
    "always": AHEAD,
    "three": (*AHEAD, "rollout.workers=3", "rollout.speculation.mode=off"),
    "apart": APART,
    "trained": (
        *APART,
        "drafter.train=true",
        "drafter.while_it_pays=false",
        "drafter.micro_step_tokens=64",
    ),  # who wants the idle seconds too
}


@pytest.mark.parametrize("name", ["always", "apart", *long("three", "trained")])
def test_the_same_is_sampled_and_learned(runs: Runs, plain: Path, name: str) -> None:
    rows = runs.run(name, *ARMS[name])
    assert first_difference(plain, runs.root / name) is None
    assert digest(runs.root / name) == digest(plain)
    assert summed(rows, "lookahead/sampled_tokens") > 0
    assert summed(rows, "lookahead/checked_tokens") > 0
    assert "early" in {span["kind"] for span in read(runs.root / name / "timeline.jsonl")}
    assert summed(rows, "lookahead/spent_s") > 0
    said = [event["message"] for event in read(runs.root / name / "events.jsonl") if event["kind"] == "lookahead"]
    assert ("while it is measured to pay" in said[0]) == (name in ("apart", "trained"))
    assert ("lookahead/value" in rows[-1]) == (name == "trained")


@pytest.mark.long
@pytest.mark.parametrize("arm", ["always", "apart"])
def test_a_run_that_is_killed_in_parts_stopped_and_resumed_is_the_undisturbed_one(
    runs: Runs, plain: Path, ray_head: str, arm: str
) -> None:
    name, options = f"killed-{arm}", ARMS[arm]
    process = start(runs, ray_head, name, *options)
    folder = runs.root / name
    kill_at(process, folder, "rollout_worker", Moment(2, 0.5), {2: 0.1})
    kill_at(process, folder, "engine", Moment(3, 0.5), {3: 0.1})
    wait_for_steps(runs, name, process, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_INTERRUPTED, (runs.root / f"{name}.log").read_text()
    runs.run(name, *options, resume=True)
    assert first_difference(plain, folder) is None
    assert digest(folder) == digest(plain)
    assert reasons(folder, "rollout_worker")
