"""A rollout engine in a child process: the parent's end. Owns what is asked of it and which requests are open; never
imports torch, so that the supervisor that calls it stays small and answers while the child computes."""

import threading
from collections.abc import Sequence

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
from actors.processes.parent import ChildProcess
from models.manifest import WeightsManifest
from models.options import ModelOptions
from policies.speculation.options import SpeculationOptions

NO_SPECULATION = SpeculationOptions(mode="off")


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
    recording_bytes: int = 0,
    recorded_layers: tuple[int, ...] | None = None,
) -> RolloutEngine:
    """Start an engine that serves the model at `model_options.path` and wait until it is ready.

    `seed` seeds torch in the child (sampling never uses it: noise comes with each request). `niceness` lowers the
    child's priority, so that its supervisor answers control calls at once on a machine that is busy decoding.
    `recording_bytes`, `recorded_layers`: see NativeEngine.
    Raises EngineStartError with the child's reason, or if it is not ready within `start_timeout_s`.
    """
    if options.backend != "native":
        raise EngineStartError(
            f"rollout.engine.backend={options.backend} is not part of this version: only 'native' is "
            "(Llama, Qwen2 and Qwen3 on CPU or one CUDA device); set rollout.engine.backend=native"
        )
    start = wire.Start(
        model=model_options,
        options=options,
        seed=seed,
        weights_version=weights_version,
        niceness=niceness,
        speculation=speculation,
        recording_bytes=recording_bytes,
        recorded_layers=recorded_layers,
    )
    engine = ProcessEngine(start, name)
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
        self._open_requests: set[int] = set()
        self._lock = threading.Lock()  # Guards `_open_requests`.
        threads = start.options.threads
        self._child = ChildProcess(
            "actors.engine.child",
            start,
            name,
            died=EngineDiedError,
            environment={} if threads is None else {"OMP_NUM_THREADS": str(threads)},
        )

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
            (first,), _ = self._child.first(timeout_s)
        except TimeoutError as error:
            raise EngineStartError(str(error)) from None
        except EngineDiedError as error:
            raise EngineStartError(str(error)) from None
        if not isinstance(first, wire.Ready):
            raise EngineStartError(first.reason)
        self._capabilities = first.capabilities

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._open_requests.update(request.request_id for request in requests)
        self._send(wire.Submit(tuple(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(wire.Abort(tuple(request_ids)))

    def update_weights(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """The buffer is copied once, into memory shared with the child; it may be reused when this returns."""
        self._send(wire.UpdateWeights(manifest), buffer)

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

    def update_drafter(self, name: str, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """The buffer is copied once, as in `update_weights`. Answer: DrafterLoaded."""
        self._send(wire.UpdateDrafter(name, manifest), buffer)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for message, memory in self._child.poll(timeout_s):
            if memory is None:
                events += message
            else:
                events += [header.join(memory) for header in message]
        over = [e.rollout.request_id for e in events if isinstance(e, Finished)]
        over += [e.request_id for e in events if isinstance(e, Rejected)]
        if over:
            with self._lock:
                self._open_requests.difference_update(over)
        return events

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child: asked first, killed after `timeout_s`. Idempotent."""
        self._child.close(wire.Close(), timeout_s)

    def _send(self, message: wire.Command, memory: NDArray[np.uint8] | None = None) -> None:
        self._child.send(message, memory)
