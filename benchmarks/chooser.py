"""What a decision about speculation costs per engine step: `python -m benchmarks.chooser [--steps 200000]`.

Owns `results/chooser.json`: the time of `choose` and `record` together, by batch size and mode, over simulated steps of
a small model (virtual time; drafts accepted with a fixed probability, or all rejected). A held step decodes by a
standing decision; a deciding one closes a hold and decides anew (told apart by its time: over 5 medians). Target: p99
and mean under 50 us per step. Two pairs of clock readings are in it; what one shows for nothing is `clock_ns`.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import describe_machine
from policies.speculation.build import build_policy
from policies.speculation.options import SpeculationOptions
from policies.speculation.policy import StrategyPolicy

ROOT = Path(__file__).parents[1]
TARGET_NS = 50_000
DRAFTERS = ("suffix", "ngram", "eagle")
WARM_UP_STEPS = 2_000
FIXED_S, ROW_S, DRAFT_S = 120e-6, 10e-6, 30e-6  # a pass of a 0.6M model: 200 us at 8 requests
WORLDS = {"accepted 0.7": 0.7, "all rejected": 0.0}
SCHEDULES = {"1": (1,), "16": (16,), "32": (32,), "tail": (40, 33, 24, 16, 12, 8, 6, 4, 3, 2, 1, 1, 1, 1)}
TAIL_STEPS = 12  # that each size of a tail lasts


def time_steps(policy: StrategyPolicy, schedule: tuple[int, ...], accept: float, steps: int) -> NDArray[np.int64]:
    """[steps] nanoseconds of choose + record."""
    draw = random.Random(0)
    taken = np.empty(steps, np.int64)
    clock = time.perf_counter_ns
    for step in range(-WARM_UP_STEPS, steps):
        running = schedule[step // TAIL_STEPS % len(schedule)]
        start = clock()
        strategy = policy.choose(running)
        chosen = clock() - start
        drafted = strategy.tokens_to_verify * running
        accepted = sum(accept**depth for depth in range(1, strategy.depth + 1)) * running
        elapsed_s = FIXED_S + (DRAFT_S if drafted else 0.0) + ROW_S * (running + drafted)
        elapsed_s *= 1 + 0.05 * draw.uniform(-1, 1)
        whole = int(accepted + draw.random())
        start = clock()
        policy.record(strategy, running, drafted, whole, elapsed_s)
        taken[step] = chosen + clock() - start  # warm-up steps are negative indices, written over later
    return taken


def quantiles(taken: NDArray[np.int64]) -> dict[str, Any]:
    if not len(taken):
        return {"steps": 0}
    p50, p99 = np.quantile(taken, [0.5, 0.99])
    return {"steps": len(taken), "mean_ns": round(taken.mean()), "p50_ns": round(p50), "p99_ns": round(p99)}


def measure(mode: str, schedule: str, world: str, steps: int) -> dict[str, Any]:
    policy = build_policy(SpeculationOptions.model_validate({"mode": mode}), DRAFTERS)
    assert policy is not None
    taken = time_steps(policy, SCHEDULES[schedule], WORLDS[world], steps)
    row: dict[str, Any] = {"mode": mode, "running": schedule, "world": world, "all": quantiles(taken)}
    row["all"]["max_ns"] = int(taken.max())
    if mode == "adaptive":
        deciding = taken > 5 * np.median(taken)
        row |= {"held": quantiles(taken[~deciding]), "deciding": quantiles(taken[deciding])}
    row["within_target"] = bool(max(row["all"]["p99_ns"], row["all"]["mean_ns"]) < TARGET_NS)
    return row


def clock_cost_ns(calls: int = 100_000) -> float:
    """Median of what two readings of the clock show for nothing."""
    clock = time.perf_counter_ns
    return float(np.median([-clock() + clock() for _ in range(calls)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="per mode, schedule and world")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "chooser.json")
    args = parser.parse_args()
    rows = []
    print(f"{'mode':9} {'running':>8} {'drafts':13} {'mean':>8} {'p50':>8} {'p99':>8}  ns per step; deciding p50, p99")
    for mode in ("adaptive", "paper"):
        for schedule in SCHEDULES:
            for world in WORLDS:
                row = measure(mode, schedule, world, args.steps)
                rows.append(row)
                found, late = row["all"], row.get("deciding", {})
                figures = f"{found['mean_ns']:8} {found['p50_ns']:8} {found['p99_ns']:8}"
                deciding = f"{late.get('p50_ns', '')!s:>8} {late.get('p99_ns', '')!s:>8}"
                over = "" if row["within_target"] else "  over 50 us"
                print(f"{mode:9} {schedule:>8} {world:13} {figures} {deciding}{over}", flush=True)
    record = {
        "machine": describe_machine(()),
        "steps": args.steps,
        "drafters": DRAFTERS,
        "target_ns": TARGET_NS,
        "clock_ns": clock_cost_ns(),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
