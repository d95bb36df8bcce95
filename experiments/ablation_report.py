"""The tables of `experiments.ablation`'s record, and the page that shows them.

Owns `experiments/results/ablation.md` and the text between `<!-- experiments.ablation: begin -->` and its end in
docs/results/ablation.md. Measures nothing.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import ROOT, load, markdown, relinked, replace_block

PAGE = ROOT / "docs/results/ablation.md"
NAMES = {
    "nothing": "nothing",
    "half": "half the rollouts, no system",
    "tlt": "[TLT](../systems/tlt.md)",
    "das": "[DAS](../systems/das.md)",
    "efficient_rollout": "[EfficientRollout](../systems/efficient_rollout.md)",
    "duet": "[DUET](../systems/duet.md)",
    "qarl": "[QaRL](../systems/qarl.md)",
    "everything": "everything that goes together",
}
HEAD = (
    "task | system | tokens | rollout, s | learning, s | RL, s | saved, s | times faster | held-out reward | "
    "against nothing"
)
# 97.5 % quantiles of t by degrees of freedom.
T95: tuple[float, ...]
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T95 += (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
Row = Mapping[str, Any]


def write_pages(record: Path) -> str:
    """Write the pages from the record, and return the whole table. Only results/ablation.json has a page."""
    found = load(record)
    text = table(found["runs"], found["same_tokens"], found["machine"])
    beside = record.with_suffix(".md")
    beside.write_text(f"# Each system, and all together\n\n{relinked(text, PAGE, beside)}\n", encoding="utf-8")
    if record == ROOT / "experiments/results/ablation.json":
        replace_block(PAGE, "experiments.ablation", text + "\n")
    return text


def table(
    runs: Sequence[Row], same_tokens: Mapping[str, bool], machine: Row, systems: Sequence[str] = tuple(NAMES)
) -> str:
    """Render Markdown: a line per task and system, and the basis of each."""
    good = [row for row in runs if "error" not in row]
    failed = [f"{row['cell']}, seed {row['seed']}" for row in runs if "error" in row]
    lines = []
    for task in dict.fromkeys(row["task"] for row in good):
        of_task = [row for row in good if row["task"] == task]
        present = [name for name in NAMES if name in systems and any(row["system"] == name for row in of_task)]
        lines += [_line(task, name, of_task, same_tokens.get(f"{task} {name}", False)) for name in present]
    if not lines:
        return "Not measured yet: `python -m experiments.ablation`."
    seeds = {kind: sorted({row["seed"] for row in good if row["kind"] == kind}) for kind in ("timed", "learned")}
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    parts = [
        markdown(HEAD, lines),
        f"Seconds and tokens: runs of `paceline train`, seeds {_listed(seeds['timed'])}, means; *times faster* is "
        "within seeds, with the smallest and the largest. Seconds are of RL steps only; rollout and learning are parts "
        f"of them. Held-out reward: after the last RL step, seeds {_listed(seeds['learned'] or seeds['timed'])}, "
        "differences within seeds with 95 % intervals of t; *the same*: it learned from nothing's tokens.",
    ]
    if failed:
        parts.append(f"Ended with an error: {'; '.join(failed)}.")
    parts.append(
        f"{machine['cores']} cores of {machine['cpu']}, no GPU; commit {machine['commit']}; {versions}. Written by "
        "`python -m experiments.ablation`."
    )
    return "\n\n".join(parts)


def _line(task: str, system: str, rows: Sequence[Row], same: bool) -> list[str]:
    timed, base = _by_seed(rows, "timed", system), _by_seed(rows, "timed", "nothing")
    pairs = [(base[seed], timed[seed]) for seed in sorted(base.keys() & timed.keys())]

    def mean(key: str, form: str) -> str:
        return format(fmean(row[key] for row in timed.values()), form) if timed else "-"

    ratios = [a["rl_s"] / b["rl_s"] for a, b in pairs]
    saved = fmean(a["rl_s"] - b["rl_s"] for a, b in pairs) if pairs and system != "nothing" else None
    reward, against = _reward(rows, system, same)
    return [
        f"`{task}`",
        NAMES[system],
        mean("tokens", ",.0f"),
        *(mean(key, ".1f") for key in ("rollout_s", "learn_s", "rl_s")),
        "" if saved is None else f"{saved:+.1f}",
        "" if saved is None else f"{fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        reward,
        against,
    ]


def _reward(rows: Sequence[Row], system: str, same: bool) -> tuple[str, str]:
    """Return the reward after RL, alone and paired against nothing: from learned rows if there are any, else timed
    ones."""
    kind = "learned" if any(row["kind"] == "learned" for row in rows) else "timed"
    base = _by_seed(rows, kind, "nothing")
    if same:
        return (f"{fmean(row['after'] for row in base.values()):.3f}" if base else "-"), "the same"
    ours = _by_seed(rows, kind, system)
    if not ours:
        return "-", ""
    differences = [ours[seed]["after"] - base[seed]["after"] for seed in sorted(ours.keys() & base.keys())]
    return f"{fmean(row['after'] for row in ours.values()):.3f}", "" if system == "nothing" else _interval(differences)


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.3f}" if values else "-"
    half = T95[min(len(values) - 2, len(T95) - 1)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):+.3f} +- {half:.3f}"


def _by_seed(rows: Sequence[Row], kind: str, system: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if (row["kind"], row["system"]) == (kind, system)}


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"
