"""Checkpoints of a drafter: exact, selective, never half of one."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from actors.spot.checkpoints import Checkpoints, find, history, newest
from actors.training import persistence
from actors.training.persistence import save_tensors
from contracts.spot import Checkpointed
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models.checkpoint import load_model
from models.durable import faults
from policies.drafter.lineage import LINEAGE
from tests.spot.support import options_of, record, save_target

STEPS = 5


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> TargetHead:
    return TargetHead.of(load_model(save_target(tmp_path_factory.mktemp("target"))), 0)


class Reports(list[Checkpointed]):
    """In place of the link to the parent."""

    def send(self, events: list[Checkpointed]) -> None:
        self += events


def checkpoints_in(root: Path, keep: int = 2, reports: Reports | None = None) -> Checkpoints:
    return Checkpoints(root, keep, torch.float32, Reports() if reports is None else reports)


def save(checkpoints: Checkpoints, trainer: DrafterTrainer) -> None:
    assert checkpoints.save(trainer.steps, trainer.state_dict())
    checkpoints.wait()


def restored(root: Path, head: TargetHead, **options: object) -> DrafterTrainer:
    trainer = DrafterTrainer(head, options_of(**options), seed=99)
    if (saved := newest(history(root), trainer.state_dict())) is not None:
        trainer.load_state_dict(saved)
    return trainer


@pytest.mark.parametrize("algorithm", ["eagle", "hass"])
def test_a_resumed_trainer_goes_on_bitwise(tmp_path: Path, head: TargetHead, algorithm: str) -> None:
    """Also inside the warm-up of the learning rate, which the first three micro-steps are."""
    for stop_at in (2, 4):
        root = tmp_path / str(stop_at)
        uninterrupted = DrafterTrainer(head, options_of(algorithm=algorithm))
        losses = []
        for seed in range(8):
            if seed == stop_at:
                save(checkpoints_in(root), uninterrupted)
            losses.append(uninterrupted.micro_step([record(seed)]).loss)
        resumed = restored(root, head, algorithm=algorithm)
        assert resumed.steps == stop_at
        assert [resumed.micro_step([record(seed)]).loss for seed in range(stop_at, 8)] == losses[stop_at:]
        for name, tensor in resumed.state_dict().items():
            assert torch.equal(tensor, uninterrupted.state_dict()[name])


def test_what_is_written_is_what_was_there_when_it_was_asked_for(tmp_path: Path, head: TargetHead) -> None:
    """Training goes on while the file is being written."""
    trainer = DrafterTrainer(head, options_of())
    checkpoints = checkpoints_in(tmp_path)
    for seed in range(STEPS):
        trainer.micro_step([record(seed)])
    asked = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    assert checkpoints.save(trainer.steps, trainer.state_dict())
    assert not checkpoints.save(trainer.steps, trainer.state_dict()), "one at a time; nobody waits for the disk"
    trainer.micro_step([record(77)])
    checkpoints.wait()
    for name, tensor in restored(tmp_path, head).state_dict().items():
        assert torch.equal(tensor, asked[name])


def test_nothing_frozen_is_written(tmp_path: Path, head: TargetHead) -> None:
    trainer = DrafterTrainer(head, options_of())
    save(checkpoints_in(tmp_path), trainer)
    trained = sum(p.numel() for p in trainer.model.parameters()) * 4
    written = sum(file.stat().st_size for file in (tmp_path / history(tmp_path)[0]).rglob("*.distcp"))
    assert 3 * trained <= written < 3 * trained + 64 * 1024  # weights and two moments


def test_the_last_k_stay_and_numbers_only_grow(tmp_path: Path, head: TargetHead) -> None:
    """Also when another process goes on, and when the drafter was rolled back to fewer steps."""
    trainer = DrafterTrainer(head, options_of())
    reports = Reports()
    checkpoints = checkpoints_in(tmp_path, keep=2, reports=reports)
    version_1 = None
    for seed in range(3):
        trainer.micro_step([record(seed)])
        version_1 = version_1 or trainer.export()
        save(checkpoints, trainer)
    names = [path.name for path in history(tmp_path)]
    assert names == ["000002_step_00000002", "000003_step_00000003"]
    assert [Path(report.directory).name for report in reports][1:] == names
    assert all(0 < report.blocking_s <= report.seconds for report in reports)
    assert version_1 is not None
    trainer.load(*version_1)
    save(checkpoints_in(tmp_path), trainer)
    assert [path.name for path in history(tmp_path)] == ["000003_step_00000003", "000004_step_00000001"]
    assert restored(tmp_path, head).steps == 1


def test_published_weights_are_found_with_their_optimizer(tmp_path: Path, head: TargetHead) -> None:
    trainer = DrafterTrainer(head, options_of())
    for seed in range(3):
        trainer.micro_step([record(seed)])
    save(checkpoints_in(tmp_path), trainer)
    manifest, _ = trainer.export()
    assert find(tmp_path, manifest.version, manifest.checksum) == history(tmp_path)[-1]
    assert find(tmp_path, manifest.version, manifest.checksum + 1) is None
    assert find(tmp_path, manifest.version + 1, manifest.checksum) is None
    assert find(tmp_path / "none", 1, 1) is None


@pytest.mark.parametrize("links", [True, False])
def test_what_was_read_becomes_the_newest_without_its_tensors_being_written(
    tmp_path: Path, head: TargetHead, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Under another number, as after a roll-back, and whole once the one that it was read from is pruned."""
    trainer, reports = DrafterTrainer(head, options_of()), Reports()
    checkpoints = checkpoints_in(tmp_path, reports=reports)
    for seed in range(2):
        trainer.micro_step([record(seed)])
        save(checkpoints, trainer)
    [good, _] = history(tmp_path)
    expected, facts = newest([good], trainer.state_dict()), json.loads((good / "state.json").read_text())
    file = next(good.rglob("*.distcp"))
    inode, name = file.stat().st_ino, file.relative_to(good)

    def unable(*args: object, **kwargs: object) -> None:
        raise AssertionError("tensors are written") if links else OSError("no links here")

    with monkeypatch.context() as patched:
        patched.setattr(persistence, "save_tensors", unable)
        if not links:
            patched.setattr(os, "link", unable)
        assert checkpoints.save_again(LINEAGE + 1, good)
        checkpoints.wait()
        again = history(tmp_path)[-1]
        assert checkpoints.save_again(LINEAGE + 1, again), "it is the newest"
        checkpoints.wait()
    assert [path.name for path in history(tmp_path)] == ["000002_step_00000002", f"000003_step_{LINEAGE + 1:08d}"]
    assert ((again / name).stat().st_ino == inode) == links
    assert not good.exists()
    assert faults(again) == []
    assert [report.step for report in reports] == [1, 2, LINEAGE + 1]
    assert find(tmp_path, LINEAGE + 1, facts["weights"]) == again
    found = restored(tmp_path, head)
    assert found.steps == LINEAGE + 1
    assert expected is not None
    for key, tensor in found.state_dict().items():
        if key != "counters":
            assert torch.equal(tensor, expected[key])


def test_two_writers_never_use_one_name(tmp_path: Path, head: TargetHead) -> None:
    """Trainers of one drafter may share its history; a mistaken one cannot destroy another's."""
    reports = Reports()

    def write(seed: int) -> None:
        trainer = DrafterTrainer(head, options_of(), seed=seed)
        checkpoints = checkpoints_in(tmp_path, keep=100, reports=reports)
        for _ in range(5):
            save(checkpoints, trainer)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({report.directory for report in reports}) == len(reports)
    assert len(history(tmp_path)) == len(reports)
    assert restored(tmp_path, head).steps == 0


def test_what_a_living_writer_has_half_written_stays_and_a_killed_ones_goes(
    tmp_path: Path, head: TargetHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers of one machine share a history: the one that is faster must not take the slower one for a killed one."""
    halfway, go_on = threading.Event(), threading.Event()

    def slowly(tensors: Mapping[str, torch.Tensor], directory: Path, *, distributed: bool) -> None:
        save_tensors(tensors, directory, distributed=distributed)
        halfway.set()
        assert go_on.wait(120)

    (tmp_path / ".writing-000001").mkdir()  # of a writer that was killed
    slow, fast = (DrafterTrainer(head, options_of(), seed=seed) for seed in range(2))
    waiting, others = checkpoints_in(tmp_path), checkpoints_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(persistence, "save_tensors", slowly)
        assert waiting.save(slow.steps, slow.state_dict())
        assert halfway.wait(120)
    for seed in range(4):
        fast.micro_step([record(seed)])
        save(others, fast)
    assert sorted(path.name for path in tmp_path.glob(".writing-*")) == [".writing-000002"]
    go_on.set()
    waiting.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000005_step_00000003", "000006_step_00000004"]
    assert restored(tmp_path, head).steps == 4


def test_a_damaged_one_is_passed_over(tmp_path: Path, head: TargetHead, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = DrafterTrainer(head, options_of())
    checkpoints = checkpoints_in(tmp_path, keep=3)
    for seed in range(3):
        trainer.micro_step([record(seed)])
        save(checkpoints, trainer)
    second, third = history(tmp_path)[1:]
    shutil.rmtree(third / "tensors")
    file = next(second.rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert restored(tmp_path, head).steps == 1
    said = capfd.readouterr().err
    assert f"{second} is not used" in said
    assert f"{third} is not used" in said
    assert restored(tmp_path, head, algorithm="eagle3").steps == 0, "another network's is not used either"


def test_one_flipped_bit_is_enough_to_be_passed_over(
    tmp_path: Path, head: TargetHead, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = DrafterTrainer(head, options_of())
    for seed in range(2):
        trainer.micro_step([record(seed)])
        save(checkpoints_in(tmp_path), trainer)
    (path,) = (history(tmp_path)[-1] / "tensors").glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert restored(tmp_path, head).steps == 1
    assert f"tensors/{path.name} is damaged" in capfd.readouterr().err


def test_a_disk_that_takes_nothing_stops_nothing(
    tmp_path: Path, head: TargetHead, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = DrafterTrainer(head, options_of())
    checkpoints = checkpoints_in(tmp_path / "file")
    save(checkpoints, trainer)
    assert "checkpoint of micro-step 0 was not written" in capfd.readouterr().err
    save(checkpoints, trainer)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from actors.spot.checkpoints import Checkpoints, history, newest
torch.set_num_threads(1)
from actors.training.persistence import save_tensors, load_tensors
root, kills = Path(sys.argv[1]), int(sys.argv[2])

def state(value):
    return {f"model.{i}": torch.full((64, 1024), float(value)) for i in range(8)} | {"counters": torch.tensor([value])}

def write():  # every tensor of checkpoint n is n
    value = restored() or 0
    checkpoints = Checkpoints(root, 2, torch.float32, SimpleNamespace(send=len))
    while True:
        value += 1
        assert checkpoints.save(value, state(value))
        checkpoints.wait()

def restored():
    found = newest(history(root), state(0))
    if found is None:
        return None
    values = {float(v) for tensor in found.values() for v in (tensor.min(), tensor.max())}
    assert len(values) == 1, values
    assert history(root)[-1].name.endswith(f"_{int(values.pop()):08d}"), "the newest is whole"
    return int(found["counters"])

rng, last, longest_s = random.Random(0), 0, 0.25
until_s = time.monotonic() + 60
while (kills > 0 and time.monotonic() < until_s) or last <= 5:
    kills -= 1
    pid = os.fork()
    if not pid:
        try:
            write()
        finally:
            os._exit(1)
    time.sleep(rng.uniform(0.02, longest_s))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the writer failed by itself"
    now = restored() or 0
    assert now >= last, (now, last)
    longest_s *= 1 + (now == last)  # a busy machine may write nothing before a kill
    last = now
print(last)
"""


def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path: Path) -> None:
    """25 writers, or those of a minute, are killed while they save without a pause; after each, the newest directory is
    whole. A checkpoint is written with the lowest priority: beside four busy processes it takes ten seconds."""
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), "."])}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "root"), "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5
    assert len(history(tmp_path / "root")) <= 3
