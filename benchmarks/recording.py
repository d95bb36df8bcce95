"""What recording hidden states costs the engine's step: `python -m benchmarks.recording`.

Owns `results/recording.json`. Two engines decode the same requests of the demo's long-tailed lengths in lockstep, one
of them recording every sequence: the most that any budget allows. They take turns by blocks of `CHUNK_STEPS` steps,
each with one chunk picked, and a ratio is of two blocks of equal work; medians over blocks with 95 % bootstrap
intervals. Fresh weights: a step does not depend on them. `with_eagle` is the step that keeps the last states for an
EAGLE drafter anyway, whose rows recording shares; `fused3` also records three layers, as EAGLE-3 needs. A last part
decodes RL steps under a budget of a third of what they have, and says what was delivered of it.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.native.hidden.recording import CHUNK_STEPS
from actors.engine.options import EngineOptions
from actors.engine.types import Event, Recorded, Request, SamplingParams
from benchmarks.engine_throughput import DEMO, PROMPT_TOKENS, long_tailed_lengths
from benchmarks.machine import describe_machine
from models import weights
from models.checkpoint import hf_state_dict, init_model
from models.inflate import PRESETS
from models.transformer import Transformer

ROOT = Path(__file__).resolve().parents[1]
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
EVERYTHING = 1 << 40
BUDGET_REQUESTS, BUDGET_STEPS = 128, 6
KINDS: dict[str, tuple[int, ...]] = {"final_state": (), "fused3": (0, 1, 2)}


def build(size: str, dtype: torch.dtype) -> Transformer:
    config = DEMO
    if size != "demo":
        config = DEMO | {_HF_NAMES.get(name, name): value for name, value in PRESETS[size].items()}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return init_model(directory, 0, dtype=dtype, batch_invariant=False)


def requests_of(count: int, seed: int = 0, epoch: int = 0) -> list[Request]:
    """One prompt each; long-tailed lengths."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, DEMO["vocab_size"], (count, PROMPT_TOKENS)).astype(np.int32)
    lengths = long_tailed_lengths(count, seed)
    keys = np.random.default_rng((seed, epoch)).integers(0, 2**62, count)
    return [
        Request(
            request_id=i,
            prompt_id=i,
            prompt_tokens=prompts[i],
            noise_key=int(keys[i]),
            sampling=SamplingParams(lengths[i]),
        )
        for i in range(count)
    ]


@dataclass(slots=True)
class Delivered:
    """What was recorded. Never the states: a worker hands them on at once, and their memory is used again."""

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
    """Seconds of every `CHUNK_STEPS` steps, while it has work for all of them."""
    while True:
        start_s = perf_counter()
        for _ in range(CHUNK_STEPS):
            delivered.add(engine.step())
        seconds = perf_counter() - start_s
        if not engine.has_work:
            return
        yield seconds


def compare(model: Transformer, batch: int, layers: tuple[int, ...], steps: int) -> dict[str, Any]:
    """On against off, over about `steps` engine steps of `batch` requests."""
    requests = requests_of(2 + 2 * batch * steps // 60)
    options = EngineOptions(max_running=batch)
    # The engine on the right records layers, which the fused forward does not do: what it costs is in the ratio.
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
    off_s, on_s = np.array(times[0]), np.array(times[1])
    recorded = told[1]
    answer = {
        "engine_steps": len(off_s) * CHUNK_STEPS,
        "off_us": round(median(off_s) * 1e6, 1),
        "on_us": round(median(on_s) * 1e6, 1),
        "ratio": round(float(np.median(on_s / off_s)), 4),
        "ratio_95": [round(x, 4) for x in interval(on_s / off_s)],
        "told_us_per_step": round(recorded.seconds / (len(off_s) * CHUNK_STEPS) * 1e6, 1),
        "sequences": recorded.sequences,
        "bytes_per_token": round(recorded.bytes / max(1, recorded.tokens), 1),
    }
    if recording is not None:
        ratios = on_s / np.array(times[2])
        answer |= {"over_recording": round(float(np.median(ratios)), 4)}
        answer |= {"over_recording_95": [round(x, 4) for x in interval(ratios)]}
    return answer


def interval(values: Sequence[float] | np.ndarray[Any, Any], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(np.asarray(values), (draws, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def budget(model: Transformer) -> dict[str, Any]:
    """RL steps of equal prompts under a budget of a third of what the first one has."""
    whole = NativeEngine(model, EngineOptions(max_running=32), recording_bytes=EVERYTHING)
    demand = sum(event.bytes for event in drain(whole, requests_of(BUDGET_REQUESTS)))
    limit = demand // 3
    engine = NativeEngine(model, EngineOptions(max_running=32), recording_bytes=limit)
    payload = dict(hf_state_dict(model))
    rows = []
    for step in range(BUDGET_STEPS):
        events = drain(engine, requests_of(BUDGET_REQUESTS, seed=step, epoch=step))
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
    engine.submit(requests)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return [event for event in events if isinstance(event, Recorded)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["demo", "20m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=4.0, help="about, per engine and row of the table")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "recording.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.sizes:
        for dtype in options.dtypes:
            model = build(size, getattr(torch, dtype))
            for batch in options.batches:
                for kind, layers in KINDS.items():
                    steps = steps_within(model, batch, options.seconds)
                    row = {"target": size, "dtype": dtype, "batch": batch, "states": kind}
                    row |= compare(model, batch, layers, steps)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    kept = budget(build("demo", torch.float32))
    for row in kept["rl_steps"]:
        print(json.dumps(row), flush=True)
    record = {"machine": describe_machine(), "threads": 1, "chunk_steps": CHUNK_STEPS, "cost": rows, "budget": kept}
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def steps_within(model: Transformer, batch: int, seconds: float) -> int:
    """A multiple of `CHUNK_STEPS` between 4 and 60 of them, that takes about so long."""
    engine = NativeEngine(model, EngineOptions(max_running=batch))
    engine.submit(requests_of(4 * batch))
    start_s = perf_counter()
    for _ in range(8):
        engine.step()
    each_s = (perf_counter() - start_s) / 8
    return min(60, max(4, round(seconds / (each_s * CHUNK_STEPS)))) * CHUNK_STEPS


if __name__ == "__main__":
    main()
