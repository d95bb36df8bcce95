"""The record of `benchmarks.rollout`: kept, tabulated, drawn. Measures nothing."""

from pathlib import Path
from typing import Any

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import load, machine, markdown, write

Record = dict[str, Any]
_NOT_FIXED = ("adaptive", "hostile", "off")


def merge(path: Path, row: Record, question: str, settings: Record) -> None:
    """Enter a case in the record at `path`, in place of its older self.

    Raises SystemExit if the record is of another machine or another setting: such figures do not belong together.
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
    """The fixed strategy with the largest speed-up, None if none took part."""
    speedups = {name: found["speedup"] for name, found in case["contenders"].items() if not name.startswith(_NOT_FIXED)}
    return max(speedups.items(), key=lambda item: item[1]) if speedups else None


def table(record: Record) -> str:
    """Markdown: a line per case."""
    head = "target | requests | off tokens/s | adaptive | accept length | bound | adaptive / bound | best fixed | "
    head += "adaptive, cold | hostile | hostile, cold"
    lines = []
    for case in record["cases"]:
        found, best = case["contenders"], best_fixed(case)
        others = (found[name]["speedup"] for name in ("adaptive, cold", "hostile", "hostile, cold"))
        lines.append(
            f"{case['target']} {case['dtype']} | {case['requests']} | {case['off_tokens_per_s']:,.0f} | "
            f"**{found['adaptive']['speedup']:.2f}x** | {found['adaptive']['accept_length']:.2f} | "
            f"{case['bound_speedup']:.2f}x | {case['adaptive_of_bound']:.2f} | "
            f"{f'{best[1]:.2f}x {best[0]}' if best else ''} | {' | '.join(f'{value:.2f}x' for value in others)}"
        )
    return "\n".join([markdown(head, lines), "", *verdicts(record)])


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
    return [
        f"Smallest share of the bound: {of_bound['adaptive_of_bound']:.0%} ({where(of_bound)} requests).",
        f"Slowest against off: {slowest[0]:.2f}x ({slowest[1]}, {slowest[2]} requests).",
    ]


def plot(record: Record, path: Path) -> None:
    """Speed-up over requests, a panel per target and dtype."""
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
        if name not in ("hostile, cold", "off, policy asked"):
            points = [(c["requests"], c["contenders"][name]["speedup"]) for c in cases if name in c["contenders"]]
            lines.append(Line(name, points))
    return lines
