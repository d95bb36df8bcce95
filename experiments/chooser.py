"""What a decision about speculation costs per engine step: `python -m experiments.chooser [--steps 200000]`.

Owns `results/chooser.json`: the time of `choose` and `record` together, by batch size and mode, over simulated steps of
a small model (virtual time; drafts accepted with a fixed probability, or all rejected). A held step decodes by a
standing decision; a deciding one closes a hold and decides anew (told apart by its time: over 5 medians). Target: p99
and mean under 50 us per step. Two pairs of clock readings are in it; what one shows for nothing is `clock_ns`.
"""

import json
import random
import time
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import ROOT, command, write
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from policies.speculation.build import build_policy
from policies.speculation.policy import StrategyPolicy
from policies.steps import Load, StepKind, StepOutcome

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
        load = Load(running, 0, 100 * running)
        strategy = policy.choose(load)
        chosen = clock() - start
        drafted = strategy.tokens_to_verify * running
        accepted = sum(accept**depth for depth in range(1, strategy.depth + 1)) * running
        elapsed_s = FIXED_S + (DRAFT_S if drafted else 0.0) + ROW_S * (running + drafted)
        elapsed_s *= 1 + 0.05 * draw.uniform(-1, 1)
        outcome = _outcome(strategy, load, drafted, int(accepted + draw.random()), elapsed_s)
        start = clock()
        policy.record(outcome)
        taken[step] = chosen + clock() - start  # warm-up steps are negative indices, written over later
    return taken


def _outcome(strategy: Strategy, load: Load, drafted: int, accepted: int, elapsed_s: float) -> StepOutcome:
    stood = np.minimum(np.full(load.running, accepted // load.running), strategy.depth)
    return StepOutcome(
        kind=StepKind.USUAL,
        strategy=strategy,
        load=load,
        prompt_tokens=0,
        drafted=drafted,
        accepted=accepted,
        elapsed_s=elapsed_s,
        draft_s=DRAFT_S if drafted else 0.0,
        prompt_ids=np.zeros(load.running, np.int64) if drafted else None,
        reached=np.full(load.running, strategy.depth) if drafted else None,
        stood=stood if drafted else None,
    )


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


def main(
    *,
    steps: Annotated[int, "per mode, schedule and world"] = 200_000,
    out: Path = ROOT / "experiments/results/chooser.json",
) -> None:
    rows = []
    for mode, schedule, world in product(("adaptive", "paper"), SCHEDULES, WORLDS):
        rows.append(measure(mode, schedule, world, steps))
        print(json.dumps(rows[-1]), flush=True)
    found = {"drafters": DRAFTERS, "target_ns": TARGET_NS, "clock_ns": clock_cost_ns(), "rows": rows}
    write(
        out, "what does a decision about speculation cost per engine step?", found, settings={"steps": steps, "seed": 0}
    )


if __name__ == "__main__":
    command(main)
