"""Where an engine step's CPU time goes, by part, on one thread: `python -m experiments.engine_profile`.

A step is measured in CPU time, so that other processes disturb it less; shares come from cProfile, which makes Python
calls dearer than they are: shares of Python parts are upper bounds.
"""

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Sequence

import torch

from actors.engine.native.engine import NativeEngine
from benchmarks.harness import command, markdown
from benchmarks.tools.targets import DTYPES, fresh_model, random_prompts, requests_of
from config.rollout import EngineOptions
from models.transformer import Transformer

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
    engine.submit(requests_of(random_prompts(batch), [steps + 8] * batch))
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


def main(*, steps: int = 100, batches: Sequence[int] = (1, 32)) -> None:
    torch.set_num_threads(1)
    for size, dtype in ((size, dtype) for size in ("demo", "20m") for dtype in DTYPES):
        model = fresh_model(size, dtype)
        for batch in batches:
            plain_s = min(step_s(model, batch, steps) for _ in range(3))
            profile = cProfile.Profile()
            step_s(model, batch, steps, profile)
            shares: Counter[str] = Counter()
            for (file, _, function), (_, _, own_s, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
                shares[part_of(f"{file}:{function}")] += own_s
            rows = [(part, f"{own / shares.total():.0%}") for part, own in shares.most_common()]
            print(
                f"{size} {dtype} batch {batch}: {plain_s * 1e3:.2f} ms\n{markdown(('part', 'share'), rows)}", flush=True
            )


if __name__ == "__main__":
    command(main)
