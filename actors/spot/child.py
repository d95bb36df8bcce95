"""The child's end of a spot trainer: the loop around the drafter's trainer.

A thread takes commands off the socket; the main thread applies them between micro-steps. A micro-step is never
interrupted, but it does not wait long for other members once this one has a command to stop (`actors.spot.members`).
"""

import os
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import assert_never

import torch

from actors.pacing import Pacer
from actors.processes.child import hear, parent_link
from actors.processes.link import Close, Link, Ready
from actors.spot import wire
from actors.spot.checkpoints import Checkpoints, find, history, newest
from actors.spot.feeding import Feeding
from actors.spot.groups import Transport
from actors.spot.members import BrokenGroupError, Members
from actors.spot.rendezvous import LIMIT_S
from actors.spot.residence import Residence
from contracts.spot import (
    ContinueFrom,
    MicroStep,
    NeedData,
    PublishDrafter,
    SetTarget,
    Skipped,
    SpotCommand,
    StartTraining,
    StopTraining,
    TrainedWeights,
    TrainerEvent,
    TrainFailed,
    TrainOn,
    TrainSession,
    TrainStarted,
    TrainStopped,
)
from drafter.eagle.files import load_eagle
from drafter.training.cut import HEAD_TENSORS
from drafter.training.fit import PlateauRule
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer, MicroStepResult
from models.config import ModelConfig, read_config
from models.device import choose_device
from models.directory import SafetensorsDirectory
from models.rope import RopeTable

_GATHER_S, _STARVE_S, _JOIN_S = 0.005, 0.02, 0.05  # between checks for members, for data, for joining members
_WRITTEN_WITHIN_S = 5.0  # limit of a running write when other weights arrive


def main() -> None:
    with parent_link(TrainFailed) as link:
        _serve(link)


def _serve(link: Link) -> None:
    start: wire.TrainerStart = link.receive()
    with suppress(OSError):
        os.nice(start.niceness)
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    loop = SpotLoop(link, start)
    link.send([Ready()])
    loop.run()


class Inbox(queue.SimpleQueue[SpotCommand | Close]):
    """Queue of commands. `stop` is set while one of them requires the trainer to stop."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.stopped_cpu_s = 0.0  # processor seconds of this process when the last of those came
        self._lock = threading.Lock()
        self._stops = 0

    def put(self, item: SpotCommand | Close, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, StopTraining | Close):
            with self._lock:
                self._stops += 1
                self.stopped_cpu_s = time.process_time()
                self.stop.set()
        super().put(item, block, timeout)

    def take(self, timeout_s: float | None) -> SpotCommand | Close | None:
        """Return the next command, waiting up to timeout_s (None: for ever) for it."""
        try:
            command = self.get(timeout=timeout_s) if timeout_s != 0 else self.get_nowait()
        except queue.Empty:
            return None
        if isinstance(command, StopTraining | Close):
            with self._lock:
                self._stops -= 1
                if not self._stops:
                    self.stop.clear()
        return command


class SpotLoop:
    """Main loop of one trainer: idle, or training in sessions."""

    def __init__(self, link: Link, start: wire.TrainerStart) -> None:
        self._link, self._options = link, start.options
        self._pacer = None if start.pace is None else Pacer(start.pace, "trainer")
        device = torch.device(choose_device(start.device, "rollout.engine.device"))
        home = _build(start)
        self._residence = Residence(home, device)
        self._checkpoints = Checkpoints(
            start.checkpoint_dir, start.options.checkpoint_keep, home.head.embedding.dtype, link
        )
        if (saved := newest(history(start.checkpoint_dir), home.state_dict())) is not None:
            home.load_state_dict(saved)
        self._saved_step = home.steps
        self._inbox = Inbox()
        transport = Transport(device, start.options.collectives)
        self._members = Members(start.host, transport, self._inbox.stop)
        config = home.head.config
        fused = 3 if home.model.kind == "eagle3" else 1
        self._feeding = Feeding(
            start.options.micro_step_tokens, config.vocab_size, config.hidden_size, fused * config.hidden_size
        )
        self._newest = (0, 0)  # latest session and epoch
        self._published: ContinueFrom | None = None  # weights to continue from, not read yet
        self._entered_cpu_s = self._told_cpu_s = time.process_time()
        hear(link, self._inbox)

    @property
    def trainer(self) -> DrafterTrainer:
        return self._residence.trainer

    def run(self) -> None:
        """Run until the parent closes it."""
        while True:
            command = self._inbox.take(self._patience_s())
            if command is None:
                self._round()
            elif isinstance(command, Close):
                self._members.leave()
                self._checkpoints.wait(1.0)
                return
            else:
                self._apply(command)

    def _patience_s(self) -> float | None:
        """Return how long to wait for a command before the next round."""
        if self._members.session is None:
            return None
        if not self._members.count:
            return _GATHER_S
        if len(self._feeding):
            return 0.0
        if self._members.count > 1:
            return _STARVE_S
        return None if self._members.settled else _JOIN_S

    # Commands.

    def _apply(self, command: SpotCommand) -> None:
        match command:
            case StartTraining(session):
                self._enter(session)
            case TrainOn(records):
                if self._members.session is not None:  # otherwise it is late: the session has ended
                    self._tell(*self._feeding.add(records))
            case StopTraining(at_s):
                self._stop(at_s)
            case SetTarget(manifest, memory):
                config = self.trainer.head.config
                if manifest.tensors:
                    self._residence.set_head(TargetHead.unpacked(config, manifest, memory, pin=self._residence.pins))
                else:  # adapters: they leave the weights that a drafter shares unchanged
                    self._residence.same_head(manifest.version)
            case PublishDrafter():
                self._catch_up()
                self._tell(TrainedWeights(*self.trainer.export()))
            case ContinueFrom():
                # They come while the engine starts to decode: to read them then would take its cores.
                self._published, manifest = command, command.manifest
                found = find(self._checkpoints.root, manifest.version, manifest.checksum)
                if self._members.session is not None or not self._checkpoints.is_newest(found, manifest.version):
                    self._catch_up()
            case _:
                assert_never(command)

    def _enter(self, session: TrainSession) -> None:
        if (session.session, session.epoch) <= self._newest:
            return  # late, or a repetition
        if self._members.session is None:
            self._entered_cpu_s = time.process_time()
        self._newest = session.session, session.epoch
        self._catch_up()
        self._residence.move_in()
        store = self._members.enter(session)
        self._tell(TrainStarted(session.session, session.epoch, store))
        self._ask()

    def _stop(self, at_s: float, reason: str = "") -> None:
        session, led = self._members.session, self._members.leads
        self._members.leave()
        self._feeding.clear()
        self._residence.move_out()
        number = session.session if session else self._newest[0]
        stopped = TrainStopped(number, self.trainer.steps, time.time() - at_s, reason, self._cpu_s(session is not None))
        self._tell(stopped)
        if led:
            self._save()

    def _cpu_s(self, in_session: bool) -> float:
        """Return the process's CPU seconds since the last call, less those of the session up to the command to stop."""
        now_s = time.process_time()
        told_s, self._told_cpu_s = self._told_cpu_s, now_s
        ended_s = self._inbox.stopped_cpu_s if self._inbox.stopped_cpu_s > self._entered_cpu_s else now_s
        return now_s - told_s - (ended_s - self._entered_cpu_s if in_session else 0.0)

    def _catch_up(self) -> None:
        """Continue from the weights that came, with their optimizer state if a checkpoint here has it."""
        published, self._published = self._published, None
        if published is None:
            return
        manifest, trainer = published.manifest, self.trainer
        if trainer.steps == manifest.version and trainer.export()[0].checksum == manifest.checksum:
            return
        self._members.part()
        found = find(self._checkpoints.root, manifest.version, manifest.checksum)
        saved = None if found is None else newest([found], trainer.state_dict())
        if saved is None:
            trainer.load(manifest, published.weights)
        else:
            trainer.load_state_dict(saved)
        trainer.renumber(manifest.version)
        self._saved_step = -1
        self._checkpoints.wait(_WRITTEN_WITHIN_S)  # a save during a write would be skipped, and the roll-back lost
        if found is None or saved is None:
            self._save()
        elif self._checkpoints.save_again(trainer.steps, found):
            self._saved_step = trainer.steps

    # Micro-steps.

    def _round(self) -> None:
        members, trainer = self._members, self.trainer
        try:
            if members.gather(trainer):
                self._micro_step()
        except BrokenGroupError as error:
            print(f"micro-step {trainer.steps + 1} is dropped: {error}", file=sys.stderr, flush=True)
        if members.waited_s > 2 * LIMIT_S:
            self._stop(time.time(), members.missing)

    def _micro_step(self) -> None:
        members, trainer = self._members, self.trainer
        session, count = members.session, members.count
        assert session is not None
        records = self._feeding.next_pack()
        self._ask()
        if not records and count == 1:
            return
        reduce = members.reduce if count > 1 else None
        started_s, start_s = time.time(), time.perf_counter()
        try:
            result = trainer.micro_step(records, reduce=reduce)
        except ValueError as error:
            self._tell(Skipped(len(records), str(error)))
            result = trainer.micro_step([], reduce=reduce)  # keeps the others from waiting
        except BrokenGroupError:
            self._feeding.put_back(records)
            raise
        if self._pacer is not None:
            self._pacer.hold("micro-step", start_s, self._pacer.pace.micro_step_s)
        seconds = time.perf_counter() - start_s
        if result.updated and result.positions:
            self._tell(_event(result, trainer, session, count, started_s, seconds))
        elif result.positions:
            self._tell(Skipped(len(records), "their gradient is not finite"))
        if result.updated and session.rank == 0 and trainer.steps % self._options.checkpoint_every == 0:
            self._save()

    def _ask(self) -> None:
        if rows := self._feeding.wanted_rows():
            self._tell(NeedData(rows))

    def _save(self) -> None:
        """Save a checkpoint if weights changed since the last one, unless that is still being written."""
        trainer = self.trainer
        if trainer.steps != self._saved_step and self._checkpoints.save(trainer.steps, trainer.state_dict()):
            self._saved_step = trainer.steps

    def _tell(self, *events: TrainerEvent) -> None:
        if events:
            self._link.send(list(events))


def _event(
    result: MicroStepResult,
    trainer: DrafterTrainer,
    session: TrainSession,
    members: int,
    started_s: float,
    seconds: float,
) -> MicroStep:
    return MicroStep(
        step=trainer.steps,
        session=session.session,
        epoch=session.epoch,
        members=members,
        loss=result.loss,
        accuracy=result.accuracy,
        top3_accuracy=result.top3_accuracy,
        tokens=result.positions,
        target_version=trainer.head.version,
        started_s=started_s,
        seconds=seconds,
    )


def _build(start: wire.TrainerStart) -> DrafterTrainer:
    """Build the trainer on the host, with the target's head from the model directory."""
    dtype = getattr(torch, start.model.dtype)
    config = ModelConfig.from_hf(read_config(start.model.path))
    with SafetensorsDirectory(Path(start.model.path)) as tensors:
        wanted = [name for name in HEAD_TENSORS if name in tensors]
        embedding, norm, *head = (tensors[name].to(dtype) for name in wanted)
    lm_head = head[0] if head and not config.tied else embedding
    target = TargetHead(
        config=config, version=0, embedding=embedding, norm=norm, lm_head=lm_head, rope=RopeTable(config)
    )
    if isinstance(start.init, int):
        return DrafterTrainer(target, start.options, seed=start.init)
    model = load_eagle(start.init, config, dtype=torch.float32, device="cpu", batch_invariant=False)
    # Fitting ended at a lower rate: a few micro-steps at the initial rate would undo it.
    rate = start.options.learning_rate * PlateauRule().rates[-1]
    return DrafterTrainer(target, start.options.model_copy(update={"learning_rate": rate}), model=model)
