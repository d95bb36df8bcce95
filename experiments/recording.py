"""The cost of recording hidden states, per engine step: `python -m experiments.recording`.

Owns `results/recording.json`. Two engines decode the same requests of the demo's long-tailed lengths in lockstep. One
records every sequence, the most that any budget allows. They take turns by blocks of `CHUNK_STEPS` steps, each with one
chunk picked, and a ratio is of two blocks of equal work: medians over blocks with 95 % bootstrap intervals. Weights are
fresh, since a step does not depend on them. `with_eagle` is the step that keeps the last states for an EAGLE drafter
anyway, whose rows recording shares. `fused3` also records three layers, as EAGLE-3 needs. A last part decodes RL steps
under a budget of a third of their tokens, and reports the delivered share.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.native.hidden.recording import CHUNK_STEPS
from benchmarks.harness import ROOT, command, paired, write
from benchmarks.tools.targets import (
    DTYPES,
    PROMPT_TOKENS,
    SIZES,
    fresh_model,
    long_tailed_lengths,
    random_prompts,
    requests_of,
)
from config.rollout import EngineOptions
from contracts.rollout import Event, Recorded, Request
from models import weights
from models.checkpoint import hf_state_dict
from models.transformer import Transformer

EVERYTHING = 1 << 40
BUDGET_REQUESTS, BUDGET_STEPS = 128, 6
KINDS: dict[str, tuple[int, ...]] = {"final_state": (), "fused3": (0, 1, 2)}


def long_tailed(count: int, seed: int = 0) -> list[Request]:
    return requests_of(random_prompts(count, seed), long_tailed_lengths(count, seed), seed=seed)


@dataclass(slots=True)
class Delivered:
    """Counts of what was recorded, without the states: a worker passes them on at once, and their memory is reused."""

    seconds: float = 0.0
    sequences: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Recorded):
                self.seconds += event.seconds
                self.sequences += len(event.records)
                self.tokens += sum(len(record.tokens) for record in event.records)
                self.bytes += event.bytes


def blocks(engine: NativeEngine, delivered: Delivered) -> Iterator[float]:
    """Yield the seconds of every `CHUNK_STEPS` steps, while there is work for all of them."""
    while True:
        start_s = perf_counter()
        for _ in range(CHUNK_STEPS):
            delivered.add(engine.step())
        seconds = perf_counter() - start_s
        if not engine.has_work:
            return
        yield seconds


def compare(model: Transformer, batch: int, layers: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Compare on and off, over about `steps` engine steps of `batch` requests."""
    requests = long_tailed(2 + 2 * batch * steps // 60)
    options = EngineOptions(max_running=batch)
    # The right engine records layers, which the fused forward does not support; that cost is in the ratio.
    off = NativeEngine(model, options)
    on = NativeEngine(model, options, recording_bytes=EVERYTHING, recorded_layers=layers)
    recording = NativeEngine(model, options, recorded_layers=layers) if layers else None
    for engine in filter(None, (off, on, recording)):
        engine.submit(requests)
        for _ in range(CHUNK_STEPS):
            engine.step()
    told = [Delivered(), Delivered(), Delivered()]
    runs = [blocks(engine, into) for engine, into in zip(filter(None, (off, on, recording)), told, strict=False)]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(max(3, steps // CHUNK_STEPS)):
        order = range(len(runs)) if turn % 2 == 0 else range(len(runs) - 1, -1, -1)
        for i in order:
            times[i].append(next(runs[i]) / CHUNK_STEPS)
    recorded = told[1]
    answer: dict[str, Any] = {
        "engine_steps": len(times[0]) * CHUNK_STEPS,
        "off_us": round(median(times[0]) * 1e6, 1),
        "on_us": round(median(times[1]) * 1e6, 1),
        "ratio": paired(times[1], times[0]),
        "told_us_per_step": round(recorded.seconds / (len(times[0]) * CHUNK_STEPS) * 1e6, 1),
        "sequences": recorded.sequences,
        "bytes_per_token": round(recorded.bytes / max(1, recorded.tokens), 1),
    }
    return answer if recording is None else answer | {"over_recording": paired(times[1], times[2])}


def budget(model: Transformer) -> dict[str, Any]:
    """Run RL steps of equal prompts under a budget of a third of the first one's tokens."""
    whole = NativeEngine(model, EngineOptions(max_running=32), recording_bytes=EVERYTHING)
    demand = sum(event.bytes for event in drain(whole, long_tailed(BUDGET_REQUESTS)))
    limit = demand // 3
    engine = NativeEngine(model, EngineOptions(max_running=32), recording_bytes=limit)
    payload = dict(hf_state_dict(model))
    rows = []
    for step in range(BUDGET_STEPS):
        events = drain(engine, long_tailed(BUDGET_REQUESTS, seed=step))
        delivered = sum(event.bytes for event in events)
        if delivered > limit:
            raise SystemExit(f"RL step {step}: {delivered} bytes were delivered, {limit} are allowed")
        lengths = [len(record.tokens) for event in events for record in event.records]
        rows.append(
            {
                "rl_step": step,
                "of_budget": round(delivered / limit, 3),
                "sequences": len(lengths),
                "skipped": sum(event.skipped for event in events),
                "mean_length": round(float(np.mean(lengths)), 1) if lengths else None,
                "mean_length_of_all": round(
                    PROMPT_TOKENS + float(np.mean(long_tailed_lengths(BUDGET_REQUESTS, step))), 1
                ),
            }
        )
        engine.update_weights(*weights.pack(payload, step + 1))
    return {"demand_bytes": demand, "budget_bytes": limit, "rl_steps": rows}


def drain(engine: NativeEngine, requests: list[Request]) -> list[Recorded]:
    return [event for event in engine.stream(requests) if isinstance(event, Recorded)]


def steps_within(model: Transformer, batch: int, seconds: float) -> int:
    """Return a multiple of `CHUNK_STEPS`, between 4 and 60 of them, that takes about `seconds`."""
    engine = NativeEngine(model, EngineOptions(max_running=batch))
    engine.submit(long_tailed(4 * batch))
    start_s = perf_counter()
    for _ in range(8):
        engine.step()
    each_s = (perf_counter() - start_s) / 8
    return min(60, max(4, round(seconds / (each_s * CHUNK_STEPS)))) * CHUNK_STEPS


def main(
    *,
    sizes: Annotated[Sequence[str], "of the target", SIZES] = ("demo", "20m"),
    dtypes: Annotated[Sequence[str], "of the target", DTYPES] = DTYPES,
    batches: Sequence[int] = (1, 8, 32),
    seconds: Annotated[float, "about, per engine and row of the table"] = 4.0,
    out: Path = ROOT / "experiments/results/recording.json",
) -> None:
    torch.set_num_threads(1)
    rows = []
    for size, dtype in ((size, dtype) for size in sizes for dtype in dtypes):
        model = fresh_model(size, dtype)
        for batch in batches:
            for kind, layers in KINDS.items():
                row = {"target": size, "dtype": dtype, "batch": batch, "states": kind}
                rows.append(row | compare(model, batch, layers, steps_within(model, batch, seconds)))
                print(json.dumps(rows[-1]), flush=True)
    found = {"cost": rows, "budget": budget(fresh_model())}
    settings = {"threads": 1, "chunk_steps": CHUNK_STEPS, "seed": 0}
    write(out, "what does recording hidden states cost the engine's step?", found, settings=settings)


if __name__ == "__main__":
    command(main)
