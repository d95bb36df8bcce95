"""Whole runs that go on from a damaged folder end as the undisturbed one; every file and bit is in
tests/launch/test_damaged_checkpoints.py."""

import json
import pickle
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.training.checkpoint import check
from launch.commands.cli import app
from launch.run.checkpoints import DRAFTERS_DIR
from launch.run.restore import SPARE
from launch.run.resume import find_checkpoint
from tests.launch.test_damaged_checkpoints import FLIPS, flip, unsealed
from tests.learner.test_foreign_checkpoint import Touch
from tests.train.conftest import SHARP, STEPS, Runs
from tests.train.test_determinism import learning

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ALL = SHARP, "checkpoint.every=1", f"checkpoint.keep={STEPS}"


@pytest.fixture(scope="module")
def whole(runs: Runs, ray_head: str) -> list[dict[str, Any]]:
    """The step records of an undisturbed run that keeps every checkpoint."""
    return runs.run("undamaged", *ALL)


def copied(runs: Runs, name: str) -> Path:
    shutil.copytree(runs.root / "undamaged", runs.root / name, symlinks=True)
    return runs.root / name


def events(folder: Path, kind: str) -> list[str]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["message"] for event in found if event["kind"] == kind]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_goes_back_over_three_damaged_checkpoints_to_an_intact_one(
    runs: Runs, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A bit of the weights, a description that would run something, a state that contradicts itself as an earlier
    version might have left it; and in the one that is taken a bit of what only saves time."""
    folder, made = copied(runs, "damaged"), tmp_path / "made"
    there = folder / "checkpoints"
    flip(there / "step_000005/learner/__0_0.distcp", 123_457)
    (there / "step_000004/learner/.metadata").write_bytes(pickle.dumps(Touch(made)))
    unsealed(there / "step_000004")
    unsealed(there / "step_000003")
    state = json.loads((there / "step_000003/state.json").read_text())
    (there / "step_000003/state.json").write_text(json.dumps({**state, "steps_done": 2}))
    spare = next(path for path in sorted((there / "step_000002" / DRAFTERS_DIR).iterdir()) if path.stat().st_size)
    flip(spare, 8)
    assert learning(runs.run("damaged", *ALL, resume=True)) == learning(whole)
    assert runs.texts("damaged") == runs.texts("undamaged")
    of_5, of_4, of_3 = events(folder, "checkpoint_damaged")
    assert of_5.startswith("learner/__0_0.distcp of step_000005 is damaged: its sha256")
    assert "it names pathlib.Path.touch" in of_4
    assert "state.json of step_000003 is not the state of a run: steps_done is 2 and step 3" in of_3
    assert all("goes on from step_000002, the newest that is intact" in said for said in (of_5, of_4, of_3))
    (harmless,) = events(folder, "drafter_damaged")
    assert harmless.startswith(f"{DRAFTERS_DIR}/{spare.name} is damaged")
    assert not made.exists()
    taken = [f"step_{step:06d}" for step in range(1, STEPS + 1)]
    assert names(folder) == sorted([*taken, *(f"step_00000{step}.damaged" for step in (3, 4, 5))])


@pytest.mark.long
def test_of_a_thousand_bits_of_a_runs_newest_checkpoint_each_is_named_and_the_one_before_it_is_taken(
    runs: Runs, whole: list[dict[str, Any]]
) -> None:
    """Half of them over the files alike, half over the bytes; the last damaged checkpoint is then gone on from."""
    folder = copied(runs, "flipped")
    newest = folder / f"checkpoints/step_{STEPS:06d}"
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    sizes, chance = [path.stat().st_size for path in files], random.Random(9)
    taken = Counter[str]()
    for number in range(FLIPS):
        (path,) = [chance.choice(files)] if number % 2 else chance.choices(files, weights=sizes)
        bit, name = chance.randrange(8 * path.stat().st_size), path.relative_to(newest).as_posix()
        flip(path, bit)
        found = find_checkpoint(folder, None, partial(check, spare=SPARE))
        taken[found.checkpoint.name] += 1
        if name.partition("/")[0] in SPARE:
            assert ([fault.file for fault in found.checked.spare], found.damaged) == ([name], ()), f"bit {bit}"
        else:
            ((which, why),) = found.damaged
            assert (which, found.checkpoint.name) == (newest, f"step_{STEPS - 1:06d}"), f"{name}, bit {bit}"
            assert why.startswith(f"{name} of {newest.name} is damaged")
        flip(path, bit)
    assert len(taken) == 2
    assert taken.total() == FLIPS
    flip(newest / "learner/__0_0.distcp", 4_321)
    assert learning(runs.run("flipped", *ALL, resume=True)) == learning(whole)
    assert runs.texts("flipped") == runs.texts("undamaged")


@pytest.mark.long
def test_a_run_goes_on_from_the_step_that_is_asked_for(runs: Runs, whole: list[dict[str, Any]]) -> None:
    folder = copied(runs, "asked")
    command = ["train", str(runs.config), *runs.overrides("asked", *ALL), "--resume", "--step", "3"]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert learning(runs.steps("asked")) == learning(whole)
    assert len(events(folder, "set_aside")) == 2
    assert {"step_000004.later", "step_000005.later", "step_000004", "step_000005"} <= set(names(folder))


def test_where_nothing_is_intact_the_run_says_so_before_ray_starts_and_leaves_the_folder(
    runs: Runs, whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.run import train as train_module

    folder = copied(runs, "lost")
    for path in (folder / "checkpoints").iterdir():
        flip(path / "state.json", 100)
    before = names(folder), (folder / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(train_module, "ray_session", lambda **_: pytest.fail("Ray was started"))
    result = CliRunner().invoke(app, ["train", str(runs.config), *runs.overrides("lost", *ALL), "--resume-or-start"])
    assert result.exit_code == 2
    shown = " ".join(result.output.split())
    assert "no checkpoint in" in shown
    assert all(f"state.json of step_00000{step} is damaged" in shown for step in range(1, STEPS + 1))
    assert "go on with" not in shown
    assert (names(folder), (folder / "metrics.jsonl").read_bytes()) == before


@pytest.mark.long
def test_responses_that_a_checkpoint_lacks_are_missed(runs: Runs, ray_head: str) -> None:
    """One step off: without them it would be another run, and nothing would say so."""
    stale = *ALL, "rollout.staleness=1"
    whole = runs.run("stale", *stale)
    shutil.copytree(runs.root / "stale", runs.root / "stale-without", symlinks=True)
    folder = runs.root / "stale-without"
    shutil.rmtree(folder / "checkpoints/step_000005")
    (folder / "checkpoints/step_000004/ahead.npz").unlink()
    assert learning(runs.run("stale-without", *stale, resume=True)) == learning(whole)
    (said,) = events(folder, "checkpoint_damaged")
    assert said.startswith("ahead.npz of step_000004 is missing. The run goes on from step_000003")
