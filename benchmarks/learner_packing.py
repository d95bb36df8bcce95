"""The learner's RL step: packed against padded micro-batches, peak memory, FSDP2 at one rank, and a profile.

    python -m benchmarks.learner_packing [--threads 2] [--repeats 7] [--rollouts 128]

One RL step of the demo: 16 prompts x 8 responses, prompts of 12 tokens, response lengths log-normal with median 42 and
90 % quantile 143, cut at 200; Qwen3 with 0.62M parameters; two mini-batches. Throughput counts real tokens only, so
padding is a cost. Variants take turns within one process. A figure is the median over repeats; a ratio is taken within
a turn. Peak memory is measured in a fresh process per variant: the growth of resident memory over the built model.
"""

import json
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import numpy as np
import torch

from actors.training.parallel import Rank, join_group, leave_group, open_store
from actors.training.trainer import Trainer
from benchmarks.harness import RESULTS, command, in_turns, paired, write
from benchmarks.tools.targets import SHAPE
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence

T = TypeVar("T")
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False},
    "packed_checkpointed": {"activation_checkpointing": True},
    "packed_fsdp2_one_rank": {"force_sharding": True},
}


def make_step(rollouts: int, seed: int = 0) -> list[TrainSequence]:
    """Return sequences with the demo's lengths."""
    rng = np.random.default_rng(seed)
    sigma = math.log(143 / 42) / 1.2816  # 1.2816: the 90 % quantile of the standard normal
    lengths = np.clip(np.rint(np.exp(rng.normal(math.log(42), sigma, rollouts))), 1, 200).astype(int)
    return [
        TrainSequence(
            prompt_tokens=rng.integers(0, 228, 12).astype(np.int32),
            response_tokens=rng.integers(0, 228, n).astype(np.int32),
            sampler_logprobs=np.full(n, -5.4, np.float32),
            sampler_logprobs_t1=np.full(n, -5.4, np.float32),
            advantage=float(rng.normal()),
        )
        for n in lengths
    ]


def make_trainer(model_dir: Path, variant: str, micro_batch_tokens: int) -> Trainer:
    """Return a trainer of that variant, with fresh weights."""
    learner = dict(VARIANTS[variant])
    force = learner.pop("force_sharding", False)
    options = LearnerOptions(mini_batches=2, micro_batch_tokens=micro_batch_tokens, **learner)
    trainer = Trainer(
        ModelOptions(path=str(model_dir)), options, ObjectiveOptions(), init="random", force_sharding=force
    )
    trainer.begin(OptimizerOptions(lr=1e-5), 1)
    return trainer


def memory_bytes(key: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process. getrusage is unsuitable: a child starts with its parent's
    peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure_memory(model_dir: Path, variant: str, micro_batch_tokens: int, rollouts: int, threads: int) -> int:
    """Return the peak growth in bytes during one step. Call it in a fresh process."""
    torch.set_num_threads(threads)
    trainer = make_trainer(model_dir, variant, micro_batch_tokens)
    trainer.rl_step(make_step(2, seed=1), temperature=1.0)  # library buffers that any first step allocates
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    trainer.rl_step(make_step(rollouts), temperature=1.0)
    return memory_bytes("VmHWM") - before


def in_child(function: Callable[..., T], *args: object) -> T:
    """Run function(*args) in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout=300)


def profile_step(trainer: Trainer, step: list[TrainSequence]) -> list[dict[str, float | str]]:
    """Return the operations with the largest own time in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        trainer.rl_step(step, temperature=1.0)
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    return [{"op": e.key, "share": round(e.self_cpu_time_total / total, 4), "calls": e.count} for e in events[:15]]


def main(
    *,
    threads: int = 2,
    repeats: int = 7,
    rollouts: Annotated[int, "responses of the RL step"] = 128,
    micro_batch_tokens: int = 8192,
    out: Path = RESULTS / "learner_packing.json",
) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    join_group(open_store("127.0.0.1", 1, 30), Rank(), timeout_s=30)
    step = make_step(rollouts)
    lengths = [len(s.response_tokens) for s in step]
    tokens = sum(len(s.prompt_tokens) + len(s.response_tokens) for s in step)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        (model_dir / "config.json").write_text(json.dumps(SHAPE))
        trainers = {name: make_trainer(model_dir, name, micro_batch_tokens) for name in VARIANTS}
        ways = {name: partial(trainer.rl_step, step, temperature=1.0) for name, trainer in trainers.items()}
        computed = {name: way().tokens for name, way in ways.items()}
        seconds = in_turns(ways, repeats)
        profile = profile_step(trainers["packed"], step)
        peaks = {
            name: in_child(measure_memory, model_dir, name, micro_batch_tokens, rollouts, threads)
            for name in ("packed", "padded", "packed_checkpointed")
        }
    leave_group()
    found = {
        "batch": {
            "rollouts": rollouts,
            "tokens": tokens,
            "response_p50": float(np.median(lengths)),
            "response_p90": float(np.quantile(lengths, 0.9)),
            "response_max": max(lengths),
        },
        "variants": {
            name: {
                "step_s_median": round(median(taken), 4),
                "step_s": [round(s, 4) for s in taken],
                "tokens_per_s": round(tokens / median(taken)),
                "computed_tokens": computed[name],
                **({"peak_memory_mib": round(peaks[name] / 2**20, 1)} if name in peaks else {}),
            }
            for name, taken in seconds.items()
        },
        "packed_over_padded": paired(seconds["padded"], seconds["packed"]),
        "fsdp2_at_one_rank_over_none": paired(seconds["packed_fsdp2_one_rank"], seconds["packed"]),
        "profile_packed": profile,
    }
    print(json.dumps({k: v for k, v in found.items() if k != "profile_packed"}, indent=1))
    settings = {"threads": threads, "repeats": repeats, "micro_batch_tokens": micro_batch_tokens, "seed": 0}
    write(out, "one RL step of the learner, two mini-batches, packed and padded", found, settings=settings)


if __name__ == "__main__":
    command(main)
