"""One step off with everything that may disturb it at once, in one run of the program: adaptive speculation, a worker
killed and a learner killed while both work, a SIGTERM, and a resume."""

import signal
from pathlib import Path

import pytest

from launch.observe.journal import read
from launch.run.train import EXIT_INTERRUPTED
from tests.train.conftest import SHARP, Runs
from tests.train.killing import Moment, kill_at, reasons
from tests.train.test_resume import start, wait_for_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = (SHARP, "rollout.staleness=1", "run.steps=6", "rollout.workers=2", "checkpoint.every=0")
LEARNED = ("loss/mean", "grad_norm/mean", "reward/mean", "tokens/generated", "logprob_gap/mean", "staleness/mean")


@pytest.mark.long
def test_a_run_that_is_killed_in_parts_stopped_and_resumed_is_the_undisturbed_one(runs: Runs, ray_head: str) -> None:
    undisturbed = runs.alone(*SETTINGS)
    process, name = start(runs, ray_head, "one-step-off", *SETTINGS), "one-step-off"
    folder = runs.root / name
    kill_at(process, folder, "rollout_worker", Moment(2, 0.5), {2: 0.1})
    kill_at(process, folder, "learner", Moment(3, 0.5), {3: 0.1})
    wait_for_steps(runs, name, process, 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == EXIT_INTERRUPTED, (runs.root / f"{name}.log").read_text()
    assert len(runs.steps(name)) < 6
    (saved,) = (folder / "checkpoints").iterdir()
    assert (saved / "ahead.npz").is_file()
    rows = runs.run(name, *SETTINGS, resume=True)
    assert [[row[of] for of in LEARNED] for row in rows] == [[row[of] for of in LEARNED] for row in undisturbed.rows]
    assert runs.texts(name) == undisturbed.texts
    assert reasons(folder, "rollout_worker")
    assert reasons(folder, "learner")
    assert versions(folder) == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert all(row["seconds/overlap"] > 0 for row in rows[:-1])
    assert any(row["speculation/share"] for row in rows)


def versions(folder: Path) -> list[set[int]]:
    """Of the weights that sampled each step's responses."""
    return [{version for of in row["versions"] for version, _ in of} for row in read(folder / "lengths.jsonl")]
