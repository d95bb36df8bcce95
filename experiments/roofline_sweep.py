"""The roofline toggle's cost model on a measured sweep (EfficientRollout 4.2, D.3): errors, decisions, Figure 12.

    python -m experiments.roofline_sweep --sweep FILE [--model-config config.json] [--lengths 3 7 15] [--most 32]

FILE has the columns of EfficientRollout's published sweeps (benchmarks/tools/decode_sweep.py), for one model or
several. Fits to the given draft lengths and batch sizes, or to a default split, and scores the held-out rest. Then
leaves out every draft length and every batch size in turn. Exact, and the same on every machine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np

from benchmarks.harness import RESULTS, command, markdown, write
from benchmarks.tools.decode_sweep import COPY, Cell, Score, Split, Sweep, network_of, read, score
from benchmarks.tools.two_stage import OVERLAP, TwoStage, Work

OVERLAPS = (1.2, OVERLAP, 2.0, 3.0, 100.0)  # the last is close to the maximum of both, as in the paper
_COLUMNS = {
    "cells": "cells",
    "sign_right": "sign right",
    "always_right": "always on right",
    "target_error": "T_T",
    "draft_error": "T_D",
    "verify_error": "T_V",
    "cycle_error": "cycle",
    "lost": "time lost",
    "always_lost": "always on",
    "never_lost": "never on",
}


def groups(sweep: Sweep, split: Split) -> dict[str, list[Cell]]:
    """Group cells by their part in the fit."""
    length = ", ".join(str(length) for length in sweep.lengths if length not in split.lengths) or "none"
    cells = sweep.cells
    return {
        "fitted": [cell for cell in cells if split.keep(cell)],
        f"draft length {length}, batch to {split.most}": [
            cell for cell in cells if cell.length not in split.lengths and cell.batch <= split.most
        ],
        f"batch over {split.most}": [cell for cell in cells if cell.batch > split.most],
        "all held out": [cell for cell in cells if not split.keep(cell)],
    }


def crossed(sweep: Sweep, work: Work, overlap: float = OVERLAP) -> dict[str, Score]:
    """Return means over fits that leave out one draft length, one batch size, or the larger half of the batches."""
    batches = sweep.batches
    middle = batches[(len(batches) - 1) // 2]
    kinds: dict[str, list[Callable[[Cell], bool]]] = {
        "a draft length left out": [_other_length(length) for length in sweep.lengths],
        "a batch size left out": [_other_batch(batch) for batch in batches],
        f"batch over {middle} left out": [lambda cell: cell.batch <= middle],
    }
    found = {}
    for kind, keeps in kinds.items():
        scores = []
        for keep in keeps:
            try:
                model = sweep.fit(work, keep, overlap)
            except ValueError:
                continue  # nothing else was measured
            scores.append(score(sweep, model, [cell for cell in sweep.cells if not keep(cell)]))
        if of := [one for one in scores if one is not None]:
            means = {name: fmean(getattr(one, name) for one in of) for name in _COLUMNS if name != "cells"}
            found[kind] = Score(cells=sum(one.cells for one in of), **means)
    return found


def _other_length(length: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.length != length


def _other_batch(batch: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.batch != batch


def table(scores: Mapping[str, Score | None]) -> str:
    rows = [
        [name, *(getattr(of, key) if key == "cells" else f"{getattr(of, key):.2%}" for key in _COLUMNS)]
        for name, of in scores.items()
        if of is not None
    ]
    return markdown(["", *_COLUMNS.values()], rows)


def studied(sweep: Sweep, split: Split, config: Path | None, margin: float) -> tuple[TwoStage, dict[str, Any]]:
    """Return the fit and its results, which are also printed."""
    net, found_by = network_of(sweep.model, config)
    work = Work.of(net, COPY)
    model = sweep.fit(work, split.keep)
    scores = {name: score(sweep, model, cells) for name, cells in groups(sweep, split).items()}
    cross = {f"{overlap:g}": crossed(sweep, work, overlap) for overlap in OVERLAPS}
    boundary = {
        str(length): {str(context): model.boundary(context, length, margin) for context in sweep.contexts}
        for length in sweep.lengths
    }
    fitted = {name: value for name, value in asdict(model).items() if name != "work"}
    lengths = ", ".join(map(str, split.lengths))
    print(f"\n{sweep.model} ({found_by}): fitted to draft lengths {lengths} and batch to {split.most}")
    print(f"{len(sweep.cells)} cells, {sweep.left_out} lines of other kinds left out")
    print(", ".join(f"{name} {value:.4g}" for name, value in fitted.items()))
    print(table(scores))
    for overlap, of in cross.items():
        print(f"\nOverlap {overlap}, cross-validated:\n{table(of)}")
    print(f"\nMost requests at a predicted speed-up over {1 + margin:g} (draft length: context: batch): {boundary}")
    return model, {
        "model": sweep.model,
        "shape": found_by,
        "split": {"lengths": list(split.lengths), "most": split.most},
        "fitted": fitted,
        "work": asdict(work),
        "scores": {name: of and asdict(of) for name, of in scores.items()},
        "cross_validated": {overlap: {name: asdict(one) for name, one in of.items()} for overlap, of in cross.items()},
        "boundary": {"margin": margin, "most_requests": boundary},
    }


def figure(path: Path, sweep: Sweep, model: TwoStage, margin: float) -> None:
    """Draw Figure 12: per draft length the predicted speed-up over batch and context, the line where it is 1 + margin,
    and measured cells: circles where drafting helps, crosses where it harms."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    lengths, batches, contexts = sweep.lengths, sweep.batches, sweep.contexts
    fine_batches = np.geomspace(batches[0] / 1.15, batches[-1] * 1.15, 48)
    fine_contexts = np.geomspace(contexts[0] / 1.2, contexts[-1] * 1.2, 16)
    columns = min(len(lengths), 4)
    rows = -(-len(lengths) // columns)
    size = (3.4 * columns + 0.8, 3.0 * rows + 0.5)
    drawn, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    surfaces = [
        np.array([[_smooth(model, batch, context, length) for batch in fine_batches] for context in fine_contexts])
        for length in lengths
    ]
    low, high = min(float(of.min()) for of in surfaces), max(float(of.max()) for of in surfaces)
    levels = np.linspace(min(low, 0.9), max(high, 1.1), 17)
    colours = None
    for axis, length, surface in zip(axes.flat, lengths, surfaces, strict=False):
        norm = TwoSlopeNorm(1.0, min(low, 0.9), max(high, 1.1))
        colours = axis.contourf(fine_batches, fine_contexts, surface, levels=levels, cmap="RdYlGn", norm=norm)
        if surface.min() < 1 + margin < surface.max():
            axis.contour(fine_batches, fine_contexts, surface, levels=[1 + margin], colors="tab:blue")
        cells = [cell for cell in sweep.cells if cell.length == length]
        for helps, style in (
            (True, {"marker": "o", "c": "lime", "edgecolors": "black"}),
            (False, {"marker": "x", "c": "red"}),
        ):
            of = [cell for cell in cells if (sweep.speedup(cell) > 1) == helps]
            axis.scatter(
                [cell.batch for cell in of], [cell.context for cell in of], s=20, linewidths=1, zorder=3, **style
            )
        axis.set(title=f"draft length {length}", xlabel="requests", ylabel="context, tokens")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(batches, map(str, batches), fontsize=7)
        axis.set_yticks(contexts, map(str, contexts), fontsize=7)
        axis.minorticks_off()
    for axis in axes.flat[len(lengths) :]:
        axis.set_visible(False)
    assert colours is not None
    drawn.colorbar(colours, ax=axes, label="predicted speed-up, all drafts accepted", format="%.2f")
    drawn.suptitle(f"{sweep.model}: blue where the predicted speed-up is {1 + margin:g}; measured: o helps, x harms")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, metadata={"Date": None})
    pyplot.close(drawn)


def _smooth(model: TwoStage, batch: float, context: float, length: int) -> float:
    """Interpolate the speed-up between the nearest two whole numbers of requests."""
    low = max(int(batch), 1)
    part = max(batch - low, 0.0)
    at, above = (model.speedup(of, round(context), length) for of in (low, low + 1))
    return at + part * (above - at)


def record(
    sweeps: Iterable[Sweep], lengths: Sequence[int], most: int, config: Path | None, margin: float, drawn: Path
) -> list[dict[str, Any]]:
    rows = []
    for index, sweep in enumerate(sweeps):
        own = Split.of(sweep)
        split = Split(lengths or own.lengths, most or own.most)
        model, row = studied(sweep, split, config, margin)
        path = drawn if index == 0 else drawn.with_stem(f"{drawn.stem}_{index + 1}")
        figure(path, sweep, model, margin)
        rows.append(row | {"figure": path.name})
    return rows


def main(
    *,
    sweep: Annotated[Path, "CSV of measured times"],
    model_config: Annotated[Path | None, "config.json of the model; default: known by its name"] = None,
    lengths: Annotated[Sequence[int], "draft lengths to fit to; default: all but 11, or the second longest"] = (),
    most: Annotated[int, "largest batch to fit to; 0: 32, or half of the largest"] = 0,
    margin: Annotated[float, "of the toggle's boundary"] = 0.05,
    out: Path = RESULTS / "roofline_sweep.json",
) -> None:
    question = "fitted to some cells of a measured sweep, does the roofline tell where drafting pays in the others?"
    rows = record(read(sweep), lengths, most, model_config, margin, out.with_suffix(".svg"))
    write(out, question, {"sweeps": rows}, settings={"sweep": sweep.name, "overlap": OVERLAP})


if __name__ == "__main__":
    command(main, timed=False)
