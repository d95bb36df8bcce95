"""What 8, 64, 512 and 8,192 GPUs gain from each technique, and what limits them, in the simulator.

    python -m experiments.fleet_sizes [--nodes 1 8 64 1024] [--steps 4]

Two readings of a larger fleet: the work of a step grows with it (8 responses per GPU), or it stays (4,096 responses).
Each technique is taken away from all, and added to none. Virtual time: exact, and the same on every machine. The
scenario is examples/simulate/fleet_sizes.yaml: assumptions, not measurements.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import command, markdown, write
from planner.simulate import load_scenario
from planner.simulate.plot import sweep_svg
from planner.simulate.study import Ablation, ablation, weak

SCENARIO = Path("examples/simulate/fleet_sizes.yaml")
RESULTS = Path("experiments/results")
QUESTION = "what do fleets of each size gain from each technique, and what limits them?"
READINGS = {"weak": "8 responses per GPU", "strong": "4,096 responses in all"}


def studied(reading: str, nodes: int, steps: int) -> Ablation:
    steps = max(steps, min(12, 64 // nodes) if reading == "weak" else 2)  # fewer where a step has many
    scenario = load_scenario(SCENARIO, [f"workload.steps={steps}"])
    if reading == "weak":
        return ablation(weak(scenario, nodes), print)
    return ablation(scenario.but(fleet__nodes=nodes, workload__prompts_per_step=512), print)


def row_of(reading: str, nodes: int, of: Ablation) -> dict[str, Any]:
    return {"reading": reading, "nodes": nodes, "limits": of.limits} | of.as_json()


def _limits(shares: dict[str, float]) -> str:
    """The three largest."""
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest)


def main(
    *,
    nodes: Annotated[Sequence[int], "of eight GPUs"] = (1, 8, 64, 1024),
    steps: Annotated[int, "RL steps of each run, at least; smaller fleets run more"] = 1,
    readings: Annotated[Sequence[str], "weak, strong"] = tuple(READINGS),
    out: Annotated[Path, "records and figures, as NAME_READING"] = RESULTS / "fleet_sizes",
) -> None:
    found: dict[str, list[tuple[str, Ablation]]] = {}
    rows: list[dict[str, Any]] = []
    for reading in readings:
        for count in nodes:
            of = studied(reading, count, steps)
            found.setdefault(reading, []).append((f"{count:,}", of))
            rows.append(row_of(reading, count, of))
            print(reading, count, f"{of.none.step_s:.1f} s -> {of.whole.step_s:.1f} s", flush=True)
    for reading, of_sizes in found.items():
        names = [one.name for one in of_sizes[0][1].techniques]
        head = ["GPUs", "none, s", "all, s", "gain", *names, "limit with none", "limit with all"]
        table = [
            [
                f"{of.whole.gpus:,}",
                f"{of.none.step_s:.1f}",
                f"{of.whole.step_s:.1f}",
                f"{of.none.step_s / of.whole.step_s:.2f}",
                *(f"{one.last:.2f} / {one.first:.2f}" for one in of.techniques),
                _limits(of.none.headroom),
                _limits(of.limits),
            ]
            for _, of in of_sizes
        ]
        print(f"\n{READINGS[reading]}; each technique: beside the others / alone\n{markdown(head, table)}")
    for reading, of_sizes in found.items():
        path = out.with_name(f"{out.name}_{reading}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = [(value, of.whole) for value, of in of_sizes]
        figure = sweep_svg(f"fleet_sizes, {READINGS[reading]}", "fleet.nodes", sizes, of_sizes)
        path.with_suffix(".svg").write_text(figure, encoding="utf-8")
        own = [_without_steps(row) for row in rows if row["reading"] == reading]
        write(path, QUESTION, {"rows": own}, settings={"steps": steps, "reading": READINGS[reading]})


def _without_steps(row: dict[str, Any]) -> dict[str, Any]:
    """Single RL steps are left out of the record."""
    runs = [row["whole"], row["none"], row["fresh"]]
    runs += [one[of] for one in row["techniques"] for of in ("without", "alone")]
    for run in runs:
        if run is not None:
            del run["steps"]
    return row


if __name__ == "__main__":
    command(main, timed=False)
