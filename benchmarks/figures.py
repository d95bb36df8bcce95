"""Draw figures of records with matplotlib, as SVG. Imports matplotlib lazily."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    style: str = "-"  # of matplotlib: "-", "--", "." (dots without a line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    levels: Sequence[float] = ()  # horizontal rules
    marks: Sequence[float] = field(default=())  # vertical rules
    log_x: bool = False  # to base 2
    log_y: bool = False


def draw(path: Path, panels: Sequence[Panel], columns: int = 1) -> None:
    """Write all panels, `columns` per row. A line of the same name has the same colour in each."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}  # equal figures give equal files
    from matplotlib import pyplot

    rows = -(-len(panels) // columns)
    size = (4.2 * columns if columns > 1 else 8.6, 2.9 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        for line in panel.lines:
            x, y = zip(*line.points, strict=True)
            marker = "o" if panel.log_x else ""
            axis.plot(x, y, marker + line.style, color=f"C{names.index(line.name)}", label=line.name, markersize=3)
        if panel.log_x:
            ticks = sorted({x for line in panel.lines for x, _ in line.points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if panel.log_y:
            axis.set_yscale("log")
        for level in panel.levels:
            axis.axhline(level, color="0.4", linestyle=":", linewidth=1)
        for mark in panel.marks:
            axis.axvline(mark, color="0.85", linewidth=0.6, zorder=0)
        axis.grid(axis="y", color="0.92")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    found = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(len(found), 3 * columns), fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
