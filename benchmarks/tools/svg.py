"""Small line charts as SVG text, one panel beside the other. Owns the drawing; knows nothing of what is drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 300, 220  # of a panel
_LEFT, _TOP, _RIGHT, _BOTTOM = 42, 30, 10, 40
_PER_ROW = 3
_COLORS = ("#1f6fb2", "#d1601f", "#2b8a3e", "#8a4fb0", "#a33b3b", "#7a7a7a", "#b58900", "#0f8b8d")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # (x, y), x > 0 ascending
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: Sequence[Line]


def chart(panels: Sequence[Panel], *, x_label: str, y_label: str, level: float | None = None) -> str:
    """Panels with the same axes: x in powers of two, y from 0 linear. `level` draws a horizontal line in each.

    Lines of the same name have the same colour; the legend stands below. Raises ValueError if nothing is to be drawn.
    """
    points = [point for panel in panels for line in panel.lines for point in line.points]
    if not points:
        raise ValueError("a chart needs at least one point")
    ticks = sorted({x for x, _ in points})
    low, high = math.log2(ticks[0]), math.log2(ticks[-1])
    top = _rounded_up(max(y for _, y in points))
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}

    def x_at(x: float) -> float:
        share = 0.5 if high == low else (math.log2(x) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_at(y: float) -> float:
        return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for number, panel in enumerate(panels):
        column, row = number % _PER_ROW, number // _PER_ROW
        parts.append(f'<g transform="translate({column * _WIDTH},{row * _HEIGHT})">')
        parts.append(f'<text x="{_LEFT}" y="18" class="title">{escape(panel.title)}</text>')
        for i in range(5):
            value = top * i / 4
            parts.append(_rule(x_at(ticks[0]), x_at(ticks[-1]), y_at(value), "grid"))
            parts.append(f'<text x="{_LEFT - 5}" y="{y_at(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
        for x in ticks:
            parts.append(f'<text x="{x_at(x):.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="middle">{x:g}</text>')
        if level is not None:
            parts.append(_rule(x_at(ticks[0]), x_at(ticks[-1]), y_at(level), "level"))
        for line in panel.lines:
            path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
            dash = ' stroke-dasharray="5 3"' if line.dashed else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colors[line.name]}"{dash}/>')
            parts += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.2" fill="{colors[line.name]}"/>'
                for x, y in line.points
            ]
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        turned = f'transform="translate(11,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle"'
        parts.append(f"<text {turned}>{escape(y_label)}</text></g>")
    rows = -(-len(panels) // _PER_ROW)
    width, height = _WIDTH * min(len(panels), _PER_ROW), _HEIGHT * rows
    legend_rows = 0
    x, y = 10.0, height + 16
    for name in names:
        needed = 30 + 6.5 * len(name)
        if x + needed > width and x > 10:
            x, y, legend_rows = 10.0, y + 16, legend_rows + 1
        parts.append(f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colors[name]}"/>')
        parts.append(f'<text x="{x + 22}" y="{y}">{escape(name)}</text>')
        x += needed
    height += 26 + 16 * legend_rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        "<style>text{font:11px sans-serif;fill:#444}.title{font-weight:bold;fill:#222}polyline,line{stroke-width:1.6}"
        ".grid{stroke:#e4e4e4;stroke-width:1}.level{stroke:#333;stroke-width:1;stroke-dasharray:2 3}</style>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n"
    )


def _rule(x1: float, x2: float, y: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'


def _rounded_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten, so that quarters of it are short numbers."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)
