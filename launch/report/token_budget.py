"""The data of the report's section on the token budget, and its rows of the summary.

From budget.jsonl, and from the metrics `budget/*`, `abort/*` and `skip/*`. Reads records; has no HTML. Rollouts per
prompt that spread over RL steps are DUET's picture of its allocator at work.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PREFIXES = ("budget/", "abort/", "skip/")
QUANTILES = {"p10": 0.1, "p25": 0.25, "p75": 0.75, "p90": 0.9}
PLANNED = "budget/planned_tokens"
BIASED = "biased"  # kind of the event that explains a biased gradient estimate

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetSummary:
    """Token budget over the RL steps of a run; None if nothing was recorded."""

    budget_tokens: int | None  # of the steps with a budget, ...
    planned_tokens: int | None  # ... planned for the allocated counts, ...
    spent_tokens: int | None  # ... and actually used
    rollouts_min: int | None  # per prompt and step, under a budget
    rollouts_mean: float | None
    rollouts_max: int | None
    variance: float | None  # of the estimated gradient, relative to uniform counts at the same tokens
    least_variance: float | None  # lower bound over all allocations
    answered_share: float | None  # of the responses, ended after their answer
    given_up_share: float | None
    kept_late_share: float | None
    saved_tokens: int | None  # estimated
    surcharge: float | None  # mean of squared weights: the variance that giving up adds
    passed_over: int | None  # number of prompts skipped by rollout.skip
    skip_share: float | None  # of the prompts that were due
    biased: Sequence[str] = ()  # reasons why the gradient estimate is biased


def token_budget_data(steps: Sequence[Row], records: Sequence[Row]) -> dict[str, Any] | None:
    """Return the section's data beyond the plain metrics, ready for JSON; None if none of it was on.

    `steps`: the run's rows of metrics.jsonl. `records`: rows of budget.jsonl. Result: `parts` lists which of budget,
    abort and skip have data. `variance` is by RL step, relative to uniform counts at the same tokens, like the least
    that an allocation could have reached.
    """
    parts = [prefix[:-1] for prefix in PREFIXES if any(name.startswith(prefix) for row in steps for name in row)]
    if not parts:
        return None
    counted = _counted(steps, records)
    counts = [np.asarray(row["rollouts"], np.float64) for row in counted]
    rollouts: dict[str, list[float]] = {
        "x": [row["step"] for row in counted],
        "min": [float(values.min()) for values in counts],
        "mean": [round(float(values.mean()), 3) for values in counts],
        "max": [float(values.max()) for values in counts],
    }
    rollouts |= {name: [float(np.quantile(values, q)) for values in counts] for name, q in QUANTILES.items()}
    return {
        "parts": parts,
        "rollouts": rollouts,
        "variance": [_variance(row) for row in steps],
        "least_variance": [_least(row) for row in steps],
    }


def token_budget_summary(
    steps: Sequence[Row], records: Sequence[Row], events: Sequence[Row]
) -> TokenBudgetSummary | None:
    """Summarise the records; None if neither a budget, nor an early end, nor a skipped prompt was recorded."""
    if token_budget_data(steps, records) is None:
        return None
    counts = [int(count) for row in _counted(steps, records) for count in row["rollouts"]]
    planned = [row for row in steps if _has(row, "budget/tokens", PLANNED, "budget/spent_tokens")]
    estimated = [row for row in steps if _has(row, "budget/variance", "budget/variance_uniform")]
    uniform = _sum(estimated, "budget/variance_uniform")
    least = [row["budget/variance_uniform"] * value for row in estimated if (value := _least(row)) is not None]
    return TokenBudgetSummary(
        budget_tokens=round(_sum(planned, "budget/tokens")) if planned else None,
        planned_tokens=round(_sum(planned, PLANNED)) if planned else None,
        spent_tokens=round(_sum(planned, "budget/spent_tokens")) if planned else None,
        rollouts_min=min(counts, default=None),
        rollouts_mean=sum(counts) / len(counts) if counts else None,
        rollouts_max=max(counts, default=None),
        variance=_sum(estimated, "budget/variance") / uniform if uniform > 0 else None,
        least_variance=math.fsum(least) / uniform if uniform > 0 and len(least) == len(estimated) else None,
        answered_share=_mean(steps, "abort/answered_share"),
        given_up_share=_mean(steps, "abort/given_up_share"),
        kept_late_share=_mean(steps, "abort/kept_late_share"),
        saved_tokens=_total(steps, "abort/saved_tokens"),
        surcharge=_mean(steps, "abort/surcharge"),
        passed_over=_total(steps, "skip/passed_over"),
        skip_share=_mean(steps, "skip/share"),
        biased=tuple(dict.fromkeys(str(e.get("message", "")) for e in events if e.get("kind") == BIASED)),
    )


def budget_rows(s: TokenBudgetSummary) -> list[tuple[str, str]]:
    """Return (label, text) rows for the terminal's table; the report shows the same."""
    rows = []
    spent = []
    if s.budget_tokens and s.spent_tokens is not None:
        share = 100 * s.spent_tokens / s.budget_tokens
        spent.append(f"{s.spent_tokens:,} of {s.budget_tokens:,} tokens ({share:.1f} %)")
    if s.rollouts_min is not None and s.rollouts_max is not None:
        span = f"{s.rollouts_min} to {s.rollouts_max}" if s.rollouts_min < s.rollouts_max else f"{s.rollouts_max}"
        spent.append(f"{span} rollouts a prompt (mean {s.rollouts_mean:.1f})")
    if spent:
        rows.append(("token budget", ", ".join(spent)))
    if s.variance is not None:
        least = f" (no allocation below {s.least_variance:.2f})" if s.least_variance is not None else ""
        rows.append(("variance", f"{s.variance:.2f} of that of uniform counts at the same tokens{least}, estimated"))
    if s.answered_share is not None or s.given_up_share is not None:
        shares = (
            (s.answered_share, "ended after their answer"),
            (s.given_up_share, "given up"),
            (s.kept_late_share, "kept though late"),
        )
        early = [f"{100 * share:.1f} % {what}" for share, what in shares if share is not None]
        if s.saved_tokens is not None:
            early.append(f"about {s.saved_tokens:,} tokens saved")
        if s.surcharge is not None:
            early.append(f"surcharge on the variance {s.surcharge:.2f}x")
        rows.append(("early ends", ", ".join(early)))
    if s.passed_over is not None:
        share_text = f" ({100 * s.skip_share:.1f} % of those whose turn it was)" if s.skip_share is not None else ""
        rows.append(("skipped", f"{s.passed_over:,} prompts passed over{share_text}"))
    return rows


def _counted(steps: Sequence[Row], records: Sequence[Row]) -> list[Row]:
    """Return whole records in order of their steps; empty if no budget gave prompts different counts."""
    if not any(_has(row, PLANNED) for row in steps):
        return []
    whole = [row for row in records if isinstance(row.get("step"), int) and row.get("rollouts")]
    return sorted(whole, key=lambda row: int(row["step"]))


def _variance(row: Row) -> float | None:
    """Return the variance as allocated, relative to uniform counts."""
    if not _has(row, "budget/variance", "budget/variance_uniform") or not row["budget/variance_uniform"]:
        return None
    return float(row["budget/variance"] / row["budget/variance_uniform"])


def _least(row: Row) -> float | None:
    """Return the lower bound over allocations of the step's tokens, relative to uniform counts."""
    return 1 - float(row["budget/bound"]) if _has(row, "budget/bound") else None


def _has(row: Row, *names: str) -> bool:
    return all(isinstance(row.get(name), int | float) for name in names)


def _sum(rows: Sequence[Row], name: str) -> float:
    return math.fsum(float(row[name]) for row in rows)


def _total(rows: Sequence[Row], name: str) -> int | None:
    known = [row for row in rows if _has(row, name)]
    return round(_sum(known, name)) if known else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row for row in rows if _has(row, name)]
    return _sum(known, name) / len(known) if known else None
