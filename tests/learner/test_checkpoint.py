"""Checkpoints exist completely or not at all; what is resumed is bitwise what was not interrupted."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from actors.training.checkpoint import (
    LEARNER_DIR,
    CheckpointError,
    check,
    checkpoints,
    latest_checkpoint,
    read_state,
)
from config.learner import OptimizerOptions
from config.objective import ObjectiveOptions
from tests.checkpoints import write_checkpoint
from tests.learner.tiny import make_demonstrations, make_sequences, make_trainer


def save(directory: Path) -> None:
    (directory / "weights").write_bytes(b"x" * 100)


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (3, 10, 20, 100):
        path = write_checkpoint(tmp_path, step, save, {"reward": step / 2}, keep=2)
        assert (path / LEARNER_DIR / "weights").stat().st_size == 100
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000020", "step_000100"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000020", "step_000100"]
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert read_state(latest) == {"step": 100, "checksums": "checksums.json", "reward": 50.0}


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, save, {"try": 1}, keep=3)
    path = write_checkpoint(tmp_path, 1, save, {"try": 2}, keep=3)
    assert read_state(path)["try"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, 1, save, {}, keep=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if nothing was removed any more
    write_checkpoint(tmp_path, 2, save, {}, keep=1)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000002"]


def test_incomplete_directories_are_not_checkpoints(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5, save, {}, keep=1)
    (tmp_path / "step_000009" / LEARNER_DIR).mkdir(parents=True)  # no state.json
    (tmp_path / ".writing-step_000010").mkdir()
    (tmp_path / "step_12").mkdir()
    (tmp_path / "notes").mkdir()
    assert [p.name for p in checkpoints(tmp_path)] == ["step_000005"]


def test_a_failing_learner_leaves_nothing_behind(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, save, {}, keep=1)

    def lost(directory: Path) -> None:
        save(directory)
        raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        write_checkpoint(tmp_path, 2, lost, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_state_that_is_not_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 2, save, {"x": object()}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_state_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 2, save, {}, keep=1)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json of step_000002 cannot be read: "):
        read_state(path)


def test_disk_full_while_the_learner_writes(tmp_path: Path, model_dir: Path) -> None:
    """A real limit under torch's own writer: files may not grow past 4 KiB, as on a disk with that much left."""
    trainer = make_trainer(model_dir)
    write_checkpoint(tmp_path, 1, trainer.save, {"ok": True}, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 was not written .* step_000001 is intact\. Free space"):
            write_checkpoint(tmp_path, 2, trainer.save, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    make_trainer(model_dir).load(tmp_path / "step_000001" / LEARNER_DIR)


@pytest.mark.parametrize("name", ["weights", "state.json"])
def test_disk_full_anywhere(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, 1, save, {}, keep=1)
    real = os.fsync

    def full(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(tmp_path, 2, save, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from actors.training import checkpoint
    moment, root = sys.argv[1], Path(sys.argv[2])
    die = lambda *a: os.kill(os.getpid(), signal.SIGKILL)
    def save(directory):
        (directory / "weights").write_bytes(b"y" * 10)
        if moment == "saving": die()
    count = 0
    rename = Path.rename
    def renamed(self, target):
        global count
        if moment == f"before rename {count}": die()
        count += 1
        result = rename(self, target)
        if moment == f"after rename {count - 1}": die()
        return result
    Path.rename = renamed
    if moment == "syncing": checkpoint._sync_tree = die
    if moment == "pruning": checkpoint.checkpoints = die
    with checkpoint.new_checkpoint(root, int(sys.argv[3]), {"new": True}, keep=1) as directory:
        save(directory)
"""


@pytest.mark.parametrize(
    ("moment", "step", "survivor", "new"),
    [
        ("saving", 2, 1, False),
        ("syncing", 2, 1, False),
        ("before rename 0", 2, 1, False),
        ("after rename 0", 2, 2, True),
        ("pruning", 2, 2, True),
        ("before rename 1", 1, 0, False),  # replacing step 1: between the two renames, the one before it is latest
        ("after rename 1", 1, 1, True),
    ],
)
def test_killed_at_any_moment(tmp_path: Path, moment: str, step: int, survivor: int, new: bool) -> None:
    for old in (0, 1):
        write_checkpoint(tmp_path, old, save, {"new": False}, keep=2)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), moment, str(tmp_path), str(step)]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert read_state(latest) == {"step": survivor, "checksums": "checksums.json", "new": new}
    check(latest)
    assert (latest / LEARNER_DIR / "weights").is_file()
    write_checkpoint(tmp_path, 7, save, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000007"]  # leftovers are gone


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kl", ["none", "k3"])
def test_resume_is_exact(model_dir: Path, tmp_path: Path, optimizer: str, kl: str) -> None:
    objective = ObjectiveOptions(kl=kl, kl_coef=0.1)
    options = OptimizerOptions(name=optimizer, lr=3e-3, warmup_steps=3, schedule="linear")

    def fresh(seed: int) -> "object":
        return make_trainer(model_dir, objective=objective, optimizer=options, seed=seed, mini_batches=2)

    def go(trainer: object, steps: range) -> list[object]:
        results = [trainer.rl_step(make_sequences(seed=i), temperature=1.0) for i in steps]  # type: ignore[attr-defined]
        return [(r.losses, r.grad_norms, r.metrics) for r in results]

    whole = fresh(5)
    whole.sft_step(make_demonstrations())  # type: ignore[attr-defined]
    go(whole, range(2))
    path = write_checkpoint(tmp_path, 2, whole.save, {}, keep=1)  # type: ignore[attr-defined]
    resumed = fresh(99)  # other weights: everything must come from the checkpoint, the reference too
    resumed.load(path / LEARNER_DIR)  # type: ignore[attr-defined]
    assert go(resumed, range(2, 5)) == go(whole, range(2, 5))


def test_saved_before_the_first_step(model_dir: Path, tmp_path: Path) -> None:
    first = make_trainer(model_dir)
    first.save(tmp_path / "c")
    second = make_trainer(model_dir, seed=9)
    second.load(tmp_path / "c")
    assert second.sft_step(make_demonstrations()).losses == first.sft_step(make_demonstrations()).losses
    assert second.sft_step(make_demonstrations()).losses == first.sft_step(make_demonstrations()).losses


def test_a_checkpoint_of_something_else_is_refused(model_dir: Path, tmp_path: Path) -> None:
    make_trainer(model_dir).save(tmp_path / "c")
    muon = make_trainer(model_dir, optimizer=OptimizerOptions(name="muon"))
    with pytest.raises(CheckpointError, match=r"does not fit this model.*momentum_buffer"):
        muon.load(tmp_path / "c")
    with pytest.raises(FileNotFoundError):
        muon.load(tmp_path / "missing")


def test_state_holds_what_json_holds(tmp_path: Path) -> None:
    state = {"order": {"epoch": 2, "position": 17}, "best": None, "name": "a"}
    path = write_checkpoint(tmp_path, 1, save, state, keep=1)
    assert json.loads((path / "state.json").read_text()) == {"step": 1, "checksums": "checksums.json", **state}
