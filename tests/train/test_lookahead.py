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
from tests.train.conftest import Runs
from tests.train.killing import Moment, kill_at, reasons
from tests.train.test_resume import start, wait_for_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
# Few places and long responses: one worker decodes the last ones while the other has nothing.
TAIL = (
    *("rollout.sampling.temperature=0.8", "rollout.sampling.max_new_tokens=120", "rollout.workers=2"),
    *("rollout.engine.kv_tokens=16384", "checkpoint.every=0", "eval.every=2"),
)
AHEAD = (*TAIL, "rollout.lookahead=auto")


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


@pytest.mark.parametrize("extra", [(), ("rollout.workers=3", "rollout.speculation.mode=off")], ids=str)
def test_the_same_is_sampled_and_learned(runs: Runs, plain: Path, extra: tuple[str, ...]) -> None:
    name = f"ahead-{len(extra)}"
    rows = runs.run(name, *AHEAD, *extra)
    assert first_difference(plain, runs.root / name) is None
    assert digest(runs.root / name) == digest(plain)
    assert summed(rows, "lookahead/sampled_tokens") > 0
    assert summed(rows, "lookahead/checked_tokens") > 0
    assert "early" in {span["kind"] for span in read(runs.root / name / "timeline.jsonl")}


@pytest.mark.long
def test_a_run_that_is_killed_in_parts_stopped_and_resumed_is_the_undisturbed_one(
    runs: Runs, plain: Path, ray_head: str
) -> None:
    process, name = start(runs, ray_head, "ahead-killed", *AHEAD), "ahead-killed"
    folder = runs.root / name
    kill_at(process, folder, "rollout_worker", Moment(2, 0.5), {2: 0.1})
    kill_at(process, folder, "engine", Moment(3, 0.5), {3: 0.1})
    wait_for_steps(runs, name, process, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_INTERRUPTED, (runs.root / f"{name}.log").read_text()
    runs.run(name, *AHEAD, resume=True)
    assert first_difference(plain, folder) is None
    assert digest(folder) == digest(plain)
    assert reasons(folder, "rollout_worker")
