"""How fast a rollout could be: pass cost, draft cost and acceptance of one run, put together without any choosing.

Pure functions over step records. For every number of running requests the bound takes the strategy that is best in
hindsight, and charges each of its steps what a plain step costs beside its forward (scheduling, bookkeeping), the
measured forward of so many rows, and its measured drafting: exploration, a wrong choice and every other cost of
speculation count against what is compared with it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from actors.engine.batch.telemetry import EngineStepRecord

MIN_STEPS = 20  # fewer steps of a strategy say nothing about it
PassCost = Callable[[int, int], float]  # running requests, rows of all -> seconds of a forward


def bucket(running: int) -> int:
    """1, 2, 4, 8, ...: the power of two from which on `running` counts."""
    return 1 << (running.bit_length() - 1)


def interpolated(seconds: Mapping[int, Mapping[int, float]]) -> PassCost:
    """Pass cost from measured ones by `bucket` of running requests and rows: linear between rows and beyond."""

    def cost(running: int, count: int) -> float:
        known = seconds[bucket(running)]
        rows = sorted(known)
        if len(rows) == 1:
            return known[rows[0]]
        upper = next((i for i, row in enumerate(rows) if row >= count), len(rows) - 1)
        low, high = rows[max(upper, 1) - 1], rows[max(upper, 1)]
        return known[low] + (known[high] - known[low]) * max(count - low, 0) / (high - low)

    return cost


def bound_s(off: Sequence[EngineStepRecord], others: Sequence[EngineStepRecord], pass_cost: PassCost) -> float:
    """Seconds in which the tokens of `off`, plain decoding of the whole case, could have come at best.

    others: steps of the same case under any strategies. Steps with prompt chunks stay as they are.
    """
    plain: dict[int, list[EngineStepRecord]] = defaultdict(list)
    for step in off:
        if not step.prefill_tokens:
            plain[bucket(step.running)].append(step)
    drafting: dict[tuple[int, str], list[EngineStepRecord]] = defaultdict(list)
    for step in others:
        if step.strategy.depth and not step.prefill_tokens:
            drafting[bucket(step.running), str(step.strategy)].append(step)
    total = sum(step.elapsed_s for step in off if step.prefill_tokens)
    for size, steps in plain.items():
        tokens = sum(step.emitted for step in steps)
        beside_s = median(step.elapsed_s - pass_cost(step.running, step.running) for step in steps)
        per_token = [sum(step.elapsed_s for step in steps) / tokens]
        for (running, _), tried in drafting.items():
            if running == size and len(tried) >= MIN_STEPS:
                rows = [(step.running, step.running + step.drafted) for step in tried]
                ideal = sum(beside_s + pass_cost(*at) + step.draft_s for at, step in zip(rows, tried, strict=True))
                measured = sum(step.elapsed_s for step in tried)
                per_token.append(min(ideal, measured) / sum(step.emitted for step in tried))
        total += tokens * min(per_token)
    return total
