"""A sweep as one SVG file. Owns the drawing; simulates nothing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from planner.simulate.outcome import Outcome
from planner.simulate.study import Ablation

_COLORS = ("#2f6db5", "#d9822b", "#2a9d8f", "#8a63b8", "#b5442f", "#6b7280")
_PARTS = ("decoding", "tail", "learner", "weights", "other")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _BOTTOM = 400.0, 300.0, 62.0, 50.0, 86.0, 140.0


@dataclass(frozen=True, slots=True)
class _Panel:
    """A panel: x is an index from 0 to `places` - 1, y is linear from 0."""

    left: float
    places: int
    top: float

    def at(self, place: float, y: float) -> tuple[float, float]:
        x = self.left + _WIDTH * (place + 0.5) / self.places
        return x, _TOP + _HEIGHT * (1 - y / self.top)


def sweep_svg(
    name: str, key: str, rows: Sequence[tuple[str, Outcome]], ablations: Sequence[tuple[str, Ablation]] = ()
) -> str:
    """Draw on the left the parts of a step; on the right, with ablations, the gain of each technique, else tokens/s per
    GPU and cost."""
    width, height = 2 * _WIDTH + _LEFT + _GAP + 24, _HEIGHT + _TOP + _BOTTOM
    label = key.rpartition(".")[2] + (", with GPUs below" if key == "fleet.nodes" else "")
    values = [value for value, _ in rows]
    gpus = [f"{one.gpus:,}" for _, one in rows] if key == "fleet.nodes" else []
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(_LEFT, 18, f"{name}: simulated, not measured", "start", 13),
        *_stacked(rows, values, gpus, label),
        *(_brings(ablations, values, gpus, label) if ablations else _speeds(rows, values, gpus, label)),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _stacked(
    rows: Sequence[tuple[str, Outcome]], values: Sequence[str], gpus: Sequence[str], label: str
) -> Iterator[str]:
    frame = _Panel(_LEFT, len(rows), 1.15 * max(one.step_s for _, one in rows))
    yield from _framed(frame, values, gpus, label, "seconds of an RL step; above: what takes most")
    for place, (_, one) in enumerate(rows):
        known = one.rollout_s + one.learn_s + one.weights_s
        sizes = (one.rollout_s - one.tail_s, one.tail_s, one.learn_s, one.weights_s, max(one.step_s - known, 0.0))
        below = 0.0
        for number, size in enumerate(sizes):
            x, top = frame.at(place, below + size)
            _, bottom = frame.at(place, below)
            bar = 0.7 * _WIDTH / frame.places
            yield (
                f'<rect x="{x - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" height="{bottom - top:.1f}" '
                f'fill="{_COLORS[number]}"/>'
            )
            below += size
        x, y = frame.at(place, below)
        yield _text(x, y - 5, one.limit, "middle", 10)
    for number, part in enumerate(_PARTS):
        yield from _legend(frame, number, part, _COLORS[number])


def _brings(
    ablations: Sequence[tuple[str, Ablation]], values: Sequence[str], gpus: Sequence[str], label: str
) -> Iterator[str]:
    names = [one.name for one in ablations[0][1].techniques]
    lines = {"all together": [of.none.step_s / of.whole.step_s for _, of in ablations]}
    for name in names:
        lines[f"{name}, beside the others"] = [
            next((one.last for one in of.techniques if one.name == name), 1.0) for _, of in ablations
        ]
    yield from _lined(lines, values, gpus, label, "times faster an RL step is with it")


def _speeds(
    rows: Sequence[tuple[str, Outcome]], values: Sequence[str], gpus: Sequence[str], label: str
) -> Iterator[str]:
    first = rows[0][1]
    best = first.tokens_s / first.gpus
    lines = {
        "tokens/s per GPU, of the first": [one.tokens_s / one.gpus / best for _, one in rows],
        "cost per token, of the first": [one.cost_per_million / first.cost_per_million for _, one in rows],
        "idle share of workers in rollouts": [one.idle_share for _, one in rows],
    }
    yield from _lined(lines, values, gpus, label, "shares")


def _lined(
    lines: dict[str, list[float]], values: Sequence[str], gpus: Sequence[str], label: str, title: str
) -> Iterator[str]:
    frame = _Panel(_LEFT + _WIDTH + _GAP, len(values), 1.1 * max(max(of) for of in lines.values()))
    yield from _framed(frame, values, gpus, label, title)
    (x1, y), (x2, _) = frame.at(-0.5, 1.0), frame.at(len(values) - 0.5, 1.0)
    yield f'<line x1="{x1:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="4 3"/>'
    for number, (name, of) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        points = [frame.at(place, value) for place, value in enumerate(of)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
        yield from _legend(frame, number, name, color)


def _framed(frame: _Panel, values: Sequence[str], gpus: Sequence[str], label: str, title: str) -> Iterator[str]:
    yield (f'<rect x="{frame.left:.1f}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#bbb"/>')
    step = 10 ** math.floor(math.log10(frame.top))
    step = next(each for each in (step / 5, step / 2, step, 2 * step) if frame.top / each <= 8)
    for number in range(int(frame.top / step) + 1):
        yield _text(frame.left - 6, frame.at(0, number * step)[1] + 4, f"{number * step:g}", "end", 11)
    for place, value in enumerate(values):
        x, _ = frame.at(place, 0)
        yield _text(x, _TOP + _HEIGHT + 15, value, "middle", 11)
        if gpus:
            yield _text(x, _TOP + _HEIGHT + 29, gpus[place], "middle", 9)
    yield _text(frame.left + _WIDTH / 2, _TOP + _HEIGHT + 45, label, "middle")
    yield _text(frame.left, _TOP - 8, title, "start")


def _legend(frame: _Panel, number: int, name: str, color: str) -> Iterator[str]:
    top = _TOP + _HEIGHT + 56 + 14 * number
    yield f'<rect x="{frame.left:.1f}" y="{top:.1f}" width="10" height="10" fill="{color}"/>'
    yield _text(frame.left + 16, top + 9, name, "start")


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
