"""Where an engine step's CPU time goes, by part, on one thread: `python -m benchmarks.engine_profile`.

A step is measured in CPU time, so that other processes disturb it less; shares come from cProfile, which makes Python
calls dearer than they are: shares of Python parts are upper bounds.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.options import EngineOptions
from actors.engine.types import Request, SamplingParams
from benchmarks.engine_throughput import DEMO
from models.checkpoint import init_model
from models.inflate import PRESETS
from models.transformer import Transformer

_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
PARTS = {  # first match of "file:function"
    "fused stack": ("ops/stack.py", "fused.py"),  # native calls count for their caller
    "matrix products": ("matmul.py", "linear", "_linear_pointwise"),
    "attention": ("attention.py", "context.py", "write_kv"),
    "norms, RoPE, SwiGLU, embedding": ("tokenwise.py", "rope.py", "embedding"),
    "sampling": ("sampling.py",),
    "module calls": ("module.py", "transformer.py", "ops/native.py"),
    "step inputs, verification": ("runner.py", "buffers.py", "kernels.py", "reference.py", "types.py"),
    "scheduling, events": ("engine.py", "scheduler.py", "speculation.py", "telemetry.py", "slots.py"),
}


def step_s(model: Transformer, batch: int, steps: int, profile: cProfile.Profile | None = None) -> float:
    """CPU seconds of a decoding step of `batch` requests."""
    engine = NativeEngine(model, EngineOptions(max_running=batch))
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, DEMO["vocab_size"], (batch, 24)).astype(np.int32)
    engine.submit(
        [
            Request(
                request_id=i, prompt_id=i, prompt_tokens=prompt, noise_key=i + 1, sampling=SamplingParams(steps + 8)
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    for _ in range(3):
        engine.step()
    if profile is not None:
        profile.enable()
    start_s = time.process_time()
    for _ in range(steps):
        engine.step()
    seconds = (time.process_time() - start_s) / steps
    if profile is not None:
        profile.disable()
    return seconds


def part_of(place: str) -> str:
    return next(
        (part for part, names in PARTS.items() if any(name in place for name in names)),
        "small torch calls (allocation, addresses), numpy, rest",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inflated = DEMO | {_HF_NAMES.get(name, name): size for name, size in PRESETS["20m"].items()}
    for name, config in (("demo", DEMO), ("20m", inflated)):
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "config.json").write_text(json.dumps(config))
                model = init_model(directory, 0, dtype=dtype, batch_invariant=False)
            for batch in arguments.batches:
                plain_s = min(step_s(model, batch, arguments.steps) for _ in range(3))
                profile = cProfile.Profile()
                step_s(model, batch, arguments.steps, profile)
                shares: Counter[str] = Counter()
                for (file, _, function), (_, _, own_s, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
                    shares[part_of(f"{file}:{function}")] += own_s
                total = sum(shares.values())
                text = ", ".join(f"{part} {own / total:.0%}" for part, own in shares.most_common())
                print(f"{name} {dtype} batch {batch}: {plain_s * 1e3:.2f} ms: {text}", flush=True)


if __name__ == "__main__":
    main()
