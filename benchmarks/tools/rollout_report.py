"""The record of `benchmarks.rollout`: storage, table and figure. Measures nothing."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import load, machine, markdown, write

Record = dict[str, Any]
_NOT_FIXED = ("adaptive", "cold", "hostile", "off")
_CHOOSING = ("cold", "cold, no history", "cold, uncalibrated", "hostile", "hostile, cold")
LEAST_COLD, LEAST_OF_OFF = 0.90, 0.97  # the goals


def merge(path: Path, row: Record, question: str, settings: Record) -> None:
    """Enter a case in the record at `path`, replacing its old entry.

    Raises SystemExit if the record is of another machine or setting, since such figures are not comparable.
    """
    here = {name: machine()[name] for name in ("cpu", "cores", "python", "versions")} | settings
    cases: list[Record] = []
    if path.is_file():
        record = load(path)
        there = record["machine"] | record.get("settings", {})
        if differing := sorted(key for key in here if there.get(key) != here[key]):
            raise SystemExit(
                f"{path} differs from this run in {', '.join(differing)}: give another --out, or remove it"
            )
        cases = record["cases"]
    merged = {_key(case): case for case in cases} | {_key(row): row}
    write(path, question, {"cases": [merged[key] for key in sorted(merged)]}, settings=settings)


def _key(case: Record) -> tuple[int, str, int]:
    return case["parameters"], case["dtype"], case["requests"]


def best_fixed(case: Record) -> tuple[str, float] | None:
    """Return the fixed strategy with the largest speed-up; None if there was none."""
    speedups = {name: found["speedup"] for name, found in case["contenders"].items() if not name.startswith(_NOT_FIXED)}
    return max(speedups.items(), key=lambda item: item[1]) if speedups else None


def table(record: Record, before: Record | None = None) -> str:
    """Render Markdown: a line per case. `before`: an older checkout's record, for its adaptive column."""
    older = {_key(case): case["contenders"]["adaptive"]["speedup"] for case in (before or {"cases": []})["cases"]}
    head = "target | requests | off tokens/s | adaptive | accept length | bound | adaptive / bound | best fixed | "
    head += "cold / adaptive, first 2 s | " + " | ".join(_CHOOSING) + (" | adaptive before" if older else "")
    lines = []
    for case in record["cases"]:
        found, best = case["contenders"], best_fixed(case)
        first = f"{case['first']['cold_of_adaptive']:.2f}" if "first" in case else ""
        cells = [
            f"{case['target']} {case['dtype']}",
            case["requests"],
            f"{case['off_tokens_per_s']:,.0f}",
            f"**{found['adaptive']['speedup']:.2f}x**",
            f"{found['adaptive']['accept_length']:.2f}",
            f"{case['bound_speedup']:.2f}x",
            f"{case['adaptive_of_bound']:.2f}",
            f"{best[1]:.2f}x {best[0]}" if best else "",
            first,
            *(f"{found[name]['speedup']:.2f}x" if name in found else "" for name in _CHOOSING),
        ]
        lines.append(cells + ([f"{older[_key(case)]:.2f}x" if _key(case) in older else ""] if older else []))
    return "\n".join([markdown(head, lines), "", *verdicts(record, older)])


def verdicts(record: Record, older: Mapping[tuple[int, str, int], float]) -> list[str]:
    """Return the figures of the goals, over all cases of the record. older: the earlier speed-up of adaptive."""
    cases = record["cases"]

    def where(case: Record) -> str:
        return f"{case['target']} {case['dtype']} at {case['requests']}"

    of_bound = min(cases, key=lambda case: case["adaptive_of_bound"])
    found = [f"Smallest share of the bound: {of_bound['adaptive_of_bound']:.0%} ({where(of_bound)} requests)."]
    if first := [(case["first"]["cold_of_adaptive"], where(case)) for case in cases if "first" in case]:
        found.append(
            f"Cold over adaptive in the first seconds: at least {LEAST_COLD:.2f} in "
            f"{sum(share >= LEAST_COLD for share, _ in first)} of {len(first)} cases; smallest: {min(first)[0]:.2f} "
            f"({min(first)[1]} requests)."
        )
    for name in ("adaptive", *_CHOOSING):
        if of := [(case["contenders"][name]["speedup"], where(case)) for case in cases if name in case["contenders"]]:
            found.append(
                f"{name[0].upper()}{name[1:]} against off: at least {LEAST_OF_OFF:.2f}x in "
                f"{sum(speedup >= LEAST_OF_OFF for speedup, _ in of)} of {len(of)} cases; slowest: {min(of)[0]:.2f}x "
                f"({min(of)[1]} requests)."
            )
    both = [
        (case["contenders"]["adaptive"]["speedup"] / older[_key(case)], where(case))
        for case in cases
        if _key(case) in older
    ]
    if both:
        found.append(
            f"Adaptive over what it was before: at least {LEAST_OF_OFF:.2f} in "
            f"{sum(ratio >= LEAST_OF_OFF for ratio, _ in both)} of {len(both)} cases; smallest {min(both)[0]:.2f} "
            f"({min(both)[1]} requests), median {median(ratio for ratio, _ in both):.2f}."
        )
    return [f"- {line}" for line in found]


def plot(record: Record, path: Path) -> None:
    """Draw speed-up over requests, a panel per target and dtype."""
    cases: dict[str, list[Record]] = {}
    for case in record["cases"]:
        cases.setdefault(f"{case['target']} {case['dtype']}", []).append(case)
    panels = [
        Panel(title=title, lines=_lines(of), x_label="requests", y_label="speed-up over off", levels=(1,), log_x=True)
        for title, of in cases.items()
    ]
    draw(path, panels, columns=min(3, len(panels)))


def _lines(cases: list[Record]) -> list[Line]:
    lines = [Line("bound", [(case["requests"], case["bound_speedup"]) for case in cases], "--")]
    for name in dict.fromkeys(name for case in cases for name in case["contenders"]):
        if name not in ("hostile, cold", "cold, uncalibrated", "off, policy asked"):
            points = [(c["requests"], c["contenders"][name]["speedup"]) for c in cases if name in c["contenders"]]
            lines.append(Line(name, points))
    return lines
