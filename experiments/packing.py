"""The micro-batch plan: how many micro-batches it needs, how even ranks are, and what it costs to make.

    python -m experiments.packing [--repeats 5] [--counts 256 1024]

Against: the order of arrival without padding (next fit), and padded batches (`learner.packing: false`). Counts are
exact and the same on every machine; seconds are medians, taken in turns. The committed record has the plan that this
one replaced as well (emptiest first, one more round until all fits: cubic just over half the budget).
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from actors.training.packing import Plan, plan_packed, plan_padded
from benchmarks.harness import ROOT, command, in_turns, write

SEED = 0

Lengths = list[int]
CASES: dict[str, tuple[Callable[[np.random.Generator, int], Any], int]] = {
    "log-normal, tight budget": (lambda rng, n: rng.lognormal(7.5, 0.6, n).clip(100, 8192), 8192),
    "log-normal, 1.5 x longest": (lambda rng, n: rng.lognormal(7.5, 0.6, n).clip(100, 8192), 12_288),
    "long tail, loose budget": (lambda rng, n: rng.lognormal(6.0, 1.0, n).clip(8, 8192), 32_768),
    "uniform, 2 x longest": (lambda rng, n: rng.uniform(1000, 16_384, n), 32_768),
    "just over half the budget": (lambda rng, n: rng.uniform(4100, 4400, n), 8192),
}


def plan_arrival(lengths: Sequence[int], *, budget_tokens: int, ranks: int) -> Plan:
    """Next fit: in the given order, a new micro-batch when the next sequence does not fit."""
    bins: list[list[int]] = []
    room = -1
    for i, length in enumerate(lengths):
        if length > room:
            bins.append([])
            room = budget_tokens
        bins[-1].append(i)
        room -= length
    bins += [[] for _ in range(-len(bins) % ranks)]
    return [bins[rank::ranks] for rank in range(ranks)]


PLANS = {"packed": plan_packed, "arrival": plan_arrival, "padded": plan_padded}


def lower_bound(lengths: Sequence[int], budget: int) -> int:
    """Micro-batches that any plan needs: the volume, or what does not go together (Martello and Toth 1990, L2)."""
    sizes = np.sort(np.minimum(lengths, budget))
    bound = -(-int(sizes.sum()) // budget)
    for small in np.unique(sizes[2 * sizes <= budget]):
        alone = sizes[sizes > budget - small]
        halves = sizes[(2 * sizes > budget) & (sizes <= budget - small)]
        rest = sizes[(sizes >= small) & (2 * sizes <= budget)]
        spill = int(rest.sum()) - (halves.size * budget - int(halves.sum()))
        bound = max(bound, alone.size + halves.size + max(0, -(-spill // budget)))
    return max(bound, int((2 * sizes > budget).sum()))


def measure(name: str, count: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Every plan of one case, in turns."""
    draw, budget = CASES[name]
    lengths: Lengths = draw(np.random.default_rng(SEED), count).astype(int).tolist()
    made: dict[str, Plan] = {}

    def plan(name: str) -> None:
        made[name] = PLANS[name](lengths, budget_tokens=budget, ranks=ranks)

    seconds = in_turns({name: partial(plan, name) for name in PLANS}, repeats, warm_up=0)
    loads = {name: [sum(lengths[i] for of in rank for i in of) for rank in ranked] for name, ranked in made.items()}
    rounds = {name: len(ranked[0]) for name, ranked in made.items()}
    bound = -(-lower_bound(lengths, budget) // ranks)
    return {
        "case": name,
        "sequences": count,
        "ranks": ranks,
        "budget_tokens": budget,
        "lower_bound_per_rank": bound,
        "micro_batches_per_rank": rounds,
        "packed_over_bound": round(rounds["packed"] / bound, 4),
        "most_loaded_rank_above_mean": {name: round(max(of) * ranks / sum(of) - 1, 4) for name, of in loads.items()},
        "milliseconds": {plan: round(1e3 * median(values), 3) for plan, values in seconds.items()},
    }


def main(
    *,
    counts: Annotated[Sequence[int], "of sequences"] = (256, 1024, 10_000),
    repeats: int = 5,
    out: Path = ROOT / "experiments/results/packing.json",
) -> None:
    rows = []
    for name, count, ranks in product(CASES, counts, (1, 8)):
        rows.append(measure(name, count, ranks, repeats))
        print(json.dumps(rows[-1]), flush=True)
    question = "micro-batches per rank, evenness of ranks and seconds of the plan of one mini-batch"
    write(out, question, {"cases": rows}, settings={"seed": SEED, "repeats": repeats})


if __name__ == "__main__":
    command(main)
