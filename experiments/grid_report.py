"""Markdown tables of `experiments.strategy_grid`'s record, beside what the TLT paper reports.

Owns the paper's figures: Tables 1 and 4, Qwen-32B on H100 GPUs (TP=4). Its Figure 13 (batch size 1, top-k 8, T = 0)
gives curves, not numbers: accept length rises with depth and flattens; the speed-up has its maximum before.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import markdown

# Table 1: Draft_Depth 12, Tokens_to_Verify 64; top-k -> (accept length, speed-up).
TOP_K = {4: (8.29, 3.51), 6: (8.66, 3.65), 8: (8.67, 3.64), 10: (8.67, 3.64), 12: (8.60, 3.56), 16: (8.42, 3.47)}
# Table 4: Draft_Depth 10, topK 8; batch size -> tokens to verify -> speed-up.
BATCH = {
    1: {16: 3.22, 32: 3.46, 48: 3.56, 64: 3.62},
    2: {16: 3.08, 32: 3.28, 48: 3.39, 64: 3.38},
    4: {16: 3.01, 32: 3.09, 48: 3.13, 64: 2.98},
    8: {16: 2.73, 32: 2.63, 48: 2.51, 64: 2.27},
    16: {16: 2.67, 32: 2.52, 48: 2.24, 64: 1.91},
    32: {16: 2.48, 32: 2.23, 48: 1.90, 64: 1.70},
}
GOAL = 0.05  # of the regret
Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> str:
    """All tables, by target and drafter."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["dtype"], row["drafter"]), []).append(row)
    parts = [regrets(rows), ""]
    for (target, dtype, drafter), of in groups.items():
        parts += [f"### {drafter} drafts for the {target} target, {dtype}\n", _cells(of), _batches(of)]
    parts.append("TLT Table 1, depth 12, 64 tokens to verify; top-k: accept length / speed-up.\n")
    parts.append(
        markdown([str(top_k) for top_k in TOP_K], [[f"{length:.2f} / {up:.2f}x" for length, up in TOP_K.values()]])
    )
    return "\n".join(parts)


def _cells(rows: Sequence[Row]) -> str:
    """Every strategy: accept length and speed-up by batch size (TLT Figure 13)."""
    by_batch = {
        row["batch"]: {c["strategy"]: c for c in row["cells"]} for row in sorted(rows, key=lambda r: r["batch"])
    }
    shapes = sorted(
        {(c["top_k"], c["depth"], c["tokens_to_verify"], c["strategy"]) for row in rows for c in row["cells"]}
    )
    lines = [[shape[-1], *(_both(cells.get(shape[-1])) for cells in by_batch.values())] for shape in shapes]
    return markdown(["strategy", *(f"batch size {batch}" for batch in by_batch)], lines) + "\n"


def _batches(rows: Sequence[Row]) -> str:
    """What the chooser makes of these cells, with plain decoding among them (TLT Table 4 beside it)."""
    lines = []
    for row in sorted(rows, key=lambda row: row["batch"]):
        choice, paper = row["choice"], BATCH.get(row["batch"], {})
        chosen = ", ".join(f"{name} {share:.0%}" for name, share in choice["chosen"].items() if share >= 0.05)
        lines.append(
            f"{row['batch']} | {choice['best']} {choice['best_speedup']:.2f}x | {choice['reached_speedup']:.2f}x | "
            f"{choice['regret']:.1%} [{choice['regrets']['low']:.1%}, {choice['regrets']['high']:.1%}] | "
            f"{choice['first_regret']:.1%} | {chosen} | "
            + " | ".join(f"{paper[verify]:.2f}x" if paper else "" for verify in BATCH[1])
        )
    head = "batch size | best fixed | chooser | regret | of its first run | chosen | "
    return markdown(head + " | ".join(f"TLT, verify {verify}" for verify in BATCH[1]), lines) + "\n"


def regrets(rows: Sequence[Row]) -> str:
    """In how many cells the goal is kept, and where not."""
    missed = [row for row in rows if row["choice"]["regret"] >= GOAL]
    text = f"Regret under {GOAL:.0%} in {len(rows) - len(missed)} of {len(rows)} cells"
    where = (f"{row['target']} {row['drafter']} at {row['batch']}: {row['choice']['regret']:.1%}" for row in missed)
    return f"{text}; not: {', '.join(where)}." if missed else f"{text}."


def _both(cell: Row | None) -> str:
    return "" if cell is None else f"{cell['accept_length']:.2f} / {cell['speedup']:.2f}x"
