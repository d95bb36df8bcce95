"""The data of the report's section on speculation, from speculation.jsonl. Reads records; has no HTML.

Running requests over time follow TLT Figure 14. There the curve of one engine changes colour where speculation switches
on; here the requests of all workers are stacked by drafter.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from contracts.rollout import DraftCounts
from launch.observe.reasons import off_text, reasons_of, reasons_over_run, shares
from launch.observe.speculation import (
    PLAIN,
    by_drafter,
    over_run,
    prompts_over_run,
    strategies_of,
    summed,
    traces_of,
)

BINS = 240  # of one chart of running requests
MIN_DRAFTS = 20  # drafts that must reach a position, for its acceptance to be shown
MIN_DRAFTED = 100  # drafted tokens that a prompt needs to be shown
SHOWN_PROMPTS = 5  # with the lowest and with the highest acceptance, each


def speculation_data(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the section's data, ready for JSON; None if nothing was recorded (speculation was off)."""
    records = sorted((r for r in records if isinstance(r.get("step"), int) and strategies_of(r)), key=_step)
    if not records:
        return None
    per_step = [by_drafter(strategies_of(record)) for record in records]
    names = sorted({name for drafters in per_step for name in drafters} - {PLAIN})
    whole = over_run(records)
    reasons = [shares(reasons_of(record)) for record in records]
    over_all = reasons_over_run(records)
    return {
        "steps": [record["step"] for record in records],
        "drafters": names,
        "acceptance": {name: [_of(d, name).acceptance for d in per_step] for name in names},
        "accept_length": {name: [_of(d, name).accept_length for d in per_step] for name in names},
        "engine_steps": {name: [_of(d, name).engine_steps for d in per_step] for name in [PLAIN, *names]},
        "saved_s": {name: _cumulative([_of(d, name).saved_s for d in per_step]) for name in names},
        "positions": {name: _positions(by_drafter(whole)[name]) for name in names},
        "strategies": [_row(name, totals, whole) for name, totals in _by_use(whole)],
        "reasons": {name: [per.get(name, 0.0) for per in reasons] for name in shares(over_all)},
        "off": off_text(over_all),
        "expected_s": {name: [_of(d, name).expected_s or None for d in per_step] for name in [PLAIN, *names]},
        "measured_s": {name: [_of(d, name).measured_s or None for d in per_step] for name in [PLAIN, *names]},
        "predicted_error": [summed(drafters.values()).predicted_error for drafters in per_step],
        "prompts": _prompts(prompts_over_run(records)),
        "running": [_running(record) for record in _first_middle_last(records)],
    }


def _positions(totals: DraftCounts) -> list[float | None]:
    offered = totals.offered
    return [share if n >= MIN_DRAFTS else None for share, n in zip(totals.by_position(), offered, strict=True)]


def _running(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean number of running requests per time bin, by drafter."""
    traces = traces_of(record)
    start_s = min((points[0][0] for points in traces.values() if points), default=0.0)
    end_s = max((points[-1][0] for points in traces.values() if points), default=start_s)
    width_s = max(end_s - start_s, 1e-6) / BINS
    bins: dict[str, list[float]] = {}
    for points in traces.values():
        for (from_s, running, drafter), (to_s, _, _) in pairwise(points):
            if running:
                _spread(bins.setdefault(drafter, [0.0] * BINS), from_s - start_s, to_s - start_s, running, width_s)
    names = [PLAIN, *sorted(set(bins) - {PLAIN})]
    return {
        "step": record["step"],
        "width_s": width_s,
        "running": {name: [round(value, 2) for value in bins[name]] for name in names if name in bins},
    }


def _spread(bins: list[float], from_s: float, to_s: float, value: float, width_s: float) -> None:
    """Add `value` over [from_s, to_s) to the means of bins of `width_s`."""
    first, last = int(from_s / width_s), min(int(to_s / width_s), len(bins) - 1)
    for i in range(min(first, len(bins) - 1), last + 1):
        overlap_s = min(to_s, (i + 1) * width_s) - max(from_s, i * width_s)
        bins[i] += value * max(overlap_s, 0.0) / width_s


def _prompts(prompts: Mapping[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the prompts with the lowest acceptance, then those with the highest, ascending."""
    shown = sorted(
        (accepted / drafted, prompt_id, drafted)
        for prompt_id, (drafted, accepted) in prompts.items()
        if drafted >= MIN_DRAFTED
    )
    picked = shown if len(shown) <= 2 * SHOWN_PROMPTS else shown[:SHOWN_PROMPTS] + shown[-SHOWN_PROMPTS:]
    return [{"prompt": prompt_id, "drafted": drafted, "acceptance": share} for share, prompt_id, drafted in picked]


def _row(name: str, totals: DraftCounts, whole: Mapping[str, DraftCounts]) -> dict[str, Any]:
    engine_steps = sum(other.engine_steps for other in whole.values())
    return {
        "strategy": name,
        "share": totals.engine_steps / max(engine_steps, 1),
        "requests": totals.request_steps / max(totals.engine_steps, 1),
        "accept_length": totals.accept_length,
        "acceptance": totals.acceptance,
        "draft_share": totals.draft_s / totals.seconds if totals.seconds else None,
        "saved_s": totals.saved_s,
    }


def _by_use(strategies: Mapping[str, DraftCounts]) -> list[tuple[str, DraftCounts]]:
    return sorted(strategies.items(), key=lambda item: (-item[1].engine_steps, item[0]))


def _first_middle_last(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    traced = [record for record in records if any(traces_of(record).values())]
    picked = sorted({0, len(traced) // 2, len(traced) - 1}) if traced else []
    return [traced[i] for i in picked]


def _of(drafters: Mapping[str, DraftCounts], name: str) -> DraftCounts:
    return drafters.get(name) or DraftCounts()


def _cumulative(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(round(total, 4))
    return sums


def _step(record: Mapping[str, Any]) -> int:
    return int(record["step"])
