"""The best possible time of a rollout in hindsight, and an estimate for another engine's passes.

Pure functions over step records.

`bound_s` is a bound by construction. A run is a number of tokens at every `bucket` of running requests, each at some
seconds. The bound charges, for every bucket, the fewest seconds per token at which *any* run of the same turn wrote
tokens there, by one of its strategies or by its own mixture of them, with the passes, drafts and acceptance of that
run. Drafts also decide how many tokens are left for small batches (a well-guessed request ends early), so the bound
takes the run with the cheapest distribution. No run of the turn can be faster: at its own distribution the bound
charges at most its actual time. It needs no separately measured cost. Such costs made the older estimate smaller than
what was reached: other passes, on a machine at another speed, and no switching within a bucket. It errs upwards: the
luckiest of several noisy figures counts, if it has MIN_STEPS steps.

`estimate_s` is that older one. Every step costs the part of a plain one outside its forward, a separately measured
forward, and its own drafting. Runs can exceed it. It is for engines whose drafts were made elsewhere
(`benchmarks.rollout_vllm`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from actors.engine.batch.telemetry import EngineStepRecord

MIN_STEPS = 20  # fewer steps of a strategy are not significant
PassCost = Callable[[int, int], float]  # (running requests, total rows) -> seconds of a forward


def bucket(running: int) -> int:
    """Return the largest power of two up to `running`: 1, 2, 4, 8, ..."""
    return 1 << (running.bit_length() - 1)


@dataclass(slots=True)
class _Share:
    """The work of a run at one bucket, or of one strategy there."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, step: EngineStepRecord) -> None:
        self.steps += 1
        self.tokens += step.emitted
        self.seconds += step.elapsed_s

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens


@dataclass(slots=True)
class _Split:
    """A run by bucket, and the parts that do not depend on strategies: prompts, and time between steps."""

    other_s: float
    shares: dict[int, _Share] = field(default_factory=lambda: defaultdict(_Share))
    by_strategy: dict[tuple[int, str], _Share] = field(default_factory=lambda: defaultdict(_Share))


def _split(seconds: float, steps: Sequence[EngineStepRecord]) -> _Split:
    found = _Split(seconds)
    for step in steps:
        if not step.prefill_tokens and step.emitted:
            size = bucket(step.running)
            found.shares[size].add(step)
            found.by_strategy[size, str(step.strategy)].add(step)
            found.other_s -= step.elapsed_s
    return found


def bound_s(runs: Sequence[tuple[float, Sequence[EngineStepRecord]]]) -> float:
    """Return a lower bound in seconds for all runs, given the seconds and steps of each. All runs write the same
    tokens."""
    splits = [_split(*run) for run in runs]
    least: dict[int, float] = {}  # seconds per token by bucket, over all runs
    for split in splits:
        everything = [*split.shares.items(), *((size, share) for (size, _), share in split.by_strategy.items())]
        for size, share in everything:
            if share.steps >= MIN_STEPS:
                least[size] = min(least.get(size, share.token_s), share.token_s)
    return min(
        split.other_s
        + sum(share.tokens * min(least.get(size, share.token_s), share.token_s) for size, share in split.shares.items())
        for split in splits
    )


def interpolated(seconds: Mapping[int, Mapping[int, float]]) -> PassCost:
    """Return the pass cost from measured ones, by `bucket` of running requests and rows: linear between rows and
    beyond."""

    def cost(running: int, count: int) -> float:
        known = seconds[bucket(running)]
        rows = sorted(known)
        if len(rows) == 1:
            return known[rows[0]]
        upper = next((i for i, row in enumerate(rows) if row >= count), len(rows) - 1)
        low, high = rows[max(upper, 1) - 1], rows[max(upper, 1)]
        return known[low] + (known[high] - known[low]) * max(count - low, 0) / (high - low)

    return cost


def estimate_s(off: Sequence[EngineStepRecord], others: Sequence[EngineStepRecord], pass_cost: PassCost) -> float:
    """Return the estimated least seconds for the tokens of `off`, plain decoding of the whole case.

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
