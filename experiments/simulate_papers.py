"""The simulator's error against three papers' figures, in their set-ups.

    python -m experiments.simulate_papers [--sweep FILE] [--sensitivity]

Scenarios are experiments/simulated/*.yaml. Every input is the papers' if they state it, and a named assumption
otherwise. They were committed before the first run, and are not changed to match. `--sensitivity` changes one
assumption at a time in some cells. Virtual time: the same on every machine; about two minutes on one core.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.harness import ROOT, command, markdown, write
from config.strategy import PLAIN, Strategy
from launch.config.issues import ConfigError
from planner.simulate import load_scenario, simulate
from planner.simulate.acceptance import AcceptanceState
from planner.simulate.costs import costs_of
from planner.simulate.outcome import Outcome
from planner.simulate.scenario import Scenario, with_values

SCENARIOS = ROOT / "experiments/simulated"
OUT = ROOT / "experiments/results/simulate_papers.json"
SWEEP = ROOT.parent / "shared/data/a100_decode_sweep_qwen2.5_7b.csv"
QUESTION = "how far is the simulator from what TLT, DAS and EfficientRollout report?"
Values = Mapping[str, Any]
# x: times faster than the base; cut: share of the base saved; s: seconds; oom: refused for memory; tokens/s.
Unit = Literal["step x", "rollout x", "step cut", "rollout cut", "step s", "rollout s", "oom", "tokens/s", "decode x"]
OFF: Values = {"speculation.mode": "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One figure of a paper. `paper`: its value, or the ends of its range (the second infinite for "more than")."""

    claim: str
    case: str
    file: str
    unit: Unit
    paper: tuple[float, float]
    common: Values = field(default_factory=dict)
    base: Values = field(default_factory=lambda: OFF)
    method: Values = field(default_factory=dict)
    strategies: tuple[str, ...] = ()  # tokens/s and decode x: the best of these, for `batch` requests; empty: plain
    batch: int = 1


def _tlt() -> Iterator[Cell]:
    tp = {"Qwen2.5-7B": 2, "Qwen2.5-32B": 4, "Llama-3.3-70B": 8}

    def of(model: str, nodes: int) -> dict[str, Any]:
        return {"model": model, "fleet.nodes": nodes, "fleet.gpus_per_worker": tp[model]}

    for nodes, paper in ((1, 1.21), (2, 1.45), (4, 1.62), (8, 1.76)):
        yield Cell(
            claim="TLT Table 3",
            case=f"7B, {nodes} nodes",
            file="tlt",
            unit="step x",
            paper=(paper, paper),
            common=of("Qwen2.5-7B", nodes),
        )
    for nodes in (1, 2):
        yield Cell(
            claim="TLT Table 3",
            case=f"32B, {nodes} nodes",
            file="tlt",
            unit="oom",
            paper=(1, 1),
            common=of("Qwen2.5-32B", nodes),
        )
    for nodes, paper in ((4, 1.83), (8, 2.12)):
        yield Cell(
            claim="TLT Table 3",
            case=f"32B, {nodes} nodes",
            file="tlt",
            unit="step x",
            paper=(paper, paper),
            common=of("Qwen2.5-32B", nodes),
        )
    for model in tp:
        for device in ("H100", "A100"):
            yield Cell(
                claim="TLT Figure 11",
                case=f"{model}, 64 {device}",
                file="tlt",
                unit="step x",
                paper=(1.7, 2.1),
                common=of(model, 8) | {"fleet.device": device},
            )
    alone = {"fleet.nodes": 1, "fleet.gpus_per_node": 4, "workload.prompts_per_step": 8, "learning.tokens_s": 1e12}
    yield Cell(
        claim="TLT Figure 14",
        case="32B, TP 4, 128 requests",
        file="tlt",
        unit="rollout x",
        paper=(2.44, 2.44),
        common=of("Qwen2.5-32B", 1) | alone,
    )
    # Basis: single passes. 1,024 tokens of context are assumed.
    trees = ("eagle:10x8/64", "eagle:10x8/48", "eagle:10x8/32", "eagle:10x8/16")
    for device, plain, drafting in (("H100", 164.65, 430.24), ("A100", 92.83, 259.01), ("RTX4090", 65.28, 187.44)):
        common = {"fleet.device": device, "fleet.gpus_per_worker": 1}
        for strategies, paper in (((), plain), (trees, drafting)):
            yield Cell(
                claim="TLT Table 2",
                case=f"7B, {device}, one request, {'drafts' if strategies else 'plain'}",
                file="tlt",
                unit="tokens/s",
                paper=(paper, paper),
                common=common,
                strategies=strategies,
            )
    for strategies, paper in (((), 242.11), (trees, 542.12)):
        yield Cell(
            claim="TLT Table 7",
            case=f"7B, TP 2, one request, {'drafts' if strategies else 'plain'}",
            file="tlt",
            unit="tokens/s",
            paper=(paper, paper),
            strategies=strategies,
        )
    greedy = of("Qwen2.5-32B", 4) | {"speculation.acceptance.eagle.per_token": 0.8046}  # 8.67 at depth 12, Table 1
    for batch, paper in ((1, 3.62), (2, 3.39), (4, 3.13), (8, 2.73), (16, 2.67), (32, 2.48)):
        yield Cell(
            claim="TLT Table 4",
            case=f"32B, TP 4, {batch} requests, greedy, best of its row",
            file="tlt",
            unit="decode x",
            paper=(paper, paper),
            common=greedy,
            strategies=trees,
            batch=batch,
        )


def _das() -> Iterator[Cell]:
    unlimited = {"speculation.mode": "static", "speculation.strategies": ["suffix:32"]}
    more = float("inf")
    math = {
        "model": "Qwen2.5-7B",
        "fleet.nodes": 1,
        "workload.prompts_per_step": 128,
        "workload.rollouts_per_prompt": 16,
    }
    for claim, case, paper, common, base in (
        ("DAS Figure 10", "7B, MATH, 2,048 responses on 8 GPUs", (0.5, more), math, OFF),
        ("DAS Figure 11", "8B, code, 16K", (0.25, 0.25), {}, OFF),
        ("DAS Figure 12", "8B, code, 16K, beside an unlimited budget", (0.15, 0.15), {}, unlimited),
        ("DAS Figure 13", "8B, code, 8K", (0.3, more), {"lengths.max_tokens": 8192}, OFF),
        ("DAS Figure 13", "8B, code, half the batch", (0.25, 0.3), {"workload.prompts_per_step": 16}, OFF),
    ):
        yield Cell(claim=claim, case=case, file="das", unit="rollout cut", paper=paper, common=common, base=base)


def _efficient_rollout(sweep: Path) -> Iterator[Cell]:
    """Yield rows of Table 2: seconds of veRL (AR), and the methods' changes."""
    swept = {"costs.source": "sweep", "costs.file": str(sweep), "costs.model": "Qwen2.5-7B"}
    #        model, costs, median, rest of a step, (rollout, step) of AR, then of each method: drafts, acceptance,
    #        preparation, cut of the rollout, of the step
    always, toggled = "static", "roofline"
    small = (
        ("quantised self-SD", always, "self:7", 0.982, 1.3, 0.082, 0.037),
        ("EfficientRollout", toggled, "", 0.982, 1.3, 0.196, 0.127),
    )
    learned = ("learned auxiliary", always, "eagle:3", 0.573, 2.2, 0.006, 0.004)
    for name, model, costs, median, rest, rollout_s, step_s, methods in (
        ("7B, sweep", "Qwen2.5-7B", swept, 570, 50.2, 82.4, 132.6, small),
        ("7B, roofline", "Qwen2.5-7B", {}, 570, 50.2, 82.4, 132.6, (*small, learned)),
        (
            "14B, roofline",
            "Qwen2.5-14B",
            {},
            535,
            94.5,
            126.6,
            221.1,
            (
                ("quantised self-SD", always, "self:5", 0.973, 2.6, -0.067, -0.019),
                ("EfficientRollout", toggled, "", 0.976, 2.6, 0.168, 0.108),
                ("learned auxiliary", always, "eagle:3", 0.603, 2.1, 0.089, 0.033),
            ),
        ),
        (
            "8B (Llama), roofline",
            "Llama-3.1-8B",
            {},
            556,
            60.5,
            126.4,
            186.9,
            (
                ("quantised self-SD", always, "self:5", 0.963, 1.4, 0.059, 0.047),
                ("EfficientRollout", toggled, "", 0.958, 1.4, 0.107, 0.079),
                ("learned auxiliary", always, "eagle:3", 0.543, 2.6, -0.367, -0.256),
            ),
        ),
    ):
        common = {"model": model, "lengths.median": median, "learning.overhead_s": rest, **costs}
        for unit, paper in (("rollout s", rollout_s), ("step s", step_s)):
            yield Cell(
                claim="EfficientRollout Table 2",
                case=f"{name}: veRL (AR)",
                file="efficient_rollout",
                unit=unit,  # type: ignore[arg-type]
                paper=(paper, paper),
                common=common,
            )
        for method, mode, strategy, accepts, prepares_s, rollout_cut, step_cut in methods:
            values: dict[str, Any] = {"speculation.mode": mode, "learning.overhead_s": rest + prepares_s}
            if strategy:
                values["speculation.strategies"] = [strategy]
            values[f"speculation.acceptance.{strategy.partition(':')[0] or 'self'}.per_token"] = accepts
            for unit, cut in (("rollout cut", rollout_cut), ("step cut", step_cut)):
                yield Cell(
                    claim="EfficientRollout Table 2",
                    case=f"{name}: {method}",
                    file="efficient_rollout",
                    unit=unit,  # type: ignore[arg-type]
                    paper=(cut, cut),
                    common=common,
                    method=values,
                )


def cells(sweep: Path = SWEEP) -> list[Cell]:
    return [*_tlt(), *_das(), *_efficient_rollout(sweep)]


# One assumption at a time, in the most informative cells; chosen after the first figures, and changing none of them.
_TREES = ["eagle:10x8/64", "eagle:10x8/48", "eagle:10x8/32", "eagle:10x8/16", "eagle:10x8/12"]
CHANGES: dict[str, dict[str, Values]] = {
    "tlt": {
        "half as long (median 2,000)": {"lengths.median": 2000},
        "nothing runs to the limit": {"lengths.runaway": 0.0},
        "half the responses": {"workload.rollouts_per_prompt": 8},
        "accept length 8.67": {"speculation.acceptance.eagle.per_token": 0.8046},
        "MFU 0.2": {"learning.mfu": 0.2},
        "a tree of 12 tokens too (our chooser: no more above 8 requests)": {"speculation.strategies": _TREES},
        "that, and 4.5 ms more per step that drafts (Table 7)": {
            "speculation.strategies": _TREES,
            "costs.drafting_s": 0.0045,
        },
        "both, and half the responses": {
            "speculation.strategies": _TREES,
            "costs.drafting_s": 0.0045,
            "workload.rollouts_per_prompt": 8,
        },
    },
    "das": {
        "half as long (median 2,000)": {"lengths.median": 2000},
        "acceptance as of GSM8K (1.08 per step)": {
            "speculation.acceptance.suffix.per_token": 0.7201,
            "speculation.acceptance.suffix.speaks": 0.4525,
        },
        "half of 1.08 per step": {
            "speculation.acceptance.suffix.per_token": 0.7201,
            "speculation.acceptance.suffix.speaks": 0.2262,
        },
        "4 ms more per step that drafts": {"costs.drafting_s": 0.004},
    },
    "efficient_rollout": {
        "nothing runs to the limit": {"lengths.runaway": 0.0},
        "sigma 0.8": {"lengths.sigma": 0.8},
        "3.8 ms more per step that drafts (Table 6: vLLM's verification)": {"costs.drafting_s": 0.0038},
        "3.7 ms more per engine step (Table 6: Llama in vLLM)": {"costs.step_s": 0.0037},
    },
}
TELLING = {
    "7B, 1 nodes",
    "7B, 8 nodes",
    "32B, 8 nodes",
    "32B, TP 4, 128 requests",
    "8B, code, 16K",
    "8B, code, 16K, beside an unlimited budget",
    "7B, sweep: quantised self-SD",
    "7B, sweep: EfficientRollout",
    "8B (Llama), roofline: veRL (AR)",
    "8B (Llama), roofline: learned auxiliary",
}  # cases


def scenario_of_cell(cell: Cell, values: Values) -> Scenario:
    scenario = load_scenario(SCENARIOS / f"{cell.file}.yaml")
    return with_values(scenario, {**cell.common, **values})


class Simulations:
    """Runs each scenario once."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}

    def of(self, scenario: Scenario) -> Outcome:
        key = scenario.model_dump_json()
        if key not in self._known:
            self._known[key] = simulate(scenario)
        return self._known[key]


def measured(cell: Cell, runs: Simulations, change: Values) -> float:
    """Return the cell's figure in the simulator. Raises ConfigError if the scenario is refused."""
    if cell.unit in ("tokens/s", "decode x"):
        return _decoding(cell, change)
    if cell.unit == "oom":
        try:
            runs.of(scenario_of_cell(cell, change))
        except ConfigError:
            return 1.0
        return 0.0
    method = runs.of(scenario_of_cell(cell, {**cell.method, **change}))
    if cell.unit in ("rollout s", "step s"):
        method = runs.of(scenario_of_cell(cell, {**cell.base, **change}))
        return method.rollout_s if cell.unit == "rollout s" else method.step_s
    base = runs.of(scenario_of_cell(cell, {**change, **cell.base}))
    before, after = (
        (base.rollout_s, method.rollout_s) if cell.unit.startswith("rollout") else (base.step_s, method.step_s)
    )
    return before / after if cell.unit.endswith(" x") else 1 - after / before


def _decoding(cell: Cell, change: Values, context: int = 1024) -> float:
    """Return tokens per second of single passes, or their ratio to plain decoding."""
    scenario = scenario_of_cell(cell, change)
    costs, of = costs_of(scenario), scenario.speculation
    state = AcceptanceState(of.acceptance, of.training)

    def rate(strategy: Strategy) -> float:
        batch = cell.batch
        rows = round(batch * (1 + state.drafted(strategy)))
        seconds = costs.step_s(batch, rows, batch * context) + costs.draft_s(strategy, batch, batch * context)
        return batch * (1 + state.accepted(strategy)) / seconds

    best = max((rate(Strategy.parse(text)) for text in cell.strategies), default=rate(PLAIN))
    return best / rate(PLAIN) if cell.unit == "decode x" else best


def error_of(cell: Cell, ours: float) -> float:
    """Return the relative error to the nearer end of the paper's range; for savings, in points of the base."""
    low, high = cell.paper
    nearest = min(max(ours, low), high)
    return ours - nearest if cell.unit.endswith("cut") else ours / nearest - 1


def _text(unit: Unit, value: float) -> str:
    if unit == "oom":
        return "OOM" if value else "fits"
    if unit.endswith("cut"):
        return f"{value:.1%}"
    return f"{value:.2f}x" if unit.endswith("x") else f"{value:.1f}"


def _paper(cell: Cell) -> str:
    low, high = cell.paper
    if low == high:
        return _text(cell.unit, low)
    return (
        f"> {_text(cell.unit, low)}" if high == float("inf") else f"{_text(cell.unit, low)} to {_text(cell.unit, high)}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "figure | case | what | paper | simulated | error"
    return markdown(head, [[row[key] for key in ("claim", "case", "unit", "paper", "ours", "error")] for row in rows])


def main(
    *,
    sweep: Annotated[Path, "EfficientRollout's published sweep of an A100"] = SWEEP,
    sensitivity: Annotated[bool, "change one assumption at a time where the error is large"] = False,
    out: Annotated[Path, "record, and a table beside it"] = OUT,
) -> None:
    if not sweep.is_file():
        sys.exit(f"{sweep} is not here: give --sweep FILE, the CSV of EfficientRollout's A100 sweep")
    runs, rows, told = Simulations(), [], []
    for cell in cells(sweep):
        row: dict[str, Any] = {"claim": cell.claim, "case": cell.case, "unit": cell.unit, "paper": _paper(cell)}
        try:
            value = measured(cell, runs, {})
        except ConfigError as refusal:
            row |= {"ours": "refused", "error": "-", "why": str(refusal)}
        else:
            error = error_of(cell, value)
            points = cell.unit.endswith("cut")
            shown = f"{100 * error:+.1f} points" if points else f"{error:+.0%}"
            row |= {"ours": _text(cell.unit, value), "error": shown if cell.unit != "oom" else "", "value": value}
        if cell.case in TELLING and not (cell.file == "efficient_rollout" and cell.unit.startswith("step")):
            told.append(cell)
        rows.append(row)
        print(" | ".join(str(row[key]) for key in ("claim", "case", "unit", "paper", "ours", "error")), flush=True)
    changes = [one for cell in told for one in _changed(cell, runs)] if sensitivity else []
    text = table(rows)
    if changes:
        text += "\n\nOne assumption at a time:\n\n" + markdown(
            "figure | case | assumption | paper | simulated",
            [[row[key] for key in ("claim", "case", "change", "paper", "ours")] for row in changes],
        )
    out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    inputs = {file: inputs_of(file) for file in sorted({cell.file for cell in cells(sweep)})}
    write(out, QUESTION, {"rows": rows, "changes": changes, "inputs": inputs}, settings={"sweep": sweep.name})


def inputs_of(file: str) -> dict[str, Any]:
    """Return a scenario as it was read."""
    return load_scenario(SCENARIOS / f"{file}.yaml").model_dump(mode="json")


def _changed(cell: Cell, runs: Simulations) -> Iterator[dict[str, Any]]:
    for change, values in CHANGES[cell.file].items():
        try:
            ours = _text(cell.unit, measured(cell, runs, values))
        except ConfigError:
            ours = "refused"
        yield {"claim": cell.claim, "case": cell.case, "change": change, "paper": _paper(cell), "ours": ours}


if __name__ == "__main__":
    command(main, timed=False)
