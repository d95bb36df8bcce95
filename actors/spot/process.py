"""The parent's end of a spot trainer in a child process. Manages the child's life; never imports torch, never waits for
a micro-step, and never raises because the child is gone: that is the event TrainFailed, sent once.
"""

from contextlib import suppress
from pathlib import Path

from actors.processes.parent import ChildProcess
from actors.spot import wire
from config.drafter import DrafterOptions
from config.model import ModelOptions
from contracts.spot import SpotCommand, TrainerEvent, TrainFailed
from policies.roofline.pace import Pace


class _EndedError(Exception):
    """The child has ended."""


def spawn_trainer(
    options: DrafterOptions,
    model: ModelOptions,
    host: str = "127.0.0.1",
    *,
    init: str | Path | int = 0,
    checkpoint_dir: str | Path,
    name: str = "trainer",
    threads: int | None = None,
    device: str = "auto",
    niceness: int = 15,
    start_timeout_s: float = 120.0,
    pace: Pace | None = None,
) -> "SpotTrainer":
    """Start a trainer of the drafter for the target in `model.path` and wait until it is warm.

    It resumes from the newest checkpoint in `checkpoint_dir`, if there is one; else from `init`: the directory of a
    drafter, or the seed of a fresh one. `checkpoint_dir` is the history of one drafter and may be shared by its
    trainers. `host`: this machine's address for other members of a session, also on other nodes. `threads`: CPU
    threads; default: torch's. `device`: auto, cpu or cuda. `niceness` lowers its priority below that of engines.
    `pace`: for experiments (see policies.roofline.pace). Raises RuntimeError with the child's reason, or if it is
    not ready within `start_timeout_s`.
    """
    start = wire.TrainerStart(
        model=model,
        options=options,
        init=init if isinstance(init, int) else str(init),
        checkpoint_dir=str(checkpoint_dir),
        host=host,
        threads=threads,
        device=device,
        niceness=niceness,
        pace=pace,
    )
    trainer = SpotTrainer(start, name)
    try:
        trainer.wait_until_ready(start_timeout_s)
    except BaseException:
        trainer.close(timeout_s=0.0)
        raise
    return trainer


class SpotTrainer:
    """A drafter trainer in a child process. Thread-safe: commands return at once, answers come by `poll`, which is
    meant for one thread."""

    def __init__(self, start: wire.TrainerStart, name: str) -> None:
        self.name = name
        self._closed = self._failed = False
        threads = {} if start.threads is None else {"OMP_NUM_THREADS": str(start.threads)}
        self._child = ChildProcess(f"{__package__}.child", start, name, died=_EndedError, environment=threads)

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the child. Raises RuntimeError if it fails first, or is not ready in time."""
        try:
            (first,) = self._child.first(timeout_s)
        except (TimeoutError, _EndedError) as error:
            raise RuntimeError(f"{self.name} did not start: {error}") from None
        if isinstance(first, TrainFailed):
            raise RuntimeError(f"{self.name} did not start: {first.reason}")

    def send(self, command: SpotCommand) -> None:
        """Arrays are copied once, into memory shared with the child. A trainer that is gone says so by `poll`."""
        with suppress(_EndedError):  # `poll` says it.
            self._child.send(command)

    def poll(self, timeout_s: float) -> list[TrainerEvent]:
        """Return events since the last call, waiting up to timeout_s for the first. TrainFailed, also after a kill, is
        the last; after `close` there are none."""
        if self._failed or self._closed:
            return []
        try:
            messages = self._child.poll(timeout_s)
        except _EndedError as error:
            self._failed = True
            return [] if self._closed else [TrainFailed(str(error))]
        events: list[TrainerEvent] = [event for message in messages for event in message]
        self._failed = any(isinstance(event, TrainFailed) for event in events)
        return events

    def kill(self) -> None:
        """End it at once, in the middle of a micro-step or a save; nothing of it is left. Idempotent.

        The next process resumes from the last checkpoint."""
        self._child.kill()
        self._child.close(5.0)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child: first by request, then by kill after `timeout_s`. Idempotent."""
        self._closed = True
        self._child.close(timeout_s)
