"""Line charts with linear axes as SVG text, one panel below the other, each with its own axes. Only draws."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.tools.svg import Line

_WIDTH, _HEIGHT = 860, 260  # of a panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 30, 12, 42
_COLORS = ("#1f6fb2", "#d1601f", "#2b8a3e", "#8a4fb0")


@dataclass(frozen=True, slots=True)
class Curves:
    """One panel. `marks` are x positions of vertical rules."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()


def curves(panels: Sequence[Curves]) -> str:
    """Raises ValueError if a panel has no point."""
    parts = []
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate(0,{number * _HEIGHT})">{_panel(panel)}</g>')
    height = _HEIGHT * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        "<style>text{font:11px sans-serif;fill:#444}.title{font-weight:bold;fill:#222}polyline{stroke-width:1.6}"
        ".grid{stroke:#e4e4e4}.mark{stroke:#bbb;stroke-dasharray:2 3}</style>"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n"
    )


def _panel(panel: Curves) -> str:
    points = [point for line in panel.lines for point in line.points]
    if not points:
        raise ValueError(f"{panel.title}: a chart needs at least one point")
    xs, ys = ticks(*_range(x for x, _ in points)), ticks(*_range(y for _, y in points))

    def x_at(x: float) -> float:
        return _LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="18" class="title">{escape(panel.title)}</text>']
    for y in ys:
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y_at(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in xs:
        parts.append(f'<text x="{x_at(x):.1f}" y="{bottom + 14}" text-anchor="middle">{x:g}</text>')
    for x in panel.marks:
        parts.append(f'<line x1="{x_at(x):.1f}" x2="{x_at(x):.1f}" y1="{_TOP}" y2="{bottom}" class="mark"/>')
    at = float(right)
    for number, line in reversed(list(enumerate(panel.lines))):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"{dash}/>')
        parts.append(f'<text x="{at:.0f}" y="18" text-anchor="end" style="fill:{color}">{escape(line.name)}</text>')
        at -= 14 + 6.2 * len(line.name)
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    turned = f'transform="translate(12,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{escape(panel.y_label)}</text>")
    return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, four to eight steps apart."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = sorted(values)
    return found[0], found[-1] if found[-1] > found[0] else found[0] + 1
