"""The record of `benchmarks.rollout`: kept, tabulated, drawn. Measures nothing."""

import json
from pathlib import Path
from typing import Any

from benchmarks.tools.svg import Line, Panel, chart

Record = dict[str, Any]
_NOT_FIXED = ("adaptive", "hostile", "off")


def merge(path: Path, row: Record, machine: Record) -> None:
    """Enter a case in the record at `path`, in place of its older self.

    Raises SystemExit if the record is of another machine or another setting: such figures do not belong together.
    """
    record: Record = {"machine": machine, "cases": []}
    if path.is_file():
        record = json.loads(path.read_text())
        if record["machine"] != machine:
            differing = sorted(key for key in machine if record["machine"].get(key) != machine[key])
            raise SystemExit(
                f"{path} differs from this run in {', '.join(differing)}: give another --out, or remove it"
            )
    cases = {_key(case): case for case in record["cases"]} | {_key(row): row}
    record["cases"] = [cases[key] for key in sorted(cases)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _key(case: Record) -> tuple[int, str, int]:
    return case["parameters"], case["dtype"], case["requests"]


def best_fixed(case: Record) -> tuple[str, float] | None:
    """The fixed strategy with the largest speed-up, None if none took part."""
    speedups = {name: found["speedup"] for name, found in case["contenders"].items() if not name.startswith(_NOT_FIXED)}
    return max(speedups.items(), key=lambda item: item[1]) if speedups else None


def table(record: Record) -> str:
    """Markdown: a line per case."""
    head = (
        "target",
        "requests",
        "off tokens/s",
        "adaptive",
        "accept length",
        "bound",
        "adaptive / bound",
        "best fixed",
        "adaptive, cold",
        "hostile",
        "hostile, cold",
        "off / before",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for case in record["cases"]:
        found, best = case["contenders"], best_fixed(case)
        cells = [
            f"{case['target']} {case['dtype']}",
            str(case["requests"]),
            f"{case['off_tokens_per_s']:,.0f}",
            f"**{found['adaptive']['speedup']:.2f}x**",
            f"{found['adaptive']['accept_length']:.2f}",
            f"{case['bound_speedup']:.2f}x",
            f"{case['adaptive_of_bound']:.2f}",
            f"{best[1]:.2f}x {best[0]}" if best else "",
            *(
                f"{found[name]['speedup']:.2f}x" if name in found else ""
                for name in ("adaptive, cold", "hostile", "hostile, cold")
            ),
            f"{case['off_over_base']:.2f}" if "off_over_base" in case else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *verdicts(record)])


def verdicts(record: Record) -> list[str]:
    """The figures that the goals are about, over all cases of the record."""
    cases = record["cases"]

    def where(case: Record) -> str:
        return f"{case['target']} {case['dtype']} at {case['requests']}"

    of_bound = min(cases, key=lambda case: case["adaptive_of_bound"])
    slowest = min(
        (found["speedup"], name, where(case))
        for case in cases
        for name, found in case["contenders"].items()
        if name.startswith(("adaptive", "hostile"))
    )
    lines = [
        f"Smallest share of the bound: {of_bound['adaptive_of_bound']:.0%} ({where(of_bound)} requests).",
        f"Slowest against off: {slowest[0]:.2f}x ({slowest[1]}, {slowest[2]} requests).",
    ]
    based = [case for case in cases if "off_over_base" in case]
    if based:
        worst = min(based, key=lambda case: case["off_over_base"])
        lines.append(f"Slowest off against the engine before: {worst['off_over_base']:.2f}x ({where(worst)} requests).")
    return lines


def plot(record: Record) -> str:
    """SVG: speed-up over requests, a panel per target and dtype."""
    panels: dict[str, list[Record]] = {}
    for case in record["cases"]:
        panels.setdefault(f"{case['target']} {case['dtype']}", []).append(case)
    return chart(
        [Panel(title, _lines(cases)) for title, cases in panels.items()],
        x_label="requests",
        y_label="speed-up over off",
        level=1.0,
    )


def _lines(cases: list[Record]) -> list[Line]:
    lines = [
        Line("adaptive", [(case["requests"], case["contenders"]["adaptive"]["speedup"]) for case in cases]),
        Line("bound", [(case["requests"], case["bound_speedup"]) for case in cases], dashed=True),
    ]
    names = dict.fromkeys(name for case in cases for name in case["contenders"])
    for name in names:
        if name not in ("adaptive", "hostile, cold", "off, policy asked"):
            points = [(c["requests"], c["contenders"][name]["speedup"]) for c in cases if name in c["contenders"]]
            lines.append(Line(name, points))
    return lines
