"""The report's tables: strategies, events, responses, environment. Text in, HTML out; all text is escaped here."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from config.tree import EVAL_SET
from launch.observe.environment import rows as environment_rows
from launch.observe.journal import read
from launch.observe.records import evenly

MAX_EVENTS = 200
MOST_SAMPLES = 32  # shown per step, or per set
SAMPLE_STEPS = 6  # RL steps whose responses are shown, from the first to the last
BAD_EVENTS = (
    *("fail", "lost", "restart", "stale", "interrupt", "error", "rejected", "died", "dead", "replaced"),
    *("no_signal", "truncated", "flat_reward"),
)


def strategies_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(scale * value, form)

    heads = ("Strategy", "Steps %#", "Running#", "Accept length#", "Accepted %#", "Draft %#", "Saved s#")
    return _table(
        heads,
        (
            _row(
                ("keep", row["strategy"]),
                ("num", number(row["share"], ".1f", 100)),
                ("num", number(row["requests"], ".1f")),
                ("num", number(row["accept_length"], ".2f")),
                ("num", number(row["acceptance"], ".0f", 100)),
                ("num", number(row["draft_share"], ".0f", 100)),
                ("num", number(row["saved_s"], ".2f")),
            )
            for row in rows
        ),
    )


def prompts_table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("Prompt (number in data.train, from 0)#", "Drafted tokens#", "Accepted %#")
    return _table(
        heads,
        (
            _row(("num", str(row["prompt"])), ("num", f"{row['drafted']:,}"), ("num", f"{100 * row['acceptance']:.0f}"))
            for row in rows
        ),
    )


def events_table(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return '<div class="empty">No events recorded</div>'
    shown = events[-MAX_EVENTS:]
    rows = (_event_row(list(group)) for _, group in groupby(shown, key=_event_kind))
    note = f'<p class="note">The last {MAX_EVENTS} of {len(events)}.</p>' if len(events) > len(shown) else ""
    return note + _table(("Time (UTC)", "Step#", "Event", "Message"), rows)


def _event_kind(event: Mapping[str, Any]) -> str:
    return str(event.get("kind", ""))


def _event_row(events: Sequence[Mapping[str, Any]]) -> str:
    """Render one row for consecutive events of one kind: the last, with the others on demand."""
    last = events[-1]
    kind = _event_kind(last) + (f" ({len(events)})" if len(events) > 1 else "")
    message = escape(str(last.get("message", "")))
    if len(events) > 1:
        lines = "\n".join(f"{clock(event.get('at_s'))}  {event.get('message', '')}" for event in events)
        message = f"<details><summary>{message}</summary><pre>{escape(lines)}</pre></details>"
    return _row(
        ("keep", clock(events[0].get("at_s"))),
        ("num", last.get("step", "")),
        ("kind bad" if _bad(last) else "kind", kind),
        ("html", message),
    )


def _bad(event: Mapping[str, Any]) -> bool:
    return any(word in str(event.get("kind", "")).lower() for word in BAD_EVENTS)


def picked_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return responses of a few RL steps and evaluations, from the first to the last, with their origin."""
    files = (("samples.jsonl", "train"), ("eval_samples.jsonl", "held-out"))
    return [
        sample | {"from": origin if sample.get("set") in (None, "", EVAL_SET) else f"{origin}, {sample['set']}"}
        for name, origin in files
        for sample in _of_a_few_steps(read(run_dir / name))
    ]


def _of_a_few_steps(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = sorted({int(sample.get("step", 0)) for sample in samples})
    count = min(SAMPLE_STEPS, len(steps))
    picked = {steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)}
    by_place: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for sample in samples:
        if (step := int(sample.get("step", 0))) in picked:
            by_place.setdefault((step, str(sample.get("set", ""))), []).append(sample)
    return [sample for found in by_place.values() for sample in evenly(found, MOST_SAMPLES)]


def evaluations_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render every metric of the evaluations, one line each, with a column for each of a few evaluations."""
    by_step = {int(row["step"]): row for row in rows if row.get("kind") == "eval"}
    shown = [by_step[step] for step in evenly(sorted(by_step), SAMPLE_STEPS)]
    names = dict.fromkeys(name for row in shown for name in row if name.startswith("eval/"))
    heads = ("Metric", *(f"Step {row['step']}#" for row in shown))
    return _table(
        heads,
        (_row(("keep", name), *(("num", _four_digits(row.get(name))) for row in shown)) for name in names),
    )


def _four_digits(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def samples_table(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return '<div class="empty">No responses recorded</div>'
    rewards = [_reward(sample) for sample in samples]
    shown = sorted(samples, key=lambda sample: (-int(sample.get("step", 0)), sample["from"], -_reward(sample)))
    rows = (
        _row(
            ("num", sample.get("step", "")),
            ("keep", sample["from"]),
            ("num", f"{_reward(sample):.2f}"),
            ("num", sample.get("tokens", "")),
            ("keep", sample.get("finish_reason", "")),
            ("pre", sample.get("prompt", "")),
            _response(sample),
            ("pre", sample.get("error") or sample.get("answer") or ""),
            attributes=f' data-from="{sample["from"]}" style="--good:{_share(_reward(sample), rewards):.0f}"',
        )
        for sample in shown
    )
    return _table(("Step#", "From", "Reward#", "Tokens#", "End", "Prompt", "Response", "Answer"), rows)


def _response(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Return a cell: the text, and in an episode the speakers."""
    turns = sample.get("turns")
    if not isinstance(turns, list) or not turns:
        return "pre response", str(sample.get("response", ""))
    parts = []
    for turn in turns:
        gained = f" {turn['reward']:+g}" if turn.get("reward") else ""
        role = escape(str(turn.get("role", "")))
        parts.append(
            f'<div class="turn {role}"><b>{role}{gained}</b><pre>{escape(str(turn.get("text", "")))}</pre></div>'
        )
    return "html response", "".join(parts)


def _reward(sample: Mapping[str, Any]) -> float:
    return float(sample.get("reward") or 0.0)


def _share(value: float, values: Sequence[float]) -> float:
    """Return the position of `value` between the smallest and the largest, in percent; 50 if all are equal."""
    low, high = min(values), max(values)
    return 100 * (value - low) / (high - low) if high > low else 50.0


def _row(*cells: tuple[str, object], attributes: str = "") -> str:
    """Render a table row of (class, value). Values are escaped; `pre` keeps their line breaks, `html` takes escaped
    text."""
    return f"<tr{attributes}>{''.join(_cell(*cell) for cell in cells)}</tr>"


def _cell(name: str, value: object) -> str:
    first, _, rest = name.partition(" ")
    if first == "html":
        return f'<td class="{rest}">{value}</td>' if rest else f"<td>{value}</td>"
    if first == "pre":
        return f'<td class="{rest}"><pre>{escape(str(value))}</pre></td>'
    return f'<td class="{name}">{escape(str(value))}</td>'


def _table(heads: Sequence[str], rows: Iterable[str]) -> str:
    """Render a table. Heads that end in # are above numbers."""
    cells = "".join(f'<th class="num">{h[:-1]}</th>' if h.endswith("#") else f"<th>{h}</th>" for h in heads)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render an HTML table of texts. Heads that end in # are above numbers."""
    forms = ["num" if head.endswith("#") else "keep" if i == 0 else "" for i, head in enumerate(heads)]
    escaped = [escape(head) for head in heads]
    return _table(escaped, (_row(*zip(forms, row, strict=True)) for row in rows))


def number_cell(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    text = f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return f"+{text}" if signed and value > 0 else text


def environment_table(starts: Sequence[Mapping[str, Any]]) -> str:
    if not starts:
        return '<div class="empty">Not recorded</div>'
    note = f'<p class="note">The last of {len(starts)} starts; environment.json has all.</p>' if len(starts) > 1 else ""
    return note + _table(
        ("What", "Value"), (_row(("keep", what), ("", value)) for what, value in environment_rows(starts[-1]))
    )


def clock(at_s: object) -> str:
    if not isinstance(at_s, int | float):
        return ""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
