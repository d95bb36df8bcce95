"""The result of a run in a few numbers, computed from its files: for the terminal, summary.json and the report."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.catalogue import TRAINED
from launch.observe.drafter import Update, updates_of
from launch.observe.journal import read, replace
from launch.observe.live import duration
from launch.observe.reasons import off_share, off_text, reasons_over_run
from launch.observe.records import PHASES
from launch.observe.speculation import (
    PLAIN,
    by_drafter,
    origins_over_run,
    over_run,
    speculating,
    strategies_of,
    summed,
)
from launch.observe.symptoms import symptoms
from launch.own_code import own_code_text
from launch.precision import MASTER_REWARD, precision_text
from launch.report.before_after import BeforeAfter, before_after, before_after_lines, said
from launch.report.token_budget import TokenBudgetSummary, budget_rows, token_budget_summary

_ORIGINS = {
    "own": "own text",
    "running": "siblings under way here",
    "elsewhere": "siblings under way on other workers",
    "finished": "finished siblings",
    "older": "older rollouts",
    "pool": "other problems",
}
MOSTLY = 0.5  # of the engine steps without speculation: above it the summary gives the reason
REWARD_WINDOW = 5  # RL steps averaged at either end (fewer in short runs), since one step's reward is noise


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSummary:
    """Speculation in RL steps. Evaluations are decoded the same way, but not counted."""

    share: float  # of the engine steps that drafted
    accept_length: float | None  # tokens per verification in those; None: never speculated
    acceptance: float | None  # accepted of drafted tokens; None: nothing was drafted, 0: nothing was accepted
    saved_s: float  # engine seconds of decoding; negative: lost
    saved_by: Mapping[str, float]  # by drafter, of those used; the best first
    off_share: float | None = None  # of the engine steps for which plain decoding was chosen; None: not recorded
    off: str = ""  # reasons for plain decoding there, in words
    predicted_error: float | None = None  # mean absolute relative error of predicted step times; None: none
    origins: Mapping[str, float] = field(default_factory=dict)  # share of accepted tokens by origin; most first


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSummary:
    """Drafter training. First and last are means over the first and last REWARD_WINDOW RL steps with a value."""

    micro_steps: int
    worker_s: float  # rollout workers' idle time spent on training
    top3_first: float | None  # accuracy
    top3_last: float | None
    accept_first: float | None  # accept length, of the RL steps that drafted with it; None: too few to compare
    accept_last: float | None
    drafted_steps: int  # RL steps that drafted with it
    rl_steps: int
    published: int  # versions
    rolled_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Rewards are means over responses; None if nothing was recorded."""

    name: str
    status: str  # "finished", "interrupted", "failed", or "incomplete" (running, or killed)
    steps_done: int
    steps_planned: int | None
    eval_first: float | None
    eval_last: float | None
    eval_best: float | None  # highest after the first evaluation
    eval_best_step: int | None
    reward_first: float | None  # mean of the first REWARD_WINDOW steps
    reward_last: float | None  # mean of the last REWARD_WINDOW steps
    tokens: int  # generated in RL steps
    wall_s: float  # sum of the RL steps
    tokens_per_s: float | None  # median over RL steps
    logprob_gap_mean: float | None  # largest over RL steps
    logprob_gap_max: float | None
    correction: str | None  # for that gap, in words; None: no correction
    groups_dropped: int  # graded, but not trained on
    rollouts_failed: int
    rollouts_reissued: int
    seconds: Mapping[str, float]  # per phase, whole run; "other" is the time outside all phases
    model: str | None  # exported model, if any
    best_model: str | None  # that of the highest held-out reward, if kept
    precision: str | None = None  # of rollouts and learner, in words; None: rollouts are in model.dtype
    evaluated_as: str | None = None  # the low-bit format of `eval_*`; None: model.dtype
    eval_masters: float | None = None  # `eval_last` of the same weights in model.dtype
    speculation: SpeculationSummary | None = None  # None: it was off
    drafter: DrafterSummary | None = None  # None: none was trained
    token_budget: TokenBudgetSummary | None = None  # None: neither a budget, nor early ends, nor skipped prompts
    rounds: str | None = None  # effect of rounds by length, in words; None: no rounds
    lookahead: str | None = None  # effect of lookahead, in words; None: no lookahead
    objective: str | None = None  # its name
    own_code: str | None = None  # the user's loss, advantages and drafters, with their paths
    groups_refilled: int | None = None  # sampled in further rounds; None: no dynamic sampling
    tokens_refilled: int = 0  # within `tokens`
    before_after: BeforeAfter | None = None  # None: no held-out prompt was answered in two evaluations
    warnings: Sequence[str] = ()  # signs that nothing was learned, each with a remedy


def summarise(run_dir: Path) -> RunSummary:
    """Read a run folder, complete or not."""
    rows = read(run_dir / "metrics.jsonl")
    steps = step_rows(rows)
    evals = eval_points(rows)
    best = max(evals[1:], key=itemgetter(1), default=None)  # the earliest of equals
    options = run_options(run_dir)
    speculated, events = read(run_dir / "speculation.jsonl"), read(run_dir / "events.jsonl")
    seconds = {name: math.fsum(numbers(steps, f"seconds/{name}")) for name in PHASES}
    wall_s = math.fsum(numbers(steps, "seconds/step"))
    seconds["other"] = max(wall_s - math.fsum(seconds.values()), 0.0)
    planned = options.get("steps")
    rewards = numbers(steps, "reward/mean")
    window = max(min(REWARD_WINDOW, len(rewards) // 2), 1)
    speeds = sorted(numbers(steps, "tokens_per_s"))
    return RunSummary(
        name=str(options.get("name", run_dir.resolve().name)),
        status=_status(events, len(steps), planned),
        steps_done=int(steps[-1]["step"]) if steps else 0,
        steps_planned=planned if isinstance(planned, int) else None,
        eval_first=evals[0][1] if evals else None,
        eval_last=evals[-1][1] if evals else None,
        eval_best=best[1] if best else None,
        eval_best_step=best[0] if best else None,
        reward_first=_mean(rewards[:window]),
        reward_last=_mean(rewards[-window:]),
        tokens=round(math.fsum(numbers(steps, "tokens/generated"))),
        wall_s=wall_s,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
        logprob_gap_mean=max(numbers(steps, "logprob_gap/mean"), default=None),
        logprob_gap_max=max(numbers(steps, "logprob_gap/max"), default=None),
        correction=correction_text(run_options(run_dir, "objective").get("sampler_correction")),
        groups_dropped=_dropped(steps),
        rollouts_failed=round(math.fsum(numbers(steps, "rollouts/failed"))),
        rollouts_reissued=round(math.fsum(numbers(steps, "rollouts/reissued"))),
        seconds=seconds,
        model=_model(run_dir / "model"),
        best_model=_model(run_dir / "best"),
        **_precision(run_dir),
        eval_masters=_masters(rows, evals),
        speculation=speculation_summary(speculated),
        rounds=rounds_text(steps),
        lookahead=lookahead_text(steps, events),
        drafter=drafter_summary(read(run_dir / "drafter.jsonl"), speculated),
        token_budget=token_budget_summary(steps, read(run_dir / "budget.jsonl"), events),
        objective=_text(run_options(run_dir, "objective").get("name")),
        own_code=own_code_text({name: run_options(run_dir, name) for name in ("objective", "rollout")}),
        groups_refilled=round(math.fsum(refilled)) if (refilled := numbers(steps, "groups/refilled")) else None,
        tokens_refilled=round(math.fsum(numbers(steps, "tokens/refilled"))),
        before_after=before_after(read(run_dir / "eval_samples.jsonl"), read(run_dir / "eval_prompts.jsonl")),
        warnings=[str(symptom) for symptom in symptoms(steps, over=True)],
    )


def _precision(run_dir: Path) -> dict[str, str]:
    form = run_options(run_dir, "rollout").get("quantization", "none")
    if form == "none":
        return {}
    mirrors = str(run_options(run_dir, "learner").get("quantization", "rollout"))
    dtype = str(run_options(run_dir, "model").get("dtype", "float32"))
    return {"precision": precision_text(str(form), mirrors, dtype), "evaluated_as": str(form)}


def _masters(rows: Sequence[Mapping[str, Any]], evals: Sequence[tuple[int, float]]) -> float | None:
    """Return the reward in model.dtype of the last evaluation."""
    last = evals[-1][0] if evals else None
    return next(reversed(numbers([row for row in rows if row.get("step") == last], MASTER_REWARD)), None)


def _model(folder: Path) -> str | None:
    return str(folder) if (folder / "config.json").is_file() else None


def rounds_text(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the rounds from the records of RL steps; None without rollout.rounds."""
    rounds = [step for step in steps if "rounds/long" in step]
    if not rounds:
        return None
    short = sum(not step["rounds/long"] for step in rounds)
    put_off = math.fsum(numbers(rounds, "lookahead/put_off_tokens"))
    waiting = rounds[-1]["rounds/waiting"]
    left = f", {waiting:.0f} prompts wait" if waiting else ""
    return f"{short} short, {len(rounds) - short} long; {put_off:.0f} tokens put off{left}; biased: order"


def lookahead_text(steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """From the records of RL steps; None where nothing was sampled ahead. Its last words are why the run stopped it."""
    sampled = round(math.fsum(numbers(steps, "lookahead/sampled_tokens")))
    if not sampled:
        return None
    given = math.fsum(numbers(steps, "lookahead/tokens"))
    stood = math.fsum(s["lookahead/tokens"] * s["lookahead/stood"] for s in steps if "lookahead/stood" in s)
    won_s = math.fsum(numbers(steps, "lookahead/won_s"))
    stands = f"; of {given:.0f} that were checked {100 * stood / given:.0f} % stood" if given else ""
    said = next((str(event["message"]) for event in reversed(events) if event["kind"] == "lookahead"), "")
    stopped = f"; {said}" if said.startswith("stopped") else ""
    won = f"{abs(won_s):.1f} engine seconds {'won' if won_s >= 0 else 'lost'}"
    return f"{sampled} tokens sampled ahead{stands}; {won}{stopped}"


def speculation_summary(records: Sequence[Mapping[str, Any]]) -> SpeculationSummary | None:
    """Summarise the records of speculation.jsonl."""
    strategies = over_run(records)
    engine_steps = sum(totals.engine_steps for totals in strategies.values())
    if not engine_steps:
        return None
    total = speculating(strategies)
    saved = {name: totals.saved_s for name, totals in by_drafter(strategies).items() if name != PLAIN}
    reasons, origins = reasons_over_run(records), origins_over_run(records)
    return SpeculationSummary(
        share=total.engine_steps / engine_steps,
        accept_length=total.accept_length,
        acceptance=total.acceptance,
        saved_s=total.saved_s,
        saved_by=dict(sorted(saved.items(), key=itemgetter(1), reverse=True)),
        off_share=off_share(reasons) if reasons else None,
        off=off_text(reasons),
        predicted_error=summed(strategies.values()).predicted_error,
        origins={name: tokens / max(sum(origins.values()), 1) for name, tokens in origins.items()},
    )


def drafter_summary(
    records: Sequence[Mapping[str, Any]], speculation: Sequence[Mapping[str, Any]]
) -> DrafterSummary | None:
    """Summarise the records of drafter.jsonl and of speculation.jsonl."""
    if not records:
        return None
    top3 = [mean for record in records if (mean := _top3(updates_of(record))) is not None]
    used = [by_drafter(strategies_of(record)).get(TRAINED) for record in speculation]
    lengths = [total.accept_length for total in used if total is not None and total.accept_length is not None]
    drafted_steps = len(lengths)
    if drafted_steps < max(4, len(speculation) / 4):  # too few steps with drafts to show a development
        lengths = []
    return DrafterSummary(
        micro_steps=round(math.fsum(numbers(records, "micro_steps"))),
        worker_s=math.fsum(numbers(records, "worker_s")),
        **_ends("top3", top3),
        **_ends("accept", lengths),
        drafted_steps=drafted_steps,
        rl_steps=len(speculation),
        published=sum(len(record.get("published") or ()) for record in records),
        rolled_back=sum(len(record.get("rolled_back") or ()) for record in records),
    )


def _top3(updates: Sequence[Update]) -> float | None:
    return _mean([update.top3_accuracy for update in updates if update.top3_accuracy is not None])


def _ends(name: str, values: Sequence[float]) -> dict[str, Any]:
    window = max(min(REWARD_WINDOW, len(values) // 2), 1)
    return {f"{name}_first": _mean(values[:window]), f"{name}_last": _mean(values[-window:])}


def write_summary(run_dir: Path) -> RunSummary:
    """Compute the summary and write it as run_dir/summary.json."""
    summary = summarise(run_dir)
    replace(run_dir / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def print_summary(
    run_dir: Path, *, report: Path | None = None, model: Path | None = None, console: Console | None = None
) -> RunSummary:
    """Write summary.json and show it as a table, with `report` and `model` if given."""
    summary = write_summary(run_dir)
    console = console or Console()
    console.print(summary_table(summary))
    if summary.before_after is not None:
        console.print(Text(said(summary.before_after)), soft_wrap=True)
        for line in before_after_lines(summary.before_after, console.width):
            console.print(line, soft_wrap=True)
    # Below the table, each on its own line however long, so that they can be copied.
    best = summary.best_model if best_text(summary) else None  # otherwise it is the last one
    for label, path in (("model", model or summary.model), ("best model", best), ("report", report)):
        if path is not None:
            console.print(Text(f"{label:<16} {path}"), soft_wrap=True)
    return summary


def summary_table(summary: RunSummary) -> Table:
    """Build the summary table for a terminal."""
    table = Table(title=f"Paceline  {summary.name}: {summary.status}", title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    planned = f" of {summary.steps_planned}" if summary.steps_planned is not None else ""
    table.add_row("RL steps", f"{summary.steps_done}{planned} in {duration(summary.wall_s)}")
    table.add_row("held-out reward", change(summary.eval_first, summary.eval_last) + best_text(summary))
    if summary.precision is not None:
        table.add_row("precision", summary.precision)
        table.add_row("evaluated as", evaluated_text(summary))
    if summary.own_code is not None:
        table.add_row("your own code", summary.own_code)
    table.add_row("train reward", change(summary.reward_first, summary.reward_last))
    speed = f", {summary.tokens_per_s:,.0f} tokens/s" if summary.tokens_per_s is not None else ""
    table.add_row("generated", f"{summary.tokens:,} tokens{speed}")
    if summary.groups_refilled is not None:
        table.add_row("dynamic sampling", refill_text(summary))
    if summary.token_budget is not None:
        for what, text in budget_rows(summary.token_budget):
            table.add_row(what, text)
        for reason in summary.token_budget.biased:
            table.add_row("biased", reason, style="yellow")
    spent = sorted(((s, name) for name, s in summary.seconds.items() if s > 0), reverse=True)
    shares = ", ".join(f"{name} {100 * s / summary.wall_s:.0f} %" for s, name in spent[:5] if summary.wall_s > 0)
    table.add_row("time", shares or "-")
    if summary.speculation is not None:
        table.add_row("speculation", speculation_text(summary.speculation))
        if summary.speculation.origins:
            table.add_row("suffix found", origins_text(summary.speculation.origins))
        if why := mostly_off(summary.speculation):
            table.add_row("speculation was", why)
    if summary.rounds is not None:
        table.add_row("rounds", summary.rounds)
    if summary.lookahead is not None:
        table.add_row("lookahead", summary.lookahead)
    if summary.drafter is not None:
        table.add_row("drafter", drafter_text(summary.drafter))
    if summary.logprob_gap_mean is not None:
        largest = f", largest {summary.logprob_gap_max:.2g}" if summary.logprob_gap_max is not None else ""
        corrected = f"; corrected for {summary.correction}" if summary.correction else ""
        table.add_row("log-prob gap", f"mean {summary.logprob_gap_mean:.2g}{largest}{corrected}")
    if summary.rollouts_failed or summary.rollouts_reissued:
        lost = f"{summary.rollouts_failed} rollouts failed, {summary.rollouts_reissued} rollouts re-issued"
        table.add_row("mishaps", lost, style="yellow")
    for warning in summary.warnings:
        table.add_row("warning", warning, style="yellow")
    return table


def speculation_text(s: SpeculationSummary) -> str:
    """Return `accept length 2.40, 61 % of drafts accepted, 4.1 s of decoding saved (suffix 3.2, ngram 0.9)`."""
    if s.accept_length is None:
        return s.off or "never paid: plain decoding throughout"
    if not s.acceptance:
        return f"no drafts accepted ({', '.join(s.saved_by)})"
    accepted = f", {100 * s.acceptance:.0f} % of drafts accepted" if s.acceptance is not None else ""
    text = f"accept length {s.accept_length:.2f}{accepted}"
    if not any(s.saved_by.values()):  # mode fixed: plain decoding was not measured
        return f"{text} ({', '.join(s.saved_by)})"
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in s.saved_by.items())
    return f"{text}, {seconds_text(abs(s.saved_s))} s of decoding {'saved' if s.saved_s >= 0 else 'lost'} ({parts})"


def origins_text(origins: Mapping[str, float]) -> str:
    """Return `own text 41 %, finished siblings 30 %, siblings under way 12 %, ...`: of what suffix drafts accepted."""
    return ", ".join(f"{_ORIGINS.get(name, name)} {100 * share:.0f} %" for name, share in origins.items())


def mostly_off(s: SpeculationSummary) -> str:
    """Return `off in 62 % of steps: plain decoding was faster ...` if it was off in most steps, else nothing."""
    return s.off if MOSTLY < (s.off_share or 0.0) < 1 else ""  # if always off, another line already says so


def drafter_text(d: DrafterSummary) -> str:
    """Return `1,234 micro-steps in 61.0 s of idle workers, top-3 accuracy 0.41 -> 0.83, accept length 1.62 -> 2.31,
    ...`"""
    if not d.micro_steps:
        return "not trained: no worker was idle long enough"
    parts = [f"{d.micro_steps:,} micro-steps in {seconds_text(d.worker_s)} s of idle workers"]
    for label, first, last in (
        ("top-3 accuracy", d.top3_first, d.top3_last),
        ("accept length", d.accept_first, d.accept_last),
    ):
        if first is not None and last is not None:
            parts.append(f"{label} {first:.2f} -> {last:.2f}")
    if d.accept_first is None:
        parts.append(f"drafted in {d.drafted_steps} of {d.rl_steps} RL steps")
    return ", ".join(parts) + (f", {d.rolled_back} of {d.published} versions rolled back" if d.rolled_back else "")


def correction_text(options: object) -> str | None:
    """Return `by token, weights up to 2, masked by token`; None for a correction without effect."""
    if not isinstance(options, dict):
        return None
    parts = []
    if (level := options.get("weights", "none")) != "none":
        lowest = "" if options.get("floor") is None else f" from {options['floor']:g}"
        highest = "" if options.get("truncate") is None else f" up to {options['truncate']:g}"
        parts.append(f"by {level}" + (f", weights{lowest}{highest}" if lowest or highest else ""))
    if (mask := options.get("mask", "none")) != "none":
        parts.append(f"masked by {mask}")
    return ", ".join(parts) or None


def refill_text(summary: RunSummary) -> str:
    """Return `56 groups sampled beyond the steps' own, with 23 % of the tokens`."""
    share = 100 * summary.tokens_refilled / summary.tokens if summary.tokens else 0.0
    return f"{summary.groups_refilled} groups sampled beyond the steps' own, with {share:.0f} % of the tokens"


def evaluated_text(summary: RunSummary) -> str:
    """Return `w8a8: 0.759; the same weights in model.dtype: 0.757`."""
    if summary.eval_last is None:
        return "-"
    masters = "not evaluated" if summary.eval_masters is None else f"{summary.eval_masters:.3f}"
    return f"{summary.evaluated_as}: {summary.eval_last:.3f}; the same weights in model.dtype: {masters}"


def best_text(summary: RunSummary) -> str:
    """Return `, best 0.712 after step 40`; empty if the last is the best."""
    if summary.eval_best is None or summary.eval_best == summary.eval_last:
        return ""
    return f", best {summary.eval_best:.3f} after step {summary.eval_best_step}"


def seconds_text(seconds: float) -> str:
    """Format as `4.1` or `0.025`."""
    return f"{seconds:.1f}" if abs(seconds) >= 1 else f"{seconds:.2g}"


def change(first: float | None, last: float | None) -> str:
    """Format as `0.212 -> 0.534 (+0.322)`."""
    if first is None or last is None:
        return "-"
    return f"{first:.3f} -> {last:.3f} ({last - first:+.3f})"


def step_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of complete RL steps, in order. The last row of a step counts."""
    by_step = {int(row["step"]): row for row in rows if row.get("kind") == "step" and "step" in row}
    return [by_step[step] for step in sorted(by_step)]


def eval_points(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (RL steps done, held-out reward), in order."""
    points = {int(row["step"]): float(row["eval/reward"]) for row in rows if _is_number(row.get("eval/reward"))}
    return sorted(points.items())


def numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the finite values of one metric, without rows that lack it."""
    return [float(row[name]) for row in rows if _is_number(row.get(name))]


def run_options(run_dir: Path, name: str = "run") -> dict[str, Any]:
    """Return the section `name` of the run's config.yaml; {} if there is none."""
    path = run_dir / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except yaml.YAMLError:
        values = None
    section = values.get(name) if isinstance(values, dict) else None
    return section if isinstance(section, dict) else {}


def _status(events: Sequence[Mapping[str, Any]], done: int, planned: object) -> str:
    for event in reversed(events):
        if event.get("kind") in ("finished", "interrupted", "failed"):
            return str(event["kind"])
        if event.get("kind") in ("started", "resumed"):
            break
    return "finished" if done > 0 and done == planned else "incomplete"


def _dropped(steps: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of graded groups that did not train."""
    total, used, ungraded = (math.fsum(numbers(steps, f"groups/{name}")) for name in ("total", "used", "ungraded"))
    return round(total - used - ungraded)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
