"""The core of an engine, which samples in a child process (actors.engine.process holds the handle of it).

Owns the choice of a core by `rollout.engine.backend`. Imports no backend before it is asked for: the supervisor's side
stays free of torch.
"""

from typing import TYPE_CHECKING, assert_never

from actors.engine.wire import Start

if TYPE_CHECKING:
    from actors.engine.batch.engine import BatchEngine


def build_core(start: Start) -> "BatchEngine":
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
