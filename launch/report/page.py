"""The HTML report of a run: text and tables written here, charts drawn in the browser from embedded data.

The file needs no network: style, scripts and data are inside. All data of the run is escaped.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from launch.observe.environment import read_starts
from launch.observe.journal import read, replace
from launch.observe.live import duration
from launch.observe.timeline import write_trace
from launch.report.against import NOTE as AGAINST_NOTE
from launch.report.against import against_data, against_tables
from launch.report.before_after import BeforeAfter, before_after_html, said
from launch.report.collect import chart_data
from launch.report.summary import DrafterSummary, RunSummary, SpeculationSummary, seconds_text, summarise
from launch.report.tables import (
    clock,
    environment_table,
    evaluations_table,
    events_table,
    picked_samples,
    prompts_table,
    samples_table,
    strategies_table,
)
from launch.report.token_budget import TokenBudgetSummary, budget_rows

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "gantt.js", "page.js", "samples.js", "speculation.js", "drafter.js", "token_budget.js")
CARDS_PER_ROW = 5
REWARD_NOTE = "Mean reward of the sampled responses by RL step; dots are evaluations on held-out prompts."
GANTT_NOTE = "One row per worker. 'busy' is the share of the visible time in which the worker was not idle."
SPECULATION_NOTE = (
    "Accept length: tokens per verification of a request while it was speculated on, 1 being plain decoding. "
    "Seconds saved: engine seconds against measured plain decoding of the same tokens, summed over workers."
)
DRAFTER_NOTE = (
    "Micro-steps of the drafter on idle rollout workers. Accuracy: how often the token that the "
    "target sampled was the drafter's first guess, or among its first three; dashed lines are updates of the target."
)
TOKEN_BUDGET_NOTE = (
    "Rollouts per prompt fan out where prompts differ in what their tokens teach. Variance: of the estimated gradient, "
    "in closed form from the estimated spread of each prompt's rewards, with the counts as allocated and with as many "
    "tokens in equal counts. Surcharge: what the weights of kept late responses add to it; 1 is nothing."
)
EVALUATION_NOTE = (
    "Metrics on held-out prompts, by RL step. pass@k: the share of prompts with a right one among k responses. maj@k: "
    "the share whose most frequent answer of k is right. Both are means over all choices of k of a prompt's responses. "
    "With several sets, eval/... without a set's name is their mean."
)
SAMPLES_NOTE = (
    "A few responses of some steps: the last step first, the best reward first. Held-out ones are of the evaluation "
    "after that step. The bar beside a response goes from red, the worst reward shown, to green, the best."
)
LEARNING_NOTE = (
    "The loss is no measure of progress. It is about minus the mean advantage per token: 0, but for what the updates "
    "of the step change, and above 0 where long responses are the worse ones. Progress is the reward. Entropy that "
    "falls to 0, or a clipped share or a gradient norm that keeps growing, is a run that breaks."
)
BUDGET_CHARTS = (  # name, title, metrics of which one must be recorded
    ("tokens", "Tokens of an RL step, spent and planned", ("budget/planned_tokens",)),
    ("variance", "Variance of the estimated gradient, uniform counts being 1", ("budget/variance",)),
    ("thresholds", "Thresholds beside natural lengths, tokens", ("abort/give_up_at", "abort/poll_from")),
    ("ends", "Share of responses by how they ended early, %", ("abort/answered_share", "abort/given_up_share")),
    ("keep", "Probability with which a late response goes on, over prompts", ("abort/keep_mean",)),
    ("surcharge", "Surcharge on the variance by the weights of kept responses", ("abort/surcharge",)),
    ("saved", "Tokens that giving up saved, estimated", ("abort/saved_tokens",)),
    ("skipped", "Share of prompts that were passed over, %", ("skip/share",)),
)
CORRECTION = "Importance weights, sampler to learner: shares of tokens"
NAV = (
    ("against", "Against"),
    ("reward", "Reward"),
    ("evaluation", "Evaluation"),
    ("samples", "Responses"),
    ("lengths", "Response lengths"),
    ("token_budget", "Token budget"),
    ("time", "Step time"),
    ("gantt", "Workers"),
    ("speculation", "Speculation"),
    ("drafter", "Drafter"),
    ("learning", "Learning"),
    ("groups", "Groups"),
    ("events", "Events"),
    ("config", "Configuration"),
    ("environment", "Environment"),
)


OPTIONAL = (
    "against",
    "evaluation",
    "token_budget",
    "speculation",
    "drafter",
)  # left out if nothing was recorded


def write_report(run_dir: Path, output: Path | None = None, against: Path | None = None) -> Path:
    """Write the report (default run_dir/report.html) and run_dir/trace.json. The run may be incomplete or in progress.
    against: another run's folder, for a comparison.

    Raises UsageError if a folder holds no run.
    """
    for folder in filter(None, (run_dir, against)):
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "events.jsonl", "config.yaml")):
            raise UsageError(f"no run in {folder}", remedy="give the folder that contains metrics.jsonl")
    path = run_dir / "report.html" if output is None else output
    replace(path, render(run_dir, against))
    write_trace(run_dir)
    return path


def render(run_dir: Path, against: Path | None = None) -> str:
    """Return the page as text."""
    summary, data = summarise(run_dir), chart_data(run_dir)
    data["against"] = None if against is None else against_data(run_dir, against)
    events = read(run_dir / "events.jsonl")
    config = run_dir / "config.yaml"
    scripts = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Paceline: {escape(summary.name)}</title>",
        f"<style>\n{(ASSETS / 'style.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>",
        _header(summary, events, [item for item in NAV if item[0] not in OPTIONAL or data[item[0]]]),
        _warnings(summary.warnings),
        _cards(summary),
        _against(run_dir, against),
        *_charts(
            data,
            summary,
            _evaluation(data["evaluation"], summary.before_after)
            + _section("samples", "Responses", samples_table(picked_samples(run_dir)), SAMPLES_NOTE),
        ),
        _section("events", "Events", events_table(events), "Failures and recoveries are red."),
        _config(config.read_text(encoding="utf-8") if config.is_file() else ""),
        _section("environment", "What it ran on", environment_table(read_starts(run_dir))),
        "<footer>Paceline. Open trace.json, beside this file, in ui.perfetto.dev for the full timeline.</footer>",
        f'</main>\n<script type="application/json" id="data">{_embed(data)}</script>',
        f"<script>\n{scripts}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _embed(data: Mapping[str, Any]) -> str:
    """Encode as JSON that cannot end its script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _header(summary: RunSummary, events: Sequence[Mapping[str, Any]], nav: Sequence[tuple[str, str]]) -> str:
    started = f"started {clock(events[0].get('at_s'))} UTC, " if events else ""
    planned = f" of {summary.steps_planned}" if summary.steps_planned is not None else ""
    objective = f", objective {escape(summary.objective)}" if summary.objective is not None else ""
    own_code = f", your own code: {escape(summary.own_code)}" if summary.own_code is not None else ""
    precision = f", {escape(summary.precision)}" if summary.precision is not None else ""
    told = f"{objective}{own_code}{precision}"
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in nav)
    return (
        f'<header id="summary"><h1>{escape(summary.name)}</h1>'
        f'<span class="badge {summary.status}">{summary.status}</span></header>\n'
        f'<p class="sub">{started}{summary.steps_done}{planned} RL steps{told}</p>\n<nav>{links}</nav>'
    )


def _warnings(warnings: Sequence[str]) -> str:
    """Render signs that nothing was learned, above everything else."""
    return "".join(f'<p class="warning"><b>Warning</b> {escape(warning)}</p>' for warning in warnings)


def _cards(summary: RunSummary) -> str:
    speed = f"{summary.tokens_per_s:,.0f}" if summary.tokens_per_s is not None else "-"
    gap = f"{summary.logprob_gap_mean:.2g}" if summary.logprob_gap_mean is not None else "-"
    gap_max = f"largest {summary.logprob_gap_max:.2g}" if summary.logprob_gap_max is not None else ""
    corrected = f"corrected {summary.correction}" if summary.correction else ""
    per_step = f"{summary.wall_s / summary.steps_done:.2f} s a step" if summary.steps_done else ""
    lost = f"{summary.rollouts_failed} failed, {summary.rollouts_reissued} reissued"
    refilled = "" if summary.groups_refilled is None else f", {summary.groups_refilled} refilled"
    cards = [
        _change_card("Held-out reward", summary.eval_first, summary.eval_last),
        _change_card("Train reward", summary.reward_first, summary.reward_last),
        _card("Time in RL steps", duration(summary.wall_s), per_step),
        _card("Tokens generated", _big(summary.tokens), f"{summary.groups_dropped} groups dropped{refilled}"),
        _card("Tokens per second", speed, "median step"),
        _card("Log-prob gap", gap, ", ".join(filter(None, (gap_max, corrected))) or "sampler to learner"),
        _card("Mishaps", str(summary.rollouts_failed + summary.rollouts_reissued), lost),
    ]
    if summary.speculation is not None:
        cards.insert(5, _speculation_card(summary.speculation))
    if summary.eval_masters is not None:
        same_weights = _card(
            "Held-out, full precision", f"{summary.eval_masters:.3f}", "the same weights in model.dtype"
        )
        cards.insert(1, same_weights)
    if summary.drafter is not None:
        cards.insert(-2, _drafter_card(summary.drafter))
    if summary.token_budget is not None:
        cards += _budget_cards(summary.token_budget)
    per_row = math.ceil(len(cards) / math.ceil(len(cards) / CARDS_PER_ROW))  # rows of nearly equal length
    return f'<div class="cards" style="--per-row:{per_row}">{"".join(cards)}</div>'


def _speculation_card(s: SpeculationSummary) -> str:
    if s.accept_length is None:
        return _card("Speculation", "off", "never chosen")
    if not s.acceptance:
        return _card("Speculation", "-", "no drafts accepted")
    if not any(s.saved_by.values()):
        return _card("Speculation", f"{s.accept_length:.2f}", "accept length; time not measured")
    seconds, more = f"{seconds_text(abs(s.saved_s))} s", f"accept length {s.accept_length:.2f}"
    if s.saved_s < 0:
        return _card("Speculation", f'<span class="down">-{seconds}</span>', f"decoding took longer, {more}")
    return _card("Speculation", seconds, f"saved, {more}")


def _drafter_card(d: DrafterSummary) -> str:
    value = f"{d.top3_last:.2f}" if d.top3_last is not None else "-"
    first = f"from {d.top3_first:.2f}, " if d.top3_first is not None else ""
    return _card("Drafter top-3 accuracy", value, f"{first}{d.micro_steps:,} micro-steps")


def _budget_cards(s: TokenBudgetSummary) -> Iterator[str]:
    if s.budget_tokens and s.spent_tokens is not None:
        span = f", {s.rollouts_min} to {s.rollouts_max} rollouts a prompt" if s.rollouts_min is not None else ""
        yield _card("Token budget", f"{100 * s.spent_tokens / s.budget_tokens:.1f} %", f"spent{span}")
    if s.given_up_share is not None:
        saved = f"about {_big(s.saved_tokens)} tokens saved" if s.saved_tokens is not None else "of the responses"
        yield _card("Given up", f"{100 * s.given_up_share:.1f} %", saved)


def _card(label: str, value: str, more: str) -> str:
    return f'<div class="card"><span class="label">{label}</span><b>{value}</b><span class="more">{more}</span></div>'


def _change_card(label: str, first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return _card(label, "-", "not recorded")
    shown = f"{last - first:+.3f}"
    direction = "same" if float(shown) == 0 else "up" if last > first else "down"
    return _card(label, f"{last:.3f}", f'from {first:.3f} <span class="{direction}">{shown}</span>')


def _charts(data: Mapping[str, Any], summary: RunSummary, responses: str) -> Iterator[str]:
    """Yield the sections with charts. Responses come second, since readers want them most."""
    timeline = data["timeline"]
    left_out = ""
    if timeline["left_out"]:
        below = timeline["left_out_below_ms"]
        left_out = f" {timeline['left_out']:,} spans shorter than {below} ms are left out here; trace.json has them."
    learning = "".join(
        _sub(title, f"chart-{name}")
        for name, title in (
            ("gap", "Log-prob gap, sampler to learner (log scale)"),
            ("loss", "Loss"),
            ("grad", "Gradient norm before clipping"),
            ("clip", "Share of tokens whose ratio was clipped"),
            *([("correction", CORRECTION)] if any(n.startswith("sampler_correction/") for n in data["series"]) else []),
            ("entropy", "Entropy, nats per token"),
            ("kl", "KL divergence, nats per token"),
        )
    )
    lengths = _two(
        _sub("Quantiles by RL step, tokens", "chart-lengths"),
        _sub("Share of responses by length, %", "chart-histogram"),
    )
    times = _two(_sub("Seconds by phase", "chart-time"), _sub("Generated tokens per second", "chart-speed"))
    groups = _two(_sub("Groups by RL step", "chart-groups"), _sub("Rollouts by RL step", "chart-failures"))
    sections = (
        ("reward", "Reward", '<div id="chart-reward"></div><div id="chart-reward-parts"></div>', REWARD_NOTE),
        ("lengths", "Response lengths", lengths, ""),
        *([_token_budget(data, summary.token_budget)] if summary.token_budget is not None else []),
        ("time", "Where a step's time goes", times, ""),
        ("gantt", "What every worker did", '<div id="chart-gantt"></div>', GANTT_NOTE + left_out),
        *([_speculation(data["speculation"])] if data["speculation"] else []),
        *([_drafter()] if data["drafter"] else []),
        ("learning", "Learning", f'<div class="two">{learning}</div>', LEARNING_NOTE),
        ("groups", "Groups and mishaps", groups, ""),
    )
    first, *rest = (_section(*section) for section in sections)
    yield from (first, responses, *rest)


def _against(run_dir: Path, other: Path | None) -> str:
    if other is None:
        return ""
    return _section("against", "Against another run", against_tables(run_dir, other), AGAINST_NOTE)


def _evaluation(rows: Sequence[Mapping[str, Any]], found: BeforeAfter | None) -> str:
    if not rows:
        return ""
    answers = "" if found is None else f"<h3>Responses {said(found)}</h3>{before_after_html(found)}"
    return _section("evaluation", "Evaluation", evaluations_table(rows) + answers, EVALUATION_NOTE)


def _token_budget(data: Mapping[str, Any], s: TokenBudgetSummary) -> tuple[str, str, str, str]:
    """Return the charts that have data."""
    biased = "".join(f'<p class="warning"><b>Biased</b> {escape(reason)}</p>' for reason in s.biased)
    whole_run = "; ".join(f"{what}: {text}" for what, text in budget_rows(s))
    fan = (
        _sub("Rollouts per prompt by RL step", "chart-budget-rollouts") if data["token_budget"]["rollouts"]["x"] else ""
    )
    charts = _two(
        *(
            _sub(title, f"chart-budget-{name}")
            for name, title, metrics in BUDGET_CHARTS
            if any(metric in data["series"] for metric in metrics)
        )
    )
    note = f'<p class="note">Whole run: {escape(whole_run)}.</p>' if whole_run else ""
    return "token_budget", "Token budget", f"{biased}{note}{fan}{charts}", TOKEN_BUDGET_NOTE


def _speculation(data: Mapping[str, Any]) -> tuple[str, str, str, str]:
    charts = _two(
        _sub("Share of drafted tokens that were accepted, by RL step", "chart-acceptance"),
        _sub("Accept length by RL step", "chart-accept-length"),
        _sub("Share of drafts accepted to a position (of 20 drafts or more)", "chart-positions"),
        _sub("Seconds saved since the first step, by drafter", "chart-saved"),
        _sub("Share of engine steps, %", "chart-strategies"),
        _sub("Why: share of engine steps by the reason of their choice, %", "chart-reasons"),
        _sub("Seconds of engine steps, measured and predicted beforehand", "chart-predicted"),
        _sub("Mean error of a step's predicted time, %", "chart-predicted-error"),
    )
    why = f'<p class="note">Whole run: speculation was {escape(data["off"])}.</p>' if data["off"] else ""
    whole_run = f"{why}<h3>Strategies, whole run</h3>{strategies_table(data['strategies'])}"
    if data["prompts"]:
        whole_run += f"<h3>Prompts with the least and the most acceptance</h3>{prompts_table(data['prompts'])}"
    return "speculation", "Speculative decoding", f'<div id="chart-running"></div>{charts}{whole_run}', SPECULATION_NOTE


def _drafter() -> tuple[str, str, str, str]:
    charts = _two(
        _sub("Accept length by RL step", "chart-drafter-length"),
        _sub("Share of drafts accepted to a position (of 20 drafts or more), by RL step", "chart-drafter-positions"),
        _sub("Rollout workers' time by RL step, %", "chart-drafter-time"),
        _sub("Micro-steps by RL step, and how often rollouts took the worker back", "chart-drafter-steps"),
        _sub("Loss by micro-step", "chart-drafter-loss"),
    )
    accuracy = _sub("Accuracy by micro-step", "chart-drafter-accuracy")
    return "drafter", "Drafter training", f"{accuracy}{charts}", DRAFTER_NOTE


def _section(name: str, title: str, body: str, note: str = "") -> str:
    text = f'<p class="note">{note}</p>' if note else ""
    return f'<section id="{name}"><h2>{title}</h2>{text}{body}</section>'


def _sub(title: str, chart: str) -> str:
    return f'<div><h3>{title}</h3><div id="{chart}"></div></div>'


def _two(*parts: str) -> str:
    return f'<div class="two">{"".join(parts)}</div>'


def _config(text: str) -> str:
    body = f'<pre class="config">{escape(text)}</pre>' if text else '<div class="empty">No config.yaml</div>'
    return f'<section id="config"><details><summary>Configuration</summary>{body}</details></section>'


def _big(value: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:,}"
