"""The record of `benchmarks.rollout_vllm` as tables, and whether its targets are met. Measures nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import markdown

OF_BOUND, AT_FEW, FEW, NEVER_BELOW = 0.90, 1.3, 4, 0.97
TARGETS = {
    "best_built_in": ">= best built-in",
    "bound": f">= {OF_BOUND:.2f} of the bound",
    "few": f">= {AT_FEW} x plain at 1 to {FEW}",
    "plain": f"never < {NEVER_BELOW} x plain, warm and cold",
}
Row = Mapping[str, Any]


def verdicts(row: Row) -> dict[str, bool | None]:
    """Return verdicts by the names of TARGETS, for Paceline on vLLM, warm unless stated otherwise. None: the target
    does not apply to this case."""
    speed = row["contenders"]["paceline"]["speedup"]
    lowest = min(speed, row["contenders"]["paceline, cold"]["speedup"])
    return {
        "best_built_in": speed >= row["best_built_in"]["speedup"],
        "bound": speed >= OF_BOUND * row["bound_speedup"],
        "few": speed >= AT_FEW if row["requests"] <= FEW else None,
        "plain": lowest >= NEVER_BELOW,
    }


def table(record: Row) -> str:
    """Render Markdown: speeds, then targets, then a step's time by part."""
    cases: Sequence[Row] = record["cases"]
    return "\n".join([_speeds(cases), "", _targets(cases), "", *_notes(cases), "", _parts(cases)])


def _speeds(cases: Sequence[Row]) -> str:
    head = "target | requests | plain tokens/s | best built-in | Paceline on vLLM | cold | / best built-in | bound | "
    head += "/ bound | native | native, cold"
    lines = []
    for row in cases:
        found, best, bound = row["contenders"], row["best_built_in"], row["bound_speedup"]
        speed = {name: of["speedup"] for name, of in found.items()}
        lines.append(
            f"{row['target']} {row['dtype']} | {row['requests']} | {row['plain_tokens_per_s']:,.0f} | "
            f"{best['speedup']:.2f}x {best['name']} | **{speed['paceline']:.2f}x** | {speed['paceline, cold']:.2f}x | "
            f"{speed['paceline'] / best['speedup']:.2f} | {bound:.2f}x | {speed['paceline'] / bound:.2f} | "
            f"{speed['native']:.2f}x | {speed['native, cold']:.2f}x"
        )
    return markdown(head, lines)


def _targets(cases: Sequence[Row]) -> str:
    said = {True: "yes", False: "**no**", None: "-"}
    head = ["target", "requests", *TARGETS.values()]
    return markdown(
        head,
        [
            [f"{row['target']} {row['dtype']}", row["requests"], *(said[row["targets"][name]] for name in TARGETS)]
            for row in cases
        ],
    )


def _notes(cases: Sequence[Row]) -> list[str]:
    notes = dict.fromkeys(f"- missing: `{name}`, {why}" for row in cases for name, why in row["missing"].items())
    cut = dict.fromkeys(
        f"- {row['target']} at {row['requests']}: responses are cut at {row['longest']} tokens"
        for row in cases
        if row["longest"] < 200
    )
    past = [row["past_end"] for row in cases]
    return [*notes, *cut, f"- behind a natural end: {min(past):.0%} to {max(past):.0%} of the tokens, by case"]


def _parts(cases: Sequence[Row]) -> str:
    """Render microseconds per step: of every target its fewest and its most requests."""
    chosen = [row for row in cases if row["requests"] in _ends([of for of in cases if of["target"] == row["target"]])]
    columns = [(row, kind) for row in chosen for kind in row["step_us"]]
    names = dict.fromkeys(name for row, kind in columns for name in row["step_us"][kind])
    head = ["us per step, median", *(f"{row['target']} {row['requests']} {kind}" for row, kind in columns)]
    lines = [
        [name, *(f"{us:,.0f}" if (us := row["step_us"][kind].get(name)) is not None else "" for row, kind in columns)]
        for name in sorted(names, key=lambda name: (name == "step", name))
    ]
    return markdown(head, lines)


def _ends(cases: Sequence[Row]) -> set[int]:
    return {min(row["requests"] for row in cases), max(row["requests"] for row in cases)}
