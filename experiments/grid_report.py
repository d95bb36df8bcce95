"""Markdown tables of `experiments.strategy_grid`'s record, beside TLT's Tables 1 and 4 and Figure 13."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import markdown
from experiments.tlt import BATCH, TOP_K

Cell = dict[str, Any]


def tables(cells_of: Sequence[dict[str, Any]]) -> str:
    """All tables, by target and drafter."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in cells_of:
        groups.setdefault((row["target"], row["dtype"], row["drafter"]), []).append(row)
    parts = []
    for (target, dtype, drafter), rows in groups.items():
        parts.append(f"### {drafter} drafts for the {target} target, {dtype}\n")
        single = next((row for row in rows if row["batch"] == 1), None)
        if single is not None:
            parts += [*_depths(single["cells"]), *_top_k(single["cells"])]
        parts += [*_batches(rows), *_choices(rows)]
    return "\n".join(parts)


def _depths(cells: Sequence[Cell]) -> list[str]:
    trees = [cell for cell in cells if cell["top_k"] > 1]
    width = max((cell["top_k"] for cell in _most_common_width(trees)), default=0)
    trees = [cell for cell in trees if cell["top_k"] == width]
    chains = [cell for cell in cells if cell["top_k"] == 1]
    text = [f"Batch size 1, top-k {width}: accept length / speed-up (TLT Figure 13).\n"]
    verify = sorted({cell["tokens_to_verify"] for cell in trees})
    lines = []
    for depth in sorted({cell["depth"] for cell in [*trees, *chains]}):
        chain = _find(chains, depth=depth)
        lines.append(
            [str(depth), _both(chain), *(_both(_find(trees, depth=depth, tokens_to_verify=v)) for v in verify)]
        )
    return [*text, markdown(["depth", "chain", *(f"verify {v}" for v in verify)], lines), ""]


def _most_common_width(trees: Sequence[Cell]) -> list[Cell]:
    widths = [cell["top_k"] for cell in trees]
    return [cell for cell in trees if widths.count(cell["top_k"]) == max(map(widths.count, widths))]


def _top_k(cells: Sequence[Cell]) -> list[str]:
    """The cells that differ in top-k only, at the depth and size that most of them share."""
    trees = [cell for cell in cells if cell["top_k"] > 1]
    shapes = [(cell["depth"], cell["tokens_to_verify"]) for cell in trees]
    if not shapes:
        return []
    depth, verify = max(shapes, key=lambda shape: (shapes.count(shape), shape))
    same = sorted(
        (c for c in trees if (c["depth"], c["tokens_to_verify"]) == (depth, verify)), key=lambda c: c["top_k"]
    )
    chain = _find([cell for cell in cells if cell["top_k"] == 1], depth=depth)
    ours = [*([chain] if chain is not None else []), *same]
    lines = [
        [f"ours, depth {depth}, verify {verify}", *(f"{c['top_k']}: {_both(c)}" for c in ours)],
        ["TLT, depth 12, verify 64", *(f"{k}: {length:.2f} / {up:.2f}x" for k, (length, up) in TOP_K.items())],
    ]
    columns = max(map(len, lines))
    padded = [[*line, *[""] * (columns - len(line))] for line in lines]
    head = ["top-k: accept length / speed-up (TLT Table 1)", *[""] * (columns - 1)]
    return [markdown(head, padded), ""]


def _batches(rows: Sequence[dict[str, Any]]) -> list[str]:
    shapes = set.intersection(*({cell["strategy"] for cell in row["cells"]} for row in rows))
    kept = sorted(
        (cell for cell in rows[0]["cells"] if cell["strategy"] in shapes),
        key=lambda cell: (cell["top_k"], cell["tokens_to_verify"]),
    )
    theirs = list(BATCH[1])
    lines = []
    for row in rows:
        cells = {cell["strategy"]: cell for cell in row["cells"]}
        best = max(cells[cell["strategy"]]["speedup"] for cell in kept)
        paper = BATCH.get(row["batch"], {})
        best_paper = max(paper.values(), default=0)
        lines.append(
            [
                str(row["batch"]),
                *(_bold(cells[cell["strategy"]]["speedup"], best) for cell in kept),
                *(_bold(paper[v], best_paper) if v in paper else "" for v in theirs),
            ]
        )
    head = ["batch size", *(cell["strategy"] for cell in kept), *(f"TLT, verify {v}" for v in theirs)]
    return ["Speed-up over batch size (TLT Table 4: depth 10, top-k 8).\n", markdown(head, lines), ""]


def _choices(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        choice = row["choice"]
        lines.append(
            [
                str(row["batch"]),
                f"{choice['best']} {choice['best_speedup']:.2f}x",
                f"{choice['chosen']} {choice['chosen_speedup']:.2f}x",
                f"{choice['choice_regret']:.1%}",
                f"{choice['reached_speedup']:.2f}x",
            ]
        )
    head = ["batch size", "best cell", "chosen most", "regret of the choice", "reached, exploration included"]
    return ["What the chooser makes of these cells, with plain decoding among them.\n", markdown(head, lines), ""]


def _find(cells: Sequence[Cell], **wanted: int) -> Cell | None:
    return next((cell for cell in cells if all(cell[name] == value for name, value in wanted.items())), None)


def _both(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell['accept_length']:.2f} / {cell['speedup']:.2f}x"


def _bold(value: float, best: float) -> str:
    return f"**{value:.2f}x**" if value == best else f"{value:.2f}x"
