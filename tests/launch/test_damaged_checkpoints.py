"""Which checkpoint a run goes on from where files are damaged, and what is said; without Ray. Whole runs of it are in
tests/train/test_damaged_checkpoints.py."""

import json
import pickle
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from actors.data.order import PromptOrder
from actors.training.checkpoint import (
    LEARNER_DIR,
    Checked,
    CheckpointError,
    check,
    checkpoints,
)
from launch.commands.cli import app
from launch.commands.eval_target import find
from launch.commands.export_model import export
from launch.drafter.weights import WEIGHTS_DIR
from launch.errors import PacelineError
from launch.run.ahead import AHEAD_FILE
from launch.run.checkpoints import DRAFTERS_DIR
from launch.run.restore import SPARE, readable
from launch.run.resume import ResumeError, find_checkpoint
from models.durable import CHECKSUMS_FILE
from tests.checkpoints import write_checkpoint
from tests.launch.test_export_model import run as run  # the fixture: checkpoints of step 1 and 2, sealed
from tests.learner.test_foreign_checkpoint import Touch
from tests.learner.tiny import make_trainer, write_config

FLIPS = 1000


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def unsealed(checkpoint: Path) -> None:
    """As an earlier version wrote it."""
    (checkpoint / CHECKSUMS_FILE).unlink()
    state = json.loads((checkpoint / "state.json").read_text())
    del state["checksums"]
    (checkpoint / "state.json").write_text(json.dumps(state))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint with every kind of file that a run writes."""
    trainer = make_trainer(write_config(tmp_path / "model"))

    def save(learner: Path) -> None:
        trainer.save(learner)
        rng = np.random.default_rng(0)
        np.savez(learner.parent / AHEAD_FILE, tokens=rng.integers(0, 9, 500))
        for name in (f"{DRAFTERS_DIR}/suffix.bin", f"{WEIGHTS_DIR}/7.npy", f"{WEIGHTS_DIR}/7.json"):
            path = learner.parent / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(rng.bytes(3000))

    state = {"steps_done": 3, "order": PromptOrder(9, 0, True).state_dict(), "lengths": {}, "evaluations": {}}
    return write_checkpoint(tmp_path / "checkpoints", 3, save, state, keep=1)


def test_of_a_thousand_flipped_bits_each_is_refused_by_name_or_harmless(whole: Path) -> None:
    """Half of them over the files alike, half over the bytes. Harmless: what only saves time, which is named too."""
    files = sorted(path for path in whole.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    chance = random.Random(26)
    refused, harmless = Counter[str](), Counter[str]()
    assert check(whole, SPARE) == Checked(sealed=True)
    for number in range(FLIPS):
        (path,) = [chance.choice(files)] if number % 2 else chance.choices(files, weights=sizes)
        bit, name = chance.randrange(8 * path.stat().st_size), path.relative_to(whole).as_posix()
        flip(path, bit)
        if (folder := name.partition("/")[0]) in SPARE:
            assert [fault.file for fault in check(whole, SPARE).spare] == [name], f"{name}, bit {bit}"
            harmless[folder] += 1
        else:
            with pytest.raises(CheckpointError, match=f"^{name} of step_000003 is damaged"):
                check(whole, SPARE)
            refused[name] += 1
        flip(path, bit)
    assert check(whole, SPARE) == Checked(sealed=True)
    assert refused.total() + harmless.total() == FLIPS
    assert refused.keys() == {CHECKSUMS_FILE, "state.json", AHEAD_FILE, "learner/.metadata", "learner/__0_0.distcp"}
    assert harmless.keys() == {DRAFTERS_DIR, WEIGHTS_DIR}


@pytest.mark.parametrize(
    "name", [CHECKSUMS_FILE, "state.json", AHEAD_FILE, "learner/.metadata", "learner/__0_0.distcp"]
)
def test_a_file_that_is_missing_is_named(whole: Path, name: str) -> None:
    (whole / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} of step_000003 is missing"):
        readable(whole)


def test_an_earlier_versions_checkpoint_is_taken_and_it_is_said_that_nobody_can_tell(run: Path) -> None:
    unsealed(run / "checkpoints/step_000002")
    found = find_checkpoint(run, None, readable)
    assert found.checkpoint.name == "step_000002"
    ((kind, said),) = found.clear()
    assert kind == "checkpoint_unverified"
    assert "whether its files are damaged cannot be told" in said
    assert "cannot be told" in export(run, run.parent / "out")


def test_the_newest_intact_one_is_gone_on_from_and_the_damaged_one_is_set_aside(run: Path) -> None:
    there = run / "checkpoints"
    flip(there / "step_000002/learner/__0_0.distcp", 77_777)
    found = find_checkpoint(run, None, readable)
    ((kind, said),) = found.clear()
    assert (found.checkpoint.name, kind) == ("step_000001", "checkpoint_damaged")
    assert said.startswith("learner/__0_0.distcp of step_000002 is damaged: its sha256 is not the one that was written")
    assert f"{there / 'step_000002.damaged'} is not used any more: it may be deleted" in said
    assert [path.name for path in checkpoints(there)] == ["step_000001"]
    trainer = make_trainer(run.parent / "model")
    for step in (2, 3, 4):  # written again and pruned, it stays
        write_checkpoint(there, step, trainer.save, {}, keep=1)
    flip(there / "step_000004/learner/__0_0.distcp", 5)
    shutil.copytree(there / "step_000004", there / "step_000002")
    assert sorted(path.name for path in there.iterdir()) == ["step_000002", "step_000002.damaged", "step_000004"]
    with pytest.raises(ResumeError, match="can be used"):
        find_checkpoint(run, None, readable)


def test_where_none_is_intact_all_are_named_and_nothing_changes(run: Path) -> None:
    there = run / "checkpoints"
    flip(there / "step_000001/state.json", 9)
    (there / "step_000002/learner/.metadata").unlink()
    with pytest.raises(ResumeError) as caught:
        find_checkpoint(run, None, readable)
    first, *named = caught.value.message.splitlines()
    assert first == f"--resume: no checkpoint in {there} can be used:"
    assert named[0] == "  learner/.metadata of step_000002 is missing"
    assert named[1].startswith("  state.json of step_000001 is damaged: its sha256")
    assert "bring one of them back from a copy" in str(caught.value.remedy)
    assert [path.name for path in checkpoints(there)] == ["step_000001", "step_000002"]


def test_a_step_is_taken_by_name_and_later_ones_are_kept_aside(run: Path) -> None:
    there = run / "checkpoints"
    with pytest.raises(ResumeError, match="there is no checkpoint of step 7") as caught:
        find_checkpoint(run, 7, readable)
    assert caught.value.remedy == "there are 1, 2"
    found = find_checkpoint(run, 1, readable)
    assert [path.name for path in found.later] == ["step_000002"]
    assert [kind for kind, _ in found.clear()] == ["set_aside"]
    assert sorted(path.name for path in there.iterdir()) == ["step_000001", "step_000002.later"]
    check((there / "step_000002.later").rename(there / "step_000002"))
    flip(there / "step_000001/learner/__0_0.distcp", 7)
    with pytest.raises(ResumeError, match=r"--step 1: learner/__0_0\.distcp of step_000001 is damaged"):
        find_checkpoint(run, 1, readable)


def test_what_can_be_spared_is_spared(whole: Path) -> None:
    flip(whole / DRAFTERS_DIR / "suffix.bin", 3)
    root = whole.parent.parent
    found = find_checkpoint(root, None, partial(check, spare=SPARE))
    ((kind, said),) = found.clear()
    assert (found.checkpoint, kind) == (whole, "drafter_damaged")
    assert said.startswith("drafters/suffix.bin is damaged")
    assert not (whole / DRAFTERS_DIR).exists()
    assert (whole / WEIGHTS_DIR).is_dir()


def test_step_needs_resume(run: Path) -> None:
    said = CliRunner().invoke(app, ["train", str(run / "config.yaml"), "--step", "1"])
    assert said.exit_code == 2
    assert "--step needs --resume" in said.stderr


@pytest.mark.parametrize("use", ["export", "eval"])
@pytest.mark.parametrize("fault", ["flip", "crafted"])
def test_a_damaged_or_foreign_checkpoint_is_neither_exported_nor_evaluated(
    run: Path, tmp_path: Path, use: str, fault: str
) -> None:
    newest, made = run / "checkpoints/step_000002", tmp_path / "made"
    if fault == "flip":
        flip(newest / LEARNER_DIR / "__0_0.distcp", 4321)
        said = r"learner/__0_0\.distcp of step_000002 is damaged"
    else:
        (newest / LEARNER_DIR / ".metadata").write_bytes(pickle.dumps(Touch(made)))
        unsealed(newest)
        said = r"\.metadata .*it names pathlib\.Path\.touch"

    def go() -> Any:
        if use == "export":
            return export(run, tmp_path / "out")
        with find(run, ["data.eval=e.jsonl"]).weights():
            pass

    with pytest.raises(PacelineError, match=said) as caught:
        go()
    assert caught.value.remedy == "step_000001 is intact: --step 1"
    assert not (tmp_path / "out").exists()
    assert not made.exists()
