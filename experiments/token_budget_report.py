"""All tasks of `experiments.token_budget` beside the DUET paper's tables: `python -m experiments.token_budget_report`.

Owns `experiments/results/token_budget.{md,svg}`, the marked block of docs/token_budget.md, the paper's figures (Tables
1, 2 and 6: Qwen3-1.7B-base on MATH, MATH-500, one seed, best checkpoint) and the intervals: of t over seeds, and over
warm starts, of the mean difference of the seeds that share one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import ROOT, command, load, markdown

# form and budget -> (MATH-500, speed-up over GRPO at full budget; over GRPO at the same budget)
PAPER: dict[str, tuple[float, float | None, float | None]] = {
    "before": (45.1, None, None),
    "grpo@1": (56.8, 1.0, 1.0),
    "dapo@1": (57.6, 0.81, 0.81),
    "both@1": (61.6, 1.62, 1.62),
    "grpo@0.5": (56.4, None, 1.0),
    "dapo@0.5": (56.6, None, 0.84),
    "allocator@0.5": (61.7, None, 1.30),
    "abort@0.5": (61.3, None, 1.93),
    "both@0.5": (62.1, 2.51, 1.73),
    "grpo@0.25": (54.9, None, 1.0),
    "dapo@0.25": (55.5, None, 0.86),
    "both@0.25": (61.4, None, 1.72),
}
# 97.5 % quantiles of t by degrees of freedom.
T95: tuple[float, ...]
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
T95 += (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
FULL = "grpo@1"
Row = dict[str, Any]


def tables(task: str, rows: Sequence[Row], wall: Sequence[Row]) -> str:
    """What one task brought. `wall`: rows of `--wall`, may be empty."""
    cells = {name: {row["seed"]: row for row in rows if row["cell"] == name} for name in _names(rows)}
    before = [row["before"] for row in {row["seed"]: row for row in rows}.values()]
    head = (
        "form | budget | seeds | failed | held-out reward | against `grpo`, budget 1 | over warm starts | "
        "against `grpo`, same budget | tokens | responses | length | seconds of one core"
    )
    parts = [
        f"## `{task}`",
        f"Before RL {_mean(before)}.",
        markdown(head, [_line(name, of, cells) for name, of in cells.items()]),
    ]
    if decided := [line for name, of in cells.items() if (line := _decided(name, list(of.values())))]:
        parts += ["What the controller did, means over RL steps and seeds:", markdown(DECIDED, decided)]
    if wall:
        parts += ["Wall time of the program itself:", _wall(wall)]
    return "\n\n".join(parts) + "\n"


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """All tasks, beside the paper."""
    parts = [
        "# One token budget on paired seeds",
        "Held-out reward after the last RL step, means over paired seeds with their standard errors. Differences are "
        "within seeds, with 95 % intervals of t over seeds, and over warm starts, which seeds share. Tokens, responses "
        f"and seconds are of RL training, as shares of `{FULL}` of the same seeds, without runs that ended with an "
        "error (whose reward counts 0); length: mean of a response in training. The "
        "protocol, failures included, is in `experiments/token_budget.py`; written by "
        "`python -m experiments.token_budget_report`.",
        *(tables(record["settings"]["task"], record["runs"], record["wall"]).rstrip() for record in records),
        "## The paper's",
        _paper(),
        *dict.fromkeys(f"{record['machine']['cores']} cores, {record['machine']['cpu']}." for record in records),
        f"Commits of the runs: {', '.join(commits)}." if (commits := _commits(records)) else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _commits(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that runs were made with."""
    rows = [row for record in records for row in (*record["runs"], *record["wall"])]
    return sorted({str(row["commit"]) for row in rows if row.get("commit")})


DECIDED = (
    "form | budget | responses of a prompt, least to most | spent / planned | variance saved | bound | answered | "
    "given up | late and kept | keep probability | surcharge"
)


def _decided(name: str, rows: Sequence[Row]) -> list[str]:
    """Of a cell with a budget or an abort; of another one nothing. Variance saved: of the gradient estimate against
    equal counts at the same cost, by the spreads as they were estimated; bound: the most that could be (Cauchy-Schwarz)
    """
    seen = [row["metrics"] for row in rows if any(key.startswith(("budget/", "abort/")) for key in row["metrics"])]
    if not seen:
        return []

    def mean(key: str) -> float | None:
        values = [metrics[key] for metrics in seen if key in metrics]
        return fmean(values) if values else None

    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def ratio(over: str, under: str) -> float | None:
        a, b = mean(over), mean(under)
        return None if a is None or not b else a / b

    left, form, budget = ratio("budget/variance", "budget/variance_uniform"), *name.split("@")
    least, most = mean("budget/rollouts_min"), mean("budget/rollouts_max")
    return [
        f"`{form}`",
        budget,
        "" if least is None or most is None else f"{least:.1f} to {most:.1f}",
        text(ratio("budget/spent_tokens", "budget/planned_tokens"), ".2f"),
        text(None if left is None else 1 - left, ".1%"),
        text(mean("budget/bound"), ".1%"),
        text(mean("abort/answered_share"), ".1%"),
        text(mean("abort/given_up_share"), ".1%"),
        text(mean("abort/kept_late_share"), ".1%"),
        text(mean("abort/keep_mean"), ".2f"),
        text(mean("abort/surcharge"), ".2f"),
    ]


def _names(rows: Sequence[Row]) -> list[str]:
    """Cells by budget, GRPO first."""
    forms = ["grpo", "dr_grpo", "dapo", "duet", "allocator", "abort", "both"]

    def place(name: str) -> tuple[float, int, str]:
        form, _, budget = name.partition("@")
        return -float(budget), next((i for i, first in enumerate(forms) if form.startswith(first)), 0), form

    return sorted({row["cell"] for row in rows}, key=place)


def _line(name: str, of: Mapping[int, Row], cells: Mapping[str, Mapping[int, Row]]) -> list[str]:
    form, _, budget = name.partition("@")
    full, same = cells.get(FULL, {}), cells.get(f"grpo@{budget}", {})

    def share(value: Callable[[Row], float]) -> str:
        """Of the runs that came to their end, and whose counterparts did."""
        both = [(of[seed], full[seed]) for seed in of.keys() & full.keys()]
        pairs = [(value(ours), value(theirs)) for ours, theirs in both if _complete(ours) and _complete(theirs)]
        return f"{sum(a for a, _ in pairs) / sum(b for _, b in pairs):.2f}" if pairs else "-"

    rows = list(of.values())
    whole = [row for row in rows if _complete(row)]
    length = f"{sum(row['tokens'] for row in whole) / sum(row['responses'] for row in whole):.0f}" if whole else "-"
    return [
        f"`{form}`",
        budget,
        str(len(rows)),
        str(sum(row["failed"] for row in rows)),
        _mean([row["after"] for row in rows]),
        "" if name == FULL else difference(of, full),
        "" if name == FULL else difference(of, full, by="warm_seed"),
        "" if form == "grpo" else difference(of, same),
        share(lambda row: row["tokens"]),
        share(lambda row: row["responses"]),
        length,
        share(lambda row: row["cpu_s"]),
    ]


def _complete(row: Row) -> bool:
    """Whether its tokens and seconds are those of all RL steps: an error ends a run early."""
    return row.get("error") is None


def difference(ours: Mapping[int, Row], theirs: Mapping[int, Row], by: Literal["seed", "warm_seed"] = "seed") -> str:
    """Of the rewards after RL, over the seeds that both have, with its interval; `by`: what is independent."""
    groups: dict[int, list[float]] = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        groups.setdefault(ours[seed][by], []).append(ours[seed]["after"] - theirs[seed]["after"])
    values = [fmean(of) for of in groups.values()]
    if not values:
        return "-"
    mean = fmean(value for of in groups.values() for value in of)
    if len(values) < 2:
        return f"{mean:+.3f}"
    half = half_width(values)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean of independent values, two at least."""
    freedom = min(len(values) - 1, len(T95))
    return T95[freedom - 1] * stdev(values) / math.sqrt(len(values))


def _mean(values: Sequence[float]) -> str:
    """With its standard error over seeds."""
    if len(values) < 2:
        return f"{fmean(values):.3f}" if values else "-"
    return f"{fmean(values):.3f} +- {stdev(values) / math.sqrt(len(values)):.3f}"


def _wall(rows: Sequence[Row]) -> str:
    """Seconds of RL of the program, and how many times faster than GRPO with the whole budget, and with the same: of
    sums over the seeds that both have, and the least and the most of one seed."""
    cells = {name: {row["seed"]: row for row in rows if row["cell"] == name} for name in _names(rows)}

    def faster(name: str, than: str) -> str:
        ours, theirs = cells[name], cells.get(than, {})
        pairs = [(theirs[seed]["rl_s"], ours[seed]["rl_s"]) for seed in sorted(ours.keys() & theirs.keys())]
        if not pairs:
            return "-"
        ratios = [slow / fast for slow, fast in pairs]
        whole = sum(slow for slow, _ in pairs) / sum(fast for _, fast in pairs)
        return f"{whole:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    lines = [
        [
            f"`{name.partition('@')[0]}`",
            budget := name.partition("@")[2],
            str(len(of)),
            f"{fmean(row['rl_s'] for row in of.values()):.1f}",
            f"{fmean(row['tokens'] for row in of.values()):,.0f}",
            faster(name, FULL),
            faster(name, f"grpo@{budget}"),
        ]
        for name, of in cells.items()
    ]
    return markdown("form | budget | seeds | RL, s | tokens | speed-up over budget 1 | over the same budget", lines)


def _paper() -> str:
    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    lines = [
        [f"`{name.partition('@')[0]}`", name.partition("@")[2] or "-", f"{score:.1f}", times(full), times(same)]
        for name, (score, full, same) in PAPER.items()
    ]
    return "DUET, Tables 1, 2 and 6: Qwen3-1.7B-base on MATH, MATH-500, one seed, best checkpoint.\n\n" + markdown(
        "form | budget | MATH-500 | speed-up over budget 1 | over the same budget", lines
    )


def figure(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Held-out reward over the tokens that RL took, a line per form and a panel per task."""
    panels = []
    for record in records:
        cells: dict[str, list[Row]] = {}
        for row in record["runs"]:
            cells.setdefault(row["cell"], []).append(row)
        lines: dict[str, list[tuple[float, float]]] = {}
        for name in _names(record["runs"]):
            of = cells[name]
            point = fmean(row["tokens"] for row in of) / 1000, fmean(row["after"] for row in of)
            lines.setdefault(name.partition("@")[0], []).append(point)
        panels.append(
            Panel(
                title=record["settings"]["task"],
                lines=[Line(form, sorted(points), ".-") for form, points in lines.items()],
                x_label="thousand tokens of RL",
                y_label="held-out reward",
            )
        )
    draw(path, panels, columns=2)


def into_docs(text: str, made: str) -> str:
    """The page with what stands between its marks replaced."""
    begin, end = "<!-- experiments.token_budget: begin -->\n", "<!-- experiments.token_budget: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{begin.strip()} ... {end} is not on the page")
    return f"{before}{begin}\n{made.strip()}\n\n{end}{after}"


def main(
    *records: Annotated[str, "what experiments.token_budget wrote; default: all of it in results/"],
    out: Path = ROOT / "experiments/results/token_budget.md",
    docs: Annotated[Path, "the page with a marked block for the tables"] = ROOT / "docs/token_budget.md",
) -> None:
    paths = [Path(record) for record in records] or sorted((ROOT / "experiments/results").glob("token_budget_*.json"))
    loaded = [load(path) for path in paths]
    out.write_text(page(loaded), encoding="utf-8")
    figure(out.with_suffix(".svg"), loaded)
    made = "\n\n".join(
        tables(one["settings"]["task"], one["runs"], one["wall"]).replace("## ", "### ") for one in loaded
    )
    docs.write_text(into_docs(docs.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(f"wrote {out}, its figure and the tables of {docs}")


if __name__ == "__main__":
    command(main, timed=False)
