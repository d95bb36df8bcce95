"""Selective asynchronous checkpoints of a drafter (TLT 4.2): trained weights and their optimizer, nothing frozen. They
are copied in milliseconds and written by a background thread.

`root` is the history of one drafter: `<number>_step_<step>/{state.json, tensors/, checksums.json}`. Numbers only grow,
across processes and roll-backs, so no name is used twice, and a trainer resumes from the highest. A directory is
written under a hidden name, sealed (models.durable), synced and renamed: whenever the process is killed, it exists
completely or not at all. Its writer holds a lock on it, which ends with the writer; unfinished directories without a
lock are removed.
"""

import fcntl
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from actors.processes.link import Link
from contracts.spot import Checkpointed
from models.durable import CHECKSUMS_FILE, faults, seal, sync
from models.weights import pack
from policies.drafter.lineage import micro_steps

STATE_FILE, TENSORS = "state.json", "tensors"
COUNTERS = "counters"  # a name of DrafterTrainer.state_dict
_COMPLETE = re.compile(r"(\d{6,})_step_\d+")
_UNFINISHED = re.compile(r"\.writing-(\d{6,})")


class Checkpoints:
    """Checkpoints of one drafter. Single-threaded except for the writing: one save at a time."""

    def __init__(self, root: str | Path, keep: int, publish_dtype: torch.dtype, link: Link) -> None:
        """`publish_dtype`: of published weights. `link`: gets a Checkpointed event once a checkpoint is durable."""
        self.root, self.keep, self._dtype, self._link = Path(root), keep, publish_dtype, link
        self._staged: dict[str, Tensor] = {}
        self._writing: threading.Thread | None = None
        self.blocking_s = 0.0  # time that the last save blocked its caller

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Copy the tensors and write them in the background. Returns False, without effect, while the previous write
        runs: training never waits for a disk. A failed write is reported on stderr."""
        started_s = time.perf_counter()
        if self.busy:
            return False
        self._stage(tensors)
        self._start(step, started_s)
        return True

    def save_again(self, step: int, checkpoint: Path) -> bool:
        """Make a checkpoint that was read the newest, under the number `step`. Its tensors are linked, or copied where
        files cannot be; nothing is written if it is the newest. Otherwise as `save`."""
        started_s = time.perf_counter()
        if self.busy:
            return False
        if not self.is_newest(checkpoint, step):
            self._start(step, started_s, checkpoint)
        return True

    def is_newest(self, checkpoint: Path | None, step: int) -> bool:
        """Whether a new process begins with this checkpoint, under the number `step`. Its bytes are not read."""
        if checkpoint is None or not checkpoint.name.endswith(f"_step_{step:08d}"):
            return False
        return history(self.root)[-1:] == [checkpoint]

    def _start(self, step: int, started_s: float, source: Path | None = None) -> None:
        args = step, started_s, source
        self._writing = threading.Thread(target=self._write, args=args, name="checkpoint", daemon=True)
        self.blocking_s = time.perf_counter() - started_s  # without the thread's start, which is no copy
        self._writing.start()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and self._writing.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join(timeout_s)

    def _stage(self, tensors: Mapping[str, Tensor]) -> None:
        on_device = False
        for name, tensor in tensors.items():
            staged = self._staged.get(name)
            if staged is None or staged.shape != tensor.shape:
                staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._staged[name] = staged
            staged.copy_(tensor, non_blocking=True)
            on_device = on_device or tensor.is_cuda
        if on_device:
            torch.cuda.synchronize()

    def _write(self, step: int, started_s: float, source: Path | None) -> None:
        with suppress(OSError):  # of this thread only: decoding and training have priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            directory = self._write_directory(step, source)
        except Exception as error:
            print(f"checkpoint of micro-step {step} was not written: {error}", file=sys.stderr, flush=True)
            return
        seconds = time.perf_counter() - started_s
        self._link.send([Checkpointed(step, str(directory), self.blocking_s, seconds)])

    def _write_directory(self, step: int, source: Path | None) -> Path:
        """`source`: the checkpoint whose tensors these are; None: the staged ones are written."""
        from actors.training.persistence import save_tensors  # half a second of imports, on this thread

        number, temporary, lock = self._claim()
        try:
            if source is None:
                save_tensors(self._staged, temporary / TENSORS, distributed=False)  # its writer syncs it
                weights = self._published_checksum(step)
            else:
                shutil.copytree(source / TENSORS, temporary / TENSORS, copy_function=_link_or_copy)
                weights = json.loads((source / STATE_FILE).read_text(encoding="utf-8"))["weights"]
            facts = {"step": step, "weights": weights}
            (temporary / STATE_FILE).write_text(json.dumps(facts), encoding="utf-8")
            seal(temporary)
            sync(temporary / CHECKSUMS_FILE)
            sync(temporary / STATE_FILE)
            sync(temporary / TENSORS)
            sync(temporary)
            final = self.root / f"{number:06d}_step_{step:08d}"
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(lock)
        sync(self.root)
        self._prune(number)
        return final

    def _published_checksum(self, step: int) -> int:
        """Return the checksum in the manifest of these weights (`DrafterTrainer.export`), to recognise them when they
        return."""
        parts = {name: t.to(self._dtype) for name, t in self._staged.items() if name.startswith("model.")}
        return pack(parts, step)[0].checksum

    def _claim(self) -> tuple[int, Path, int]:
        """Return a number above all existing ones, its directory, which no other process writes to, and the lock on
        it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._alone():
            names = (_COMPLETE.fullmatch(p.name) or _UNFINISHED.fullmatch(p.name) for p in self.root.iterdir())
            number = 1 + max((int(match[1]) for match in names if match), default=0)
            temporary = self.root / f".writing-{number:06d}"
            temporary.mkdir()
            return number, temporary, _locked(temporary)

    def _prune(self, number: int) -> None:
        """Remove all but the newest `keep`, and unfinished ones of killed writers, up to `number`."""
        with self._alone():
            for old in history(self.root)[: -self.keep]:
                with suppress(OSError):
                    old.rename(self.root / f".writing-{old.name.partition('_')[0]}")  # never half of one under its name
            for entry in self.root.iterdir():
                match = _UNFINISHED.fullmatch(entry.name)
                if match and int(match[1]) <= number:  # includes itself, if it was pruned at once
                    with suppress(BlockingIOError):  # it is being written
                        os.close(_locked(entry))
                        shutil.rmtree(entry, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the root while names are made or removed, so that a directory has its writer's lock from the first
        moment."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        sync(Path(target))


def _locked(directory: Path) -> int:
    """Return a descriptor that holds the lock on a directory until closed. Raises BlockingIOError if another process
    holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks: no writers are known


def history(root: str | Path) -> list[Path]:
    """Return complete checkpoints, oldest first. Empty if there are none or no such directory."""
    root = Path(root)
    found = []
    for entry in root.iterdir() if root.is_dir() else ():
        match = _COMPLETE.fullmatch(entry.name)
        if match:
            found.append((int(match[1]), entry.name, entry))
    return [entry for _, _, entry in sorted(found)]


def find(root: str | Path, step: int, weights: int) -> Path | None:
    """Return the newest checkpoint of the weights published as version `step` with checksum `weights`, or restored
    under that number."""
    for checkpoint in reversed(history(root)):
        with suppress(OSError, ValueError):
            facts = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
            if (micro_steps(facts["step"]), facts["weights"]) == (micro_steps(step), weights):
                return checkpoint
    return None


def newest(checkpoints: Sequence[Path], like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors (names, shapes and dtypes as in `like`) of the last readable checkpoint; None: there is none.
    Unreadable or unfit ones are reported on stderr. The first of a trainer's COUNTERS is the checkpoint's step, also
    where its tensors are those of another number (`Checkpoints.save_again`)."""
    for checkpoint in reversed(checkpoints):
        from actors.training.persistence import load_tensors  # half a second of imports, saved at a first start

        tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
        try:
            if damaged := faults(checkpoint):
                raise ValueError(str(damaged[0]))
            load_tensors(tensors, checkpoint / TENSORS, distributed=False)
            if COUNTERS in tensors:
                facts = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
                tensors[COUNTERS][0] = facts["step"]
        except (OSError, ValueError, RuntimeError) as error:
            print(f"{checkpoint} is not used: {error}", file=sys.stderr, flush=True)
            continue
        return tensors
    return None
