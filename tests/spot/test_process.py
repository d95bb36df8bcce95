"""The spot trainer in its own process: the same numbers, a bounded life, and a reason whenever it ends."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from actors.spot.checkpoints import history, newest
from actors.spot.feeding import MOST_PACKS, WANTED_PACKS
from actors.spot.process import SpotTrainer, spawn_trainer
from config.model import ModelOptions
from contracts.spot import (
    Checkpointed,
    ContinueFrom,
    MicroStep,
    NeedData,
    PublishDrafter,
    SetTarget,
    Skipped,
    TrainedWeights,
    TrainerEvent,
    TrainFailed,
    TrainStarted,
    TrainStopped,
)
from drafter.eagle.files import load_eagle, save_eagle
from drafter.training.cut import cut_head
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models import weights
from models.checkpoint import hf_state_dict, init_model, load_model
from tests.engine.support import write_config
from tests.spot.support import (
    DEADLINE_S,
    HIDDEN,
    VOCAB,
    feed,
    micro_steps,
    only,
    options_of,
    record,
    save_target,
    spawn,
    start,
    stop,
    until,
    until_a,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def shared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpotTrainer]:
    """One warm trainer for the tests that do not end it; each takes a session of its own."""
    trainer = spawn(target, tmp_path_factory.mktemp("shared"))
    yield trainer
    trainer.close()


def begin(trainer: SpotTrainer, session: int) -> None:
    """`session` must grow from test to test. What came before is read first."""
    trainer.poll(0.0)
    trainer.send(start(session, session, ("a",), 0))
    started = until_a(trainer, TrainStarted)
    assert (started.session, started.epoch) == (session, session)
    assert started.store.startswith("127.0.0.1:")


def end(trainer: SpotTrainer) -> TrainStopped:
    trainer.send(stop())
    return until_a(trainer, TrainStopped)


def published(trainer: SpotTrainer) -> TrainedWeights:
    trainer.send(PublishDrafter())
    return until_a(trainer, TrainedWeights)


def quiet(trainer: SpotTrainer) -> list[TrainerEvent]:
    """What comes before it has surely applied every command so far."""
    trainer.send(PublishDrafter())
    return until(trainer, lambda events: bool(only(events, TrainedWeights)))


def in_process(target: Path, **options: object) -> DrafterTrainer:
    return DrafterTrainer(TargetHead.of(load_model(target), 0), options_of(**options), seed=0)


def wait_for_end(pid: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the child lives on"
        time.sleep(0.02)


def test_a_child_computes_what_a_trainer_here_computes(target: Path, tmp_path: Path) -> None:
    """Losses, weights, the target's next version, other drafter weights."""
    trainer, here = spawn(target, tmp_path), in_process(target)
    stopped = end(trainer)
    assert (stopped.session, stopped.step) == (0, 0), "a stop before the first start is answered too"
    with pytest.raises(ValueError, match="rank 1"):
        trainer.send(start(1, 1, ("a",), 1))
    begin(trainer, 1)
    for seed, step in enumerate(micro_steps(trainer, 4)):
        expected = here.micro_step([record(seed)])
        assert (step.step, step.session, step.epoch, step.members) == (seed + 1, 1, 1, 1)
        assert (step.loss, step.accuracy, step.top3_accuracy) == (
            expected.loss,
            expected.accuracy,
            expected.top3_accuracy,
        )
        assert (step.tokens, step.target_version) == (39, 0)
        assert step.started_s <= time.time()
        assert 0 < step.seconds < DEADLINE_S
    manifest, payload = here.export()
    answer = published(trainer)
    assert answer.manifest == manifest
    assert np.array_equal(answer.payload, payload)

    config = write_config(tmp_path / "next")
    next_target = init_model(config, 5)
    whole, buffer = weights.pack(hf_state_dict(next_target), version=3)
    trainer.send(SetTarget(*cut_head(whole, buffer)))
    buffer[:] = 0  # It was copied.
    here.set_head(TargetHead.of(next_target, 3))
    trainer.send(feed(record(50, version=3), record(51, rows=20)))
    step = until_a(trainer, MicroStep)
    assert (step.loss, step.target_version, step.tokens) == (
        here.micro_step([record(50, version=3), record(51, rows=20)]).loss,
        3,
        58,
    )

    # Of a target whose adapters alone were handed over, what the drafter shares is as it was.
    trainer.send(SetTarget(*cut_head(*weights.pack({"base_model.model.x.lora_A.weight": torch.ones(2)}, version=4))))
    here.set_head(dataclasses.replace(here.head, version=4))
    trainer.send(feed(record(52, version=4, rows=39)))
    step = until_a(trainer, MicroStep)
    assert (step.loss, step.target_version) == (here.micro_step([record(52, version=4, rows=39)]).loss, 4)

    trainer.send(ContinueFrom(manifest, payload))  # Rolled back to four micro-steps.
    here.load(manifest, payload)
    trainer.send(feed(record(60)))
    step = until_a(trainer, MicroStep)
    assert (step.step, step.loss) == (5, here.micro_step([record(60)]).loss)
    stopped = end(trainer)
    assert (stopped.session, stopped.step, stopped.reason) == (1, 5, "")
    assert published(trainer).manifest == here.export()[0], "also when standing still"
    trainer.close()
    assert trainer.poll(0.0) == []


def test_it_asks_for_data_and_takes_no_more_than_a_few_packs(shared: SpotTrainer) -> None:
    shared.poll(0.0)
    shared.send(start(2, 2, ("a",), 0))
    assert until_a(shared, NeedData) == NeedData(WANTED_PACKS * 64)
    shared.send(feed(*(record(seed, rows=64) for seed in range(40))))
    events = until(shared, lambda found: len(only(found, MicroStep)) == MOST_PACKS and bool(only(found, NeedData)))
    (skipped,) = only(events, Skipped)
    assert skipped.records == 40 - MOST_PACKS
    assert "feed what NeedData asks for" in skipped.reason
    assert only(events, NeedData)[0].tokens == (WANTED_PACKS - 1) * 64
    end(shared)


def test_records_are_packed_up_to_the_limit_and_long_ones_are_whole(shared: SpotTrainer) -> None:
    begin(shared, 3)
    shared.send(
        feed(record(0, rows=30), record(1, rows=30), record(2, rows=10), record(3, rows=200), record(4, rows=64))
    )
    events = until(shared, lambda found: len(only(found, MicroStep)) == 4)
    assert [step.tokens for step in only(events, MicroStep)] == [58, 9, 199, 63]
    end(shared)


def test_bad_records_are_counted_with_the_reason_and_the_others_learned_from(shared: SpotTrainer) -> None:
    good = record(0)
    flawed = {
        "vocabulary": record(1, tokens=np.full(41, VOCAB, np.int32)),
        "never fed": record(2, first=1),
        "dtype float16": record(3, dtype="float16"),
        "rows of 48 scalars": record(4, width=48),
        "rows of 128 bytes for 64": record(5, width=64),
        "not finite": record(6, states=np.full((40, HIDDEN), np.nan, np.float32).view(np.uint8)),
    }
    begin(shared, 4)
    shared.send(feed(*flawed.values(), good))
    shared.send(feed(good))
    events = until(shared, lambda found: len(only(found, Skipped)) >= 6 and len(only(found, MicroStep)) >= 1)
    reasons = [skipped.reason for skipped in only(events, Skipped)]
    for words in flawed:
        assert sum(words in reason for reason in reasons) == 1, (words, reasons)
    assert np.isfinite(only(events, MicroStep)[-1].loss)
    end(shared)


def test_stop_start_and_late_commands(shared: SpotTrainer) -> None:
    begin(shared, 5)
    first = micro_steps(shared, 1)[0].step
    stopped = end(shared)
    assert (stopped.session, stopped.step) == (5, first)
    assert 0 <= stopped.seconds < DEADLINE_S
    assert end(shared).session == 5, "every stop is answered, also while it stands still"
    shared.send(feed(record(1), record(2)))  # Late: the session has ended.
    shared.send(start(5, 5, ("a",), 0))  # Late, or said twice.
    shared.send(start(4, 9, ("a",), 0))  # Of an older session.
    assert not [e for e in quiet(shared) if isinstance(e, TrainStarted | MicroStep)]
    shared.send(start(5, 6, ("a",), 0))  # The same session takes it back, as another epoch.
    shared.send(start(5, 6, ("a",), 0))
    events = quiet(shared)
    assert len(only(events, TrainStarted)) == 1
    assert not only(events, MicroStep), "what was fed late is gone"
    assert micro_steps(shared, 1)[0].step == first + 1
    shared.send(stop())
    shared.send(stop())
    assert len(only(until(shared, lambda found: len(only(found, TrainStopped)) == 2), TrainStopped)) == 2


def test_stop_comes_before_what_is_queued(shared: SpotTrainer) -> None:
    begin(shared, 6)
    shared.send(feed(*(record(seed, rows=2000) for seed in range(4))))
    shared.send(stop())
    events = until(shared, lambda found: bool(only(found, TrainStopped)))
    assert len(only(events, MicroStep)) <= 1


def test_kills_leave_a_state_that_is_gone_on_from_bitwise(target: Path, tmp_path: Path) -> None:
    """Killed in a micro-step after a checkpoint: the next process computes what an uninterrupted one would have."""
    here = in_process(target)
    expected = [here.micro_step([record(seed)]).loss for seed in range(6)]
    trainer = spawn(target, tmp_path, checkpoint_every=2)
    begin(trainer, 1)
    trainer.send(feed(record(0)))
    until_a(trainer, MicroStep)
    trainer.send(feed(record(1)))
    saved = until_a(trainer, Checkpointed)
    assert (saved.step, Path(saved.directory).parent) == (2, tmp_path)
    trainer.send(feed(record(99, rows=5000)))
    time.sleep(0.1)
    trainer.kill()
    assert "SIGKILL" in until_a(trainer, TrainFailed).reason
    again = spawn(target, tmp_path, checkpoint_every=2)
    begin(again, 1)  # The same session may go on.
    assert [step.loss for step in micro_steps(again, 4, 2)] == expected[2:]
    end(again)
    until_a(again, Checkpointed)
    again.close()


def test_what_a_session_learned_is_saved_at_its_end_and_known_again(target: Path, tmp_path: Path) -> None:
    """Weights that come back (another trainer published them) come back with their optimizer, if it was saved here."""
    trainer, here = spawn(target, tmp_path, checkpoint_keep=5), in_process(target)
    begin(trainer, 1)
    micro_steps(trainer, 2)
    end(trainer)
    assert until_a(trainer, Checkpointed).step == 2
    old = published(trainer)
    begin(trainer, 2)
    micro_steps(trainer, 3, 2)
    end(trainer)
    assert until_a(trainer, Checkpointed).step == 5
    trainer.send(ContinueFrom(old.manifest, old.payload))
    back = until_a(trainer, Checkpointed)
    assert back.step == 2, "a roll-back outlives the process"
    [first, _, again] = (next(path.rglob("*.distcp")).stat() for path in history(tmp_path))
    assert again.st_ino == first.st_ino, "its tensors are not written again"
    begin(trainer, 3)
    for seed in (0, 1, 70):
        expected = here.micro_step([record(seed)]).loss
    assert micro_steps(trainer, 1, 70)[0].loss == expected
    os.kill(trainer.pid, signal.SIGSTOP)
    trainer.send(stop())
    start_s = time.monotonic()
    trainer.kill()
    assert time.monotonic() - start_s < 10, "also of a child that does not run"
    assert not psutil.pid_exists(trainer.pid)
    assert in_process_restored(target, tmp_path) == 2


def test_a_trainer_that_is_idle_reads_what_another_one_published_when_it_trains(target: Path, tmp_path: Path) -> None:
    """Its engine decodes by then, on the same cores. What the other one saved is not written again."""
    first, second = spawn(target, tmp_path), spawn(target, tmp_path)
    begin(first, 1)
    micro_steps(first, 2)
    end(first)
    saved = Path(until_a(first, Checkpointed).directory)
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    answer = published(first)
    process = psutil.Process(second.pid)
    end(second)  # It has applied every command so far.
    before = process.io_counters().read_chars
    second.send(ContinueFrom(answer.manifest, answer.payload))
    end(second)
    assert process.io_counters().read_chars - before < size / 2
    begin(second, 2)
    assert process.io_counters().read_chars - before >= size
    expected = [step.loss for step in micro_steps(second, 1, 70)]
    begin(first, 3)
    assert [step.loss for step in micro_steps(first, 1, 70)] == expected
    assert history(tmp_path) == [saved]
    first.close()
    second.close()


def in_process_restored(target: Path, checkpoints: Path) -> int:
    here = in_process(target)
    if (saved := newest(history(checkpoints), here.state_dict())) is not None:
        here.load_state_dict(saved)
    return here.steps


def test_nothing_is_left_behind(target: Path, tmp_path: Path) -> None:
    """No descriptor here or there, no memory, no zombie; and commands to the dead are no error."""
    ours = psutil.Process()
    before = ours.num_fds()
    trainer = spawn(target, tmp_path)
    child = psutil.Process(trainer.pid)
    begin(trainer, 1)
    counts = []
    for round_ in range(4):
        micro_steps(trainer, 3, round_)
        answer = published(trainer)
        trainer.send(ContinueFrom(answer.manifest, answer.payload))
        del answer
        quiet(trainer)
        counts.append(child.num_fds())
    assert counts[-1] <= counts[0], "what came as memory is closed, now or with the next garbage collection"
    os.kill(trainer.pid, signal.SIGKILL)
    assert "SIGKILL" in until_a(trainer, TrainFailed).reason
    assert trainer.poll(0.0) == []
    trainer.send(stop())
    trainer.send(PublishDrafter())
    for end_it in (trainer.kill, trainer.kill, trainer.close):
        end_it()
    trainer.send(feed(record(0)))
    trainer.send(start(2, 2, ("a",), 0))
    assert ours.num_fds() <= before  # fewer: what earlier tests left was collected meanwhile
    assert not child.is_running()


def test_the_child_ends_with_its_parent(target: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.spot.test_process import *\n"
        f"t = spawn(Path({str(target)!r}), Path({str(tmp_path)!r}))\nbegin(t, 1)\n"
        "t.send(feed(record(0, rows=8000)))\nprint(t.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for_end(pid)


def test_it_starts_from_a_directory_yields_the_cpu_and_refuses_another_target(target: Path, tmp_path: Path) -> None:
    """A drafter of another variant, too."""
    here = in_process(target)
    here.micro_step([record(0)])
    save_eagle(here.model, tmp_path / "drafter")
    trainer = spawn_trainer(
        options_of(algorithm="hass"),
        ModelOptions(path=str(target)),
        init=tmp_path / "drafter",
        checkpoint_dir=tmp_path / "checkpoints",
        threads=1,
        device="cpu",
        niceness=7,
    )
    assert isinstance(trainer, SpotTrainer)
    assert psutil.Process(trainer.pid).nice() == min(psutil.Process().nice() + 7, 19)
    begin(trainer, 1)
    config = here.head.config
    model = load_eagle(tmp_path / "drafter", config, dtype=torch.float32, device="cpu", batch_invariant=False)
    options = options_of(algorithm="hass")
    rate = 0.1 * options.learning_rate  # what was fitted is followed, not fitted again
    hass = DrafterTrainer(here.head, options.model_copy(update={"learning_rate": rate}), model=model)
    losses = [hass.micro_step([record(seed)]).loss for seed in range(3)]
    assert [step.loss for step in micro_steps(trainer, 3)] == losses
    other = init_model(write_config(tmp_path / "other", vocab_size=50), 0)
    trainer.send(SetTarget(*cut_head(*weights.pack(hf_state_dict(other), version=1))))
    assert "version 1: model.embed_tokens.weight is [50, 32]" in until_a(trainer, TrainFailed).reason
    trainer.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "/nonexistent/model"}, "/nonexistent/model"),
        ({"init": "/nonexistent/drafter"}, "/nonexistent/drafter"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"start_timeout_s": 0.01}, "not ready within"),
    ],
)
def test_what_keeps_a_trainer_from_starting_is_said(
    target: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    path = str(change.pop("model", target))
    with pytest.raises(RuntimeError, match=words):
        spawn_trainer(options_of(), ModelOptions(path=path), checkpoint_dir=tmp_path, **change)


def test_the_parent_does_not_import_torch() -> None:
    code = "import sys, actors.spot.process; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
