"""The learner's RL step: packed against padded micro-batches, peak memory, FSDP2 at one rank, and where the time goes.

    python -m benchmarks.learner_packing [--threads 2] [--repeats 7] [--quick]

One RL step of the demo: 16 prompts x 8 responses, prompts of 12 tokens, response lengths log-normal with median 42 and
90 % quantile 143, cut at 200; Qwen3 with 0.62M parameters; two mini-batches. Throughput counts real tokens only, so
padding is a cost. Variants take turns within one process; the figure is the median over repeats, and the ratio is of
medians. Peak memory is measured in a fresh process per variant: the growth of resident memory over the built model.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "learner_packing.json"
DEMO = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 228,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False},
    "packed_checkpointed": {"activation_checkpointing": True},
    "packed_fsdp2_one_rank": {"force_sharding": True},
}


def make_step(rollouts: int, seed: int = 0) -> list[Any]:
    """Sequences with the demo's lengths."""
    import numpy as np

    from actors.training.types import TrainSequence

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


def make_trainer(model_dir: Path, variant: str, micro_batch_tokens: int) -> Any:
    """A trainer of that variant, with fresh weights."""
    from actors.training.options import LearnerOptions, OptimizerOptions
    from actors.training.trainer import Trainer
    from models.options import ModelOptions
    from policies.options import ObjectiveOptions

    learner = dict(VARIANTS[variant])
    force = learner.pop("force_sharding", False)
    options = LearnerOptions(mini_batches=2, micro_batch_tokens=micro_batch_tokens, **learner)
    trainer = Trainer(
        ModelOptions(path=str(model_dir)), options, ObjectiveOptions(), init="random", force_sharding=force
    )
    trainer.begin(OptimizerOptions(lr=1e-5), 1)
    return trainer


def memory_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process. Not getrusage: a child starts with its parent's peak there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure_memory(model_dir: Path, variant: str, micro_batch_tokens: int, rollouts: int, threads: int) -> int:
    """Peak growth in bytes while one step runs; to be called in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    trainer = make_trainer(model_dir, variant, micro_batch_tokens)
    trainer.rl_step(make_step(2, seed=1), temperature=1.0)  # library buffers that any first step allocates
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    trainer.rl_step(make_step(rollouts), temperature=1.0)
    return memory_bytes("VmHWM") - before


def in_child(function: Any, *args: Any) -> Any:
    """function(*args) in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout=300)


def profile_step(trainer: Any, step: list[Any]) -> list[dict[str, float | str]]:
    """The operations with the largest own time in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        trainer.rl_step(step, temperature=1.0)
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    return [{"op": e.key, "share": round(e.self_cpu_time_total / total, 4), "calls": e.count} for e in events[:15]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="16 rollouts, 2 repeats: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rollouts, repeats = (16, 2) if args.quick else (128, args.repeats)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)

    import numpy as np
    import torch

    from actors.training.parallel import Rank, join_group, leave_group, open_store

    torch.set_num_threads(args.threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join_group(open_store("127.0.0.1", 1, 30), Rank(), timeout_s=30)
    step = make_step(rollouts)
    lengths = [len(s.response_tokens) for s in step]
    tokens = sum(len(s.prompt_tokens) + len(s.response_tokens) for s in step)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        (model_dir / "config.json").write_text(json.dumps(DEMO))
        trainers = {name: make_trainer(model_dir, name, args.micro_batch_tokens) for name in VARIANTS}
        seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
        computed = {}
        for repeat in range(repeats + 1):
            for name, trainer in trainers.items():
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                result = trainer.rl_step(step, temperature=1.0)
                if repeat:  # the first is warm-up
                    seconds[name].append(time.perf_counter() - start_s)
                    cpu_seconds[name].append(time.process_time() - start_cpu_s)
                computed[name] = result.tokens
            print(
                f"repeat {repeat}/{repeats}: " + ", ".join(f"{n} {s[-1] if s else 0:.3f} s" for n, s in seconds.items())
            )
        profile = profile_step(trainers["packed"], step)
        peaks = {
            name: in_child(measure_memory, model_dir, name, args.micro_batch_tokens, rollouts, args.threads)
            for name in ("packed", "padded", "packed_checkpointed")
        }
    leave_group()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "what": "one RL step of the learner, two mini-batches",
        "machine": describe_machine(),
        "settings": {"threads": args.threads, "repeats": repeats, "micro_batch_tokens": args.micro_batch_tokens},
        "batch": {
            "rollouts": rollouts,
            "tokens": tokens,
            "response_p50": float(np.median(lengths)),
            "response_p90": float(np.quantile(lengths, 0.9)),
            "response_max": max(lengths),
        },
        "variants": {
            name: {
                "step_s_median": round(medians[name], 4),
                "step_s": [round(s, 4) for s in seconds[name]],
                "cpu_s_median": round(statistics.median(cpu_seconds[name]), 4),
                "tokens_per_s": round(tokens / medians[name]),
                "computed_tokens": computed[name],
                **({"peak_memory_mib": round(peaks[name] / 2**20, 1)} if name in peaks else {}),
            }
            for name in VARIANTS
        },
        "packed_over_padded": round(medians["padded"] / medians["packed"], 2),
        "fsdp2_at_one_rank_over_none": round(medians["packed_fsdp2_one_rank"] / medians["packed"], 2),
        "profile_packed": profile,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "profile_packed"}, indent=1))


if __name__ == "__main__":
    main()
