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
    """What the child's loop drives, on one thread: commands while there is no step, one step while there is work.

    tests/engine/contract.py says in tests what every core keeps.
    """

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do or to tell."""

    def apply(self, command: EngineCommand, memory: NDArray[np.uint8] | None) -> EngineAnswer | None:
        """Obey. The answer, where the command has one. `memory` is what travelled beside the command, and may be kept.
        What is raised ends the engine."""

    def step(self) -> list[Event]:
        """Do a little, milliseconds if it can be helped; what happened since the last call."""

    def close(self) -> None:
        """Let go of what would outlive this process. Idempotent."""


def build_core(start: Start) -> EngineCore:
    """Raises whatever keeps the backend from starting."""
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
