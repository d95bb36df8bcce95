"""A day of a spot fleet in the simulator: 64 workers, one interruption every ten minutes, how much of it is work?

    python -m experiments.spot_day [--hours 24] [--cases node]

Four cases: an interruption takes a node of eight workers, or one worker; with EC2's two minutes of notice, or without.
Virtual time: exact, and the same on every machine. The scenario is examples/simulate/spot_day.yaml, which states every
assumed time; `ettr` and `goodput` are defined in planner/simulate/outcome.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import command, markdown, write
from planner.simulate import load_scenario, simulate

SCENARIO = Path("examples/simulate/spot_day.yaml")
RESULTS = Path("experiments/results")
CASES = {
    "node": ["spot.takes=node"],
    "worker": ["spot.takes=worker"],
    "node, no notice": ["spot.takes=node", "spot.notice_s=0"],
    "worker, no notice": ["spot.takes=worker", "spot.notice_s=0"],
}
_COLUMNS = ("ettr", "goodput", "interruptions", "moved", "learner_failures", "down_s", "again_s", "held_s")


CALM = "undisturbed"


def measured(hours: float, case: str, calm_tokens_s: float = 0.0) -> dict[str, Any]:
    """`calm_tokens_s`: of a day without interruptions; 0.0: this is it."""
    off = ["spot.every_s=null", "learning.failures_per_day=0"]
    scenario = load_scenario(SCENARIO, [*CASES.get(case, off), f"workload.hours={hours:g}"])
    found = simulate(scenario).as_json()
    steps = found.pop("steps")
    goodput = found["tokens_s"] / calm_tokens_s if calm_tokens_s else None
    return {"case": case, "rl_steps": len(steps)} | found | {"goodput": goodput}


def main(
    *,
    hours: Annotated[float, "of cluster time"] = 24.0,
    cases: Annotated[Sequence[str], "default: all"] = (),
    out: Path = RESULTS / "spot_day.json",
) -> None:
    calm = measured(hours, CALM)
    rows = [calm, *(measured(hours, case, calm["tokens_s"]) for case in cases or CASES)]
    print(
        markdown(
            ["case", "RL steps", *_COLUMNS],
            [[r["case"], r["rl_steps"], *(_short(r[c]) for c in _COLUMNS)] for r in rows],
        )
    )
    given = load_scenario(SCENARIO)
    settings = {"hours": hours, "spot": given.spot.model_dump(), "learning": given.learning.model_dump()}
    write(
        out,
        "64 workers, an interruption every ten minutes: what share of a day is work?",
        {"cases": rows},
        settings=settings,
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if 0 < value < 2 else f"{value:,.0f}"


if __name__ == "__main__":
    command(main, timed=False)
