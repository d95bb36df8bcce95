"""A rollout engine in a child process: the parent's end. Owns the child's life and the two pipes to it.

It never imports torch: the supervisor that calls it stays small, and answers while the child computes. The child ends
with its parent, whatever happens to the parent: its lifeline is the socket itself (`actors.engine.child`).
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actors.engine import wire
from actors.engine.options import EngineOptions
from actors.engine.types import (
    Capabilities,
    EngineDiedError,
    Event,
    Finished,
    IntArray,
    Rejected,
    Request,
    RolloutEngine,
)
from models.manifest import WeightsManifest
from models.options import ModelOptions
from policies.speculation.options import SpeculationOptions

STDERR_LINES = 50
NO_SPECULATION = SpeculationOptions(mode="off")
_REPOSITORY = Path(__file__).resolve().parents[2]


class EngineStartError(RuntimeError):
    """The engine did not come up; the message is the child's own reason."""


def spawn_engine(
    model_options: ModelOptions,
    options: EngineOptions,
    *,
    seed: int = 0,
    name: str = "engine",
    weights_version: int = 0,
    start_timeout_s: float = 120.0,
    niceness: int = 5,
    speculation: SpeculationOptions = NO_SPECULATION,
) -> RolloutEngine:
    """Start an engine that serves the model at `model_options.path` and wait until it is ready.

    `seed` seeds torch in the child (sampling never uses it: noise comes with each request). `niceness` lowers the
    child's priority, so that its supervisor answers control calls at once on a machine that is busy decoding.
    Raises EngineStartError with the child's reason, or if it is not ready within `start_timeout_s`.
    """
    if options.backend != "native":
        raise EngineStartError(
            f"rollout.engine.backend={options.backend} is not part of this version: only 'native' is "
            "(Llama, Qwen2 and Qwen3 on CPU or one CUDA device); set rollout.engine.backend=native"
        )
    engine = ProcessEngine(wire.Start(model_options, options, seed, weights_version, niceness, speculation), name)
    try:
        engine.wait_until_ready(start_timeout_s)
    except BaseException:
        engine.close(timeout_s=0.0)
        raise
    return engine


class ProcessEngine:
    """RolloutEngine over a child process. Thread-safe; `poll` is meant for one thread."""

    def __init__(self, start: wire.Start, name: str) -> None:
        self.name = name
        self._capabilities: Capabilities | None = None
        self._events: queue.SimpleQueue[Event | wire.Ready | wire.Ended] = queue.SimpleQueue()
        self._open_requests: set[int] = set()
        self._lock = threading.Lock()  # Guards sending and `_open_requests`.
        self._ended = False
        self._closing = False
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES)
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", "from actors.engine.child import main; main()", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_child_environment(start.options),
                text=True,
                errors="replace",
            )
        self._connection = Connection(ours.detach())
        self._threads = [
            threading.Thread(target=target, name=f"{name}-{target.__name__}", daemon=True)
            for target in (self._read_stderr, self._read_events)
        ]
        for thread in self._threads:
            thread.start()
        with suppress(OSError):  # A child that died already tells why through wait_until_ready.
            self._connection.send(start)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise RuntimeError(f"{self.name} is not ready yet")
        return self._capabilities

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises EngineStartError if the child fails first, or is not ready in time."""
        try:
            first = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineStartError(
                f"{self.name} (process {self.pid}) was not ready within {timeout_s:g} s{self._tail()}"
            ) from None
        if not isinstance(first, wire.Ready):
            reason = getattr(first, "reason", "") or self._how_it_ended()
            raise EngineStartError(f"{self.name} did not start: {reason}")
        self._capabilities = first.capabilities

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._open_requests.update(request.request_id for request in requests)
        self._send(wire.Submit(tuple(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(wire.Abort(tuple(request_ids)))

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """The buffer is copied once, into memory shared with the child; it may be reused when this returns."""
        descriptor = wire.share_bytes(buffer)
        try:
            self._send(wire.UpdateWeights(manifest, buffer.size), descriptor)
        finally:
            os.close(descriptor)

    def sleep(self) -> None:
        with self._lock:
            if self._open_requests:
                raise ValueError(
                    f"{self.name} has {len(self._open_requests)} requests: wait for them or abort them before sleep"
                )
        self._send(wire.Sleep())

    def wake(self) -> None:
        self._send(wire.Wake())

    def remember(self, prompts: Sequence[IntArray], responses: Sequence[IntArray]) -> None:
        """Show the drafters rollouts that other engines finished."""
        self._send(wire.Remember(tuple(prompts), tuple(responses)))

    def save_drafters(self, directory: str) -> None:
        """Write what the drafters would lose with the process. Answer: DraftersSaved."""
        self._send(wire.SaveDrafters(directory))

    def load_drafters(self, directory: str) -> None:
        """Restore what `save_drafters` wrote."""
        self._send(wire.LoadDrafters(directory))

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        deadline_s = time.monotonic() + timeout_s
        while not self._ended:
            try:
                wait_s = 0.0 if events else max(0.0, deadline_s - time.monotonic())
                event = self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, wire.Ended):
                self._ended = True
            elif not isinstance(event, wire.Ready):
                events.append(event)
        over = [e.rollout.request_id for e in events if isinstance(e, Finished)]
        over += [e.request_id for e in events if isinstance(e, Rejected)]
        if over:
            with self._lock:
                self._open_requests.difference_update(over)
        if self._ended and not events:
            raise EngineDiedError(self._how_it_ended())
        return events

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child: asked first, killed after `timeout_s`. Idempotent."""
        if not self._closing:
            self._closing = True
            with suppress(OSError, EngineDiedError):
                if timeout_s > 0:
                    self._send(wire.Close())
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(10.0)
        for thread in self._threads:
            thread.join(2.0)
        with self._lock:
            self._connection.close()
        if self._child.stderr is not None:
            self._child.stderr.close()

    def _send(self, message: wire.Command, descriptor: int | None = None) -> None:
        with self._lock:
            try:
                wire.send(self._connection, message, descriptor)
            except OSError:
                raise EngineDiedError(self._how_it_ended()) from None

    def _read_events(self) -> None:
        try:
            while True:
                for event in self._connection.recv():
                    self._events.put(event)
        except (EOFError, OSError):
            self._events.put(wire.Ended())

    def _read_stderr(self) -> None:
        assert self._child.stderr is not None
        with suppress(ValueError):  # Closed while reading.
            for line in self._child.stderr:
                self._stderr_tail.append(line.rstrip("\n"))
                print(f"[{self.name}] {line}", end="", file=sys.stderr, flush=True)

    def _how_it_ended(self) -> str:
        try:
            code = self._child.wait(5.0)
        except subprocess.TimeoutExpired:
            return f"{self.name} (process {self.pid}) closed its pipe but still runs{self._tail()}"
        self._threads[0].join(1.0)
        how = f"exit code {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"signal {signal.Signals(-code).name}"
        return f"{self.name} (process {self.pid}) ended with {how}{self._tail()}"

    def _tail(self) -> str:
        tail = "\n".join(self._stderr_tail)
        return f"; its last lines on stderr:\n{tail}" if tail else ""


def _child_environment(options: EngineOptions) -> dict[str, str]:
    path = os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment
