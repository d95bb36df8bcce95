"""The two panels of a calibration as one SVG file. Owns the drawing; independent of the measurements."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Series = Mapping[str, Sequence[tuple[float, float]]]  # by name, points (x, y), all above 0
_COLORS = ("#d9822b", "#2f6db5", "#2a9d8f", "#8a63b8")
_SIZE, _LEFT, _TOP, _GAP = 340.0, 62.0, 44.0, 96.0  # size of a panel; margins; gap between the panels
_BOTTOM = 86.0


@dataclass(frozen=True, slots=True)
class _Axes:
    """A square panel with logarithmic x, and logarithmic or linear y."""

    left: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_y: bool

    def at(self, x: float, y: float) -> tuple[float, float]:
        share_x = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        if self.log_y:
            share_y = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0])
        else:
            share_y = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + share_x * _SIZE, _TOP + (1 - share_y) * _SIZE


def draw(*, title: str, scatter: Series, gains: Series, gains_title: str) -> str:
    """Left: measured (x) against predicted (y) milliseconds with their diagonal. Right: lines over running requests."""
    width, height = 2 * _SIZE + _LEFT + _GAP + 24, _SIZE + _TOP + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        _text(_LEFT, 18, title, "start", 13),
        *_scattered(scatter),
        *_lined(gains, gains_title),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _scattered(series: Series) -> Iterator[str]:
    values = [value for points in series.values() for point in points for value in point]
    if not values:
        return
    low, high = min(values) / 1.25, max(values) * 1.25
    axes = _Axes(_LEFT, (low, high), (low, high), log_y=True)
    yield from _frame(axes, "measured, ms", "predicted, ms", _powers(low, high), _powers(low, high))
    (x1, y1), (x2, y2) = axes.at(low, low), axes.at(high, high)
    yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888" stroke-dasharray="4 3"/>'
    for number, (name, points) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        for point in points:
            x, y = axes.at(*point)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}" fill-opacity="0.65"/>'
        yield from _legend(axes, number, name, color)


def _lined(series: Series, title: str) -> Iterator[str]:
    if not series:
        return
    xs = [x for points in series.values() for x, _ in points]
    top = max(y for points in series.values() for _, y in points) * 1.08
    axes = _Axes(_LEFT + _SIZE + _GAP, (min(xs), max(xs)), (0.0, top), log_y=False)
    step = 1 if top > 2.5 else 0.5
    ticks = [step * number for number in range(int(top / step) + 1)]
    yield from _frame(axes, "running requests", title, [x for x in sorted(set(xs)) if math.log2(x) % 1 == 0], ticks)
    (x1, y1), (x2, _) = axes.at(min(xs), 1.0), axes.at(max(xs), 1.0)
    yield f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y1:.1f}" stroke="#888" stroke-dasharray="4 3"/>'
    for number, (name, points) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*axes.at(*point)) for point in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield from _legend(axes, number, name, color)


def _frame(axes: _Axes, x: str, y: str, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> Iterator[str]:
    bottom = _TOP + _SIZE
    yield f'<rect x="{axes.left:.1f}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#bbb"/>'
    for value in x_ticks:
        yield _text(axes.at(value, axes.y[1])[0], bottom + 16, f"{value:g}", "middle")
    for value in y_ticks:
        yield _text(axes.left - 6, axes.at(axes.x[0], value)[1] + 4, f"{value:g}", "end")
    yield _text(axes.left + _SIZE / 2, bottom + 34, x, "middle")
    yield _text(axes.left, _TOP - 8, y, "start")


def _legend(axes: _Axes, number: int, name: str, color: str) -> Iterator[str]:
    top = _TOP + _SIZE + 46 + 14 * number
    yield f'<rect x="{axes.left:.1f}" y="{top:.1f}" width="10" height="10" fill="{color}"/>'
    yield _text(axes.left + 16, top + 9, name, "start")


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten as ticks, with 2 and 5 in between if there are few."""

    def found(steps: Sequence[float]) -> list[float]:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]

    return powers if len(powers := found((1.0,))) > 2 else found((1.0, 2.0, 5.0))


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
