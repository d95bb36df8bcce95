"""Results of speculation, from engine windows to numbers for people: per RL step and over a run.

Owns the record of speculation.jsonl and the metrics `speculation/*`. Pure: no files, no clock.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from contracts.rollout import DraftCounts, EngineWindow, ReasonUse
from launch.observe import reasons
from launch.observe.reasons import Reasons

PLAIN = "plain"  # plain decoding, as a strategy and in place of a drafter
MAX_POINTS = 4000  # of the traces of one RL step, all workers together
MAX_PROMPTS = 512  # in one record; those with the most drafted tokens
Item = TypeVar("Item")

_SECONDS = ("seconds", "draft_s", "saved_s", "expected_s", "measured_s", "missed_s")
Point = tuple[float, int, str]  # (time, requests running from then on, drafter)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeculation:
    """One RL step, all workers."""

    strategies: Mapping[str, DraftCounts]
    traces: Mapping[str, Sequence[Point]]  # by worker, by time; the last point ends the trace with 0 running
    requests: Sequence[tuple[int, int]] = ()  # (tokens, verifications) of each response made by one worker
    prompts: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted) by prompt id
    reasons: Reasons = field(default_factory=dict)
    origins: Mapping[str, int] = field(default_factory=dict)  # accepted tokens by where drafters found them
    sibling_gain: tuple[int, int, int] = (0, 0, 0)  # as in EngineWindow
    heard_tokens: int = 0  # that engines received of siblings under way on other workers
    heard_delay_s: float = 0.0  # their mean delay

    def to_json(self) -> dict[str, Any]:
        """Return the JSON record. Trace points are [ms since origin_s, running, index in `drafters`]."""
        drafters = sorted({drafter for points in self.traces.values() for _, _, drafter in points})
        origin_s = min((points[0][0] for points in self.traces.values() if points), default=0.0)
        index = {drafter: i for i, drafter in enumerate(drafters)}
        return {
            "strategies": {name: _json(totals) for name, totals in sorted(self.strategies.items())},
            "reasons": {name: totals.to_json() for name, totals in sorted(self.reasons.items())},
            "origins": dict(sorted(self.origins.items())),
            "origin_s": round(origin_s, 4),
            "drafters": drafters,
            "traces": {
                worker: [
                    [round((at_s - origin_s) * 1000, 1), running, index[drafter]] for at_s, running, drafter in points
                ]
                for worker, points in sorted(self.traces.items())
            },
            "requests": [list(pair) for pair in self.requests],
            "prompts": [
                [prompt_id, drafted, accepted]
                for prompt_id, (drafted, accepted) in sorted(self.prompts.items(), key=lambda item: -item[1][0])
            ][:MAX_PROMPTS],
        }

    def metrics(self) -> dict[str, float]:
        """Return scalars `speculation/*` and `engine/steps`. Those without a value (nothing was drafted)
        are left out."""
        engine_steps = sum(totals.engine_steps for totals in self.strategies.values())
        drafters = by_drafter(self.strategies)
        speculated, whole = speculating(self.strategies), summed(self.strategies.values())
        values: dict[str, float | None] = {
            "engine/steps": float(engine_steps),
            "speculation/share": speculated.engine_steps / engine_steps if engine_steps else None,
            "speculation/accept_length": speculated.accept_length,
            "speculation/acceptance": speculated.acceptance,
            "speculation/saved_s": speculated.saved_s,
            "speculation/draft_s": speculated.draft_s,
            "speculation/predicted_error": whole.predicted_error,
            "speculation/predicted_ratio": whole.predicted_ratio,
            **reasons.metrics(self.reasons),
        }
        found = sum(self.origins.values())
        values |= {f"speculation/from/{name}": tokens / found for name, tokens in self.origins.items()}
        drafts, accepted, without = self.sibling_gain
        if drafts:
            values["speculation/siblings/gain"] = (drafts + accepted) / (drafts + without)
        if self.heard_tokens:
            values["speculation/siblings/heard_tokens"] = float(self.heard_tokens)
            values["speculation/siblings/delay_s"] = self.heard_delay_s
        for name, totals in drafters.items():
            values[f"speculation/{name}/predicted_ratio"] = totals.predicted_ratio
            if name != PLAIN:
                values[f"speculation/{name}/accept_length"] = totals.accept_length
                values[f"speculation/{name}/acceptance"] = totals.acceptance
                values[f"speculation/{name}/saved_s"] = totals.saved_s
                values[f"speculation/{name}/steps"] = float(totals.engine_steps)
        per_request = [tokens / verifications for tokens, verifications in self.requests if verifications]
        values |= _quantiles("speculation/request_accept_length", per_request)
        by_prompt = [accepted / drafted for drafted, accepted in self.prompts.values() if drafted]
        values |= _quantiles("speculation/prompt_acceptance", by_prompt)
        return {name: value for name, value in values.items() if value is not None}


class SpeculationMeter:
    """Adds up the windows of all workers between `begin` and `take`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._strategies: defaultdict[str, DraftCounts] = defaultdict(DraftCounts)
        self._reasons: dict[str, ReasonUse] = {}
        self._traces: dict[str, list[Point]] = {}
        self._end_s: dict[str, float] = {}
        self._drafted, self._accepted = Counter[int](), Counter[int]()  # by prompt id
        self._origins, self._gain = Counter[str](), (0, 0, 0)
        self._heard_tokens, self._heard_s = 0, 0.0

    def window(self, worker: str, window: EngineWindow) -> None:
        for use in window.strategies:
            self._strategies[use.strategy].add(use)
        for choice in window.reasons:
            self._reasons.setdefault(choice.reason, ReasonUse(choice.reason)).add(choice)
        for prompt in window.prompts:
            self._drafted[prompt.prompt_id] += prompt.drafted
            self._accepted[prompt.prompt_id] += prompt.accepted
        self._origins.update(dict(window.origins))
        drafts, accepted, without = window.sibling_gain
        self._gain = (self._gain[0] + drafts, self._gain[1] + accepted, self._gain[2] + without)
        self._heard_tokens += window.heard_tokens
        self._heard_s += window.heard_delay_s
        if window.trace or worker in self._traces:
            self._traces.setdefault(worker, []).extend((t, n, _named(drafter)) for t, n, drafter in window.trace)
            self._end_s[worker] = window.end_s

    def take(self, requests: Sequence[tuple[int, int]] = ()) -> StepSpeculation:
        """Return everything since `begin`, and begin anew."""
        share = MAX_POINTS // max(len(self._traces), 1)
        closed = {worker: _closed(points, self._end_s[worker]) for worker, points in self._traces.items()}
        traces = {worker: thinned(points, share) for worker, points in closed.items()}
        strategies = {name: plausible(totals) for name, totals in self._strategies.items()}
        prompts = {prompt_id: (drafted, self._accepted[prompt_id]) for prompt_id, drafted in self._drafted.items()}
        kept = {worker: points for worker, points in traces.items() if points}
        taken = StepSpeculation(
            strategies=strategies,
            traces=kept,
            requests=requests,
            prompts=prompts,
            reasons=dict(self._reasons),
            origins=dict(self._origins),
            sibling_gain=self._gain,
            heard_tokens=self._heard_tokens,
            heard_delay_s=self._heard_s / max(self._heard_tokens, 1),
        )
        self.begin()
        return taken


def drafter_of(strategy: str) -> str:
    """Return the drafter of a strategy: `suffix:8` -> `suffix`; `plain` stays `plain`."""
    return strategy.partition(":")[0]


def plausible(counts: DraftCounts) -> DraftCounts:
    """Bound `saved_s` by what is possible: without accepted drafts nothing was saved. Engines apply a finer bound per
    step (`actors.engine.batch.telemetry`). It cannot be done here: the mean accept length here is over requests, while
    most seconds are of steps with few requests, whose accept length differs."""
    return counts if counts.accepted else replace(counts, saved_s=min(counts.saved_s, 0.0))


def _json(counts: DraftCounts) -> dict[str, Any]:
    seconds = {name: round(getattr(counts, name), 6) for name in _SECONDS}
    return {
        "engine_steps": counts.engine_steps,
        "request_steps": counts.request_steps,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        **seconds,
        "offered": list(counts.offered),
        "taken": list(counts.taken),
    }


def by_drafter(strategies: Mapping[str, DraftCounts]) -> dict[str, DraftCounts]:
    """Sum over each drafter's strategies, including PLAIN."""
    found: defaultdict[str, DraftCounts] = defaultdict(DraftCounts)
    for strategy, totals in strategies.items():
        found[drafter_of(strategy)].add(totals)
    return dict(sorted(found.items()))


def speculating(strategies: Mapping[str, DraftCounts]) -> DraftCounts:
    """Sum over all strategies that draft."""
    return summed(totals for strategy, totals in strategies.items() if strategy != PLAIN)


def summed(parts: Iterable[DraftCounts]) -> DraftCounts:
    """Sum the totals of several strategies."""
    total = DraftCounts()
    for part in parts:
        total.add(part)
    return total


def over_run(records: Iterable[Mapping[str, Any]]) -> dict[str, DraftCounts]:
    """Sum by strategy over records of speculation.jsonl; foreign records are left out."""
    total: defaultdict[str, DraftCounts] = defaultdict(DraftCounts)
    for record in records:
        for strategy, totals in strategies_of(record).items():
            total[strategy].add(totals)
    return dict(total)


def strategies_of(record: Mapping[str, Any]) -> dict[str, DraftCounts]:
    """Return the strategies of one record of speculation.jsonl."""
    strategies = record.get("strategies")
    found = {}
    for name, values in (strategies if isinstance(strategies, dict) else {}).items():
        try:
            depths = {key: tuple(values[key]) for key in ("offered", "taken") if key in values}
            found[str(name)] = plausible(DraftCounts(**{**values, **depths}))
        except TypeError:
            continue
    return found


def origins_over_run(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Sum accepted tokens by origin over records of speculation.jsonl, most first; foreign records are left out."""
    total = Counter[str]()
    for record in records:
        origins = record.get("origins")
        if isinstance(origins, dict):
            total.update({str(name): count for name, count in origins.items() if isinstance(count, int)})
    return dict(total.most_common())


def traces_of(record: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Return the traces of one record of speculation.jsonl, times in seconds since the epoch."""
    try:
        origin_s, drafters = float(record["origin_s"]), record["drafters"]
        return {
            str(worker): [(origin_s + ms / 1000, int(running), str(drafters[i])) for ms, running, i in points]
            for worker, points in record["traces"].items()
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return {}


def prompts_over_run(records: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Sum (drafted, accepted) by prompt id over records of speculation.jsonl; foreign records are left out."""
    drafted, accepted = Counter[int](), Counter[int]()
    for record in records:
        try:
            rows = [(int(prompt_id), int(offered), int(stood)) for prompt_id, offered, stood in record["prompts"]]
        except (KeyError, TypeError, ValueError):
            continue
        for prompt_id, offered, stood in rows:
            drafted[prompt_id] += offered
            accepted[prompt_id] += stood
    return {prompt_id: (offered, accepted[prompt_id]) for prompt_id, offered in drafted.items()}


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    parts = zip(("p10", "p50", "p90"), np.quantile(values, (0.1, 0.5, 0.9)), strict=True) if values else ()
    return {f"{name}/{part}": float(value) for part, value in parts}


def _named(drafter: str) -> str:
    return PLAIN if drafter == "none" else drafter


def _closed(points: list[Point], end_s: float) -> list[Point]:
    """Close the trace: a lost worker leaves its last point open."""
    if not points or points[-1][1] == 0:
        return points
    return [*points, (max(end_s, points[-1][0]), 0, points[-1][2])]


def thinned(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Pick at most `most` items (never fewer than two) evenly, including the first and the last."""
    if len(items) <= most:
        return items
    step = (len(items) - 1) / (max(most, 2) - 1)
    return [items[math.floor(i * step + 0.5)] for i in range(max(most, 2))]
