"""The core of an engine, which samples in a child process (actors.engine.process holds the handle of it).

Owns its protocol and the choice of a core by `rollout.engine.backend`. Imports no backend before it is asked for:
the supervisor's side stays free of torch.
"""

from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from actors.engine.wire import Start
from contracts.engine import EngineCommand
from contracts.rollout import EngineAnswer, Event


class EngineCore(Protocol):
    """The engine inside the child's loop, on one thread: commands between steps, one step while there is work.

    tests/engine/contract.py tests every core against this protocol.
    """

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or events to report."""

    def apply(self, command: EngineCommand, memory: NDArray[np.uint8] | None) -> EngineAnswer | None:
        """Execute a command and return its answer, if it has one. An exception ends the engine.

        `memory` is the data sent with the command, and may be kept."""

    def step(self) -> list[Event]:
        """Do a small unit of work, preferably milliseconds; return the events since the last call."""

    def close(self) -> None:
        """Release resources that would outlive this process. Idempotent."""


def build_core(start: Start) -> EngineCore:
    """Build the core of the configured backend. Raises whatever keeps it from starting."""
    match start.options.backend:
        case "native":
            from actors.engine.native.core import build

            return build(start)
        case "vllm":
            from actors.engine.vllm import core as vllm_core

            if start.pace is not None:
                raise ValueError("rollout.engine.backend=vllm cannot be paced: use the native engine")

            return vllm_core.build(start)
        case other:
            assert_never(other)
