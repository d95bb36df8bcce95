"""Acceptance of a drafter for a target, in the engine: coupled chains at T = 1. Owns the counting, trains nothing."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.engine.native.engine import NativeEngine
from benchmarks.tools.rollouts import engine_options
from benchmarks.tools.targets import Target
from config.speculation import EagleOptions
from contracts.records import SequenceRecord
from contracts.rollout import EngineWindow, Finished, Request, Rollout, StrategyUse
from drafter.eagle import Drafting, EagleDrafter, save_eagle
from models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over all verifications of drafts; a request's first step has none."""

    verifications: int
    accepted: int
    by_depth: tuple[float, ...]  # share of drafts accepted up to depth 1, 2, ...: the sum is accept_length - 1
    rollouts: dict[int, Rollout]  # by request id

    @property
    def accept_length(self) -> float:
        """Tokens per verification, including the target's own, as TLT counts."""
        return 1 + self.accepted / max(self.verifications, 1)


def drafter_of(model: Drafting, target: Target, running: int) -> EagleDrafter:
    """Return the network as the drafter of an engine with `engine_options(running)`."""
    options = engine_options(running)
    with tempfile.TemporaryDirectory() as folder:
        save_eagle(model, folder)
        blocks = options.kv_tokens // options.block_tokens
        path = EagleOptions(path=str(Path(folder)), min_probability=0)  # every depth is measured
        return EagleDrafter(target.model, path, options.max_running, blocks, options.block_tokens)


def accept(engine: NativeEngine, requests: Sequence[Request]) -> Acceptance:
    """Decode all requests with the engine's present weights and drafter."""
    used: list[StrategyUse] = []
    rollouts: dict[int, Rollout] = {}
    for event in engine.stream(requests):
        if isinstance(event, EngineWindow):
            used.extend(use for use in event.strategies if use.drafted)
        elif isinstance(event, Finished):
            rollouts[event.rollout.request_id] = event.rollout
    depth = max((len(use.offered) for use in used), default=0)
    offered, taken = (
        [sum(row[i] for row in rows if i < len(row)) for i in range(depth)]
        for rows in ([use.offered for use in used], [use.taken for use in used])
    )
    shares = tuple(round(t / o, 4) if o else 0.0 for t, o in zip(taken, offered, strict=True))
    return Acceptance(offered[0] if offered else 0, sum(taken), shares, rollouts)


def random_record(rows: int, config: ModelConfig, seed: int = 0) -> SequenceRecord:
    """Return a record for timing a trainer: random states, which do not affect the time."""
    rng = np.random.default_rng((seed, rows))
    states = rng.standard_normal((rows, config.hidden_size), np.float32).view(np.uint8)
    tokens = rng.integers(0, config.vocab_size, rows + 1).astype(np.int32)
    return SequenceRecord(
        tokens=tokens,
        prompt_length=1,
        first=0,
        states=states,
        dtype="float32",
        width=config.hidden_size,
        target_version=0,
    )
