"""The record of `benchmarks.low_bit` as tables and a figure, and whether its goals are met. Measures nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import markdown, replace_block

Row = Mapping[str, Any]
FEW = 8  # requests, up to which the 20M model's goals hold
OVER_FP32, OVER_BF16, OVER_VLLM, LEARNER, SHARE, GAP = 3.0, 2.0, 1.0, 1.1, 0.01, 1e-3
SPEEDS = ("fp32", "bf16", "w8a8", "w8a8 fp32", "w4a8", "vllm bf16", "vllm w8a8")
RATIOS = (
    "w8a8 / fp32",
    "w8a8 / bf16",
    "w4a8 / bf16",
    "w8a8 / vllm w8a8",
    "bf16 / vllm bf16",
    "w8a8, speculating / w8a8",
    "w8a8, speculating, cold / w8a8",
)


def goals(record: Row) -> list[tuple[str, bool]]:
    """Return each goal with whether the measurements meet it."""
    found: list[tuple[str, bool]] = []
    for row in record.get("rollout", ()):
        where = f"{row['target']} at {row['requests']}"
        limits = {"w8a8 / vllm w8a8": OVER_VLLM, "bf16 / vllm bf16": OVER_VLLM}
        if row["target"] == "20m" and row["requests"] <= FEW:
            limits |= {"w8a8 / fp32": OVER_FP32, "w8a8 / bf16": OVER_BF16}
        for name, least in limits.items():
            if name in row["ratios"]:
                ratio = row["ratios"][name]["median"]
                found.append((f"{where}: {name} {ratio:.2f}, goal {least:g}", ratio >= least))
    for row in record.get("learner", ()):
        ratio = row["mirrored_over_full"]["median"]
        found.append((f"{row['target']}: learner's step {ratio:.3f} times, goal {LEARNER:g}", ratio <= LEARNER))
    for row in record.get("publish", ()):
        share = row["quantising_share"]
        found.append((f"{row['target']}: quantising {share:.2%} of a step, goal {SHARE:.0%}", share < SHARE))
    for row in record.get("agreement", ()):
        if row["dtype"] == "float32":
            mean = row["w8a8"]["mean"]
            found.append((f"{row['target']}: vLLM's log-probs apart by {mean:.2g}, goal {GAP:g}", mean <= GAP))
    return found


def table(record: Row) -> str:
    """Render Markdown: the measured parts, then the goals."""
    texts = []
    if rows := record.get("rollout"):
        texts += [_speeds(rows), _ratios(rows), *_cuts(rows)]
    if rows := record.get("learner"):
        texts.append(_learner(rows))
    if rows := record.get("publish"):
        texts.append(_publish(rows))
    if rows := record.get("agreement"):
        texts.append(_agreement(rows))
    if asked := goals(record):
        missed = [f"- **missed**: {text}" for text, met in asked if not met]
        texts.append(
            "\n".join([f"Goals met: {len(asked) - len(missed)} of {len(asked)}.", *([""] if missed else []), *missed])
        )
    return "\n\n".join(texts)


def _by_contender(title: str, names: Sequence[str], cells: Sequence[tuple[Row, Mapping[str, str]]]) -> str:
    """Render a row per cell, and a column per name that any cell has."""
    there = [name for name in names if any(name in found for _, found in cells)]
    lines = [[row["target"], row["requests"]] + [found.get(name, "") for name in there] for row, found in cells]
    return markdown([title, "requests", *there], lines)


def _speeds(rows: Sequence[Row]) -> str:
    cells = [(row, {name: f"{speed:,.0f}" for name, speed in row["tokens_per_s"].items()}) for row in rows]
    return _by_contender("tokens/s, plain", SPEEDS, cells)


def _ratios(rows: Sequence[Row]) -> str:
    cells = [(row, {name: f"{of['median']:.2f}" for name, of in row["ratios"].items()}) for row in rows]
    return _by_contender("times faster", RATIOS, cells)


def _cuts(rows: Sequence[Row]) -> list[str]:
    cut = [f"{row['target']} at {row['requests']}: {row['longest']}" for row in rows if row["longest"] < 200]
    return [f"Responses are cut, in tokens: {'; '.join(cut)}."] if cut else []


def _learner(rows: Sequence[Row]) -> str:
    return markdown(
        "learner's step | rollouts | full precision, s | mirroring W8A8, s | times",
        [
            f"{row['target']} | {row['rollouts']} | {row['step_s']['full']:.3f} | {row['step_s']['mirrored']:.3f} | "
            f"{row['mirrored_over_full']['median']:.3f}"
            for row in rows
        ],
    )


def _publish(rows: Sequence[Row]) -> str:
    return markdown(
        "hand-over | full: pack, ms | load, ms | MB | W8A8: quantise and pack, ms | load, ms | MB | "
        "quantising, share of a step | whole hand-over",
        [
            f"{row['target']} | {row['ms']['pack_full']:.2f} | {row['ms']['load_full']:.2f} | "
            f"{row['bytes']['full'] / 1e6:.2f} | {row['ms']['quantise_and_pack']:.2f} | {row['ms']['load_w8a8']:.2f} | "
            f"{row['bytes']['w8a8'] / 1e6:.2f} | {row['quantising_share']:.3%} | {row['hand_over_share']:.3%}"
            for row in rows
        ],
    )


def _agreement(rows: Sequence[Row]) -> str:
    return markdown(
        "gap of log-probs: stock vLLM against | W8A8, our W8A8: mean | max | W8A8, our full precision: mean | "
        "full precision, ours: mean",
        [
            f"{row['target']} {row['dtype']} | {row['w8a8']['mean']:.1e} | {row['w8a8']['max']:.1e} | "
            f"{row['unaligned']['mean']:.1e} | {row['none']['mean']:.1e}"
            for row in rows
        ],
    )


def refresh(page: Path, record: Row) -> None:
    """Replace the tables in `page`, between its marks. Raises ValueError if the marks are missing."""
    machine = record["machine"]
    said = f"{machine['cpu']}, {record['settings']['threads']} threads, commit {machine['commit']}."
    replace_block(page, "benchmarks.low_bit", f"{said}\n\n{table(record)}")


def plot(record: Row, path: Path) -> None:
    """Draw tokens/s over requests, a panel per target."""
    panels = []
    for size in dict.fromkeys(row["target"] for row in record["rollout"]):
        rows = [row for row in record["rollout"] if row["target"] == size]
        names = [name for name in (*SPEEDS, "w8a8, speculating") if all(name in row["tokens_per_s"] for row in rows)]
        lines = [Line(name, [(row["requests"], row["tokens_per_s"][name]) for row in rows]) for name in names]
        panels.append(
            Panel(title=size, lines=lines, x_label="requests", y_label="tokens/s", log_x=True, log_y=True),
        )
    draw(path, panels, columns=min(3, len(panels)))
