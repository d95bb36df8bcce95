"""What a token budget costs the driver in each RL step: `python -m experiments.planner_overhead`.

TokenBudget.plan, observe and state_dict alone (the state is taken in every step, for whoever interrupts it), with a
budget and with a budget and an abort, over groups like the demo's in four epochs' worth of prompts. Beside it the time
that a step would have to take for all three to be 0.3 % of it. Nothing is sampled.

Owns `results/planner_overhead.json`.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.data import Prompt
from actors.rewards import Grade
from benchmarks.harness import DEMO, ROOT, command, markdown, write
from contracts.rollout import FinishReason, Rollout, Sampled
from launch.batch import Pick
from launch.config import load_config
from launch.run.groups import Graded, Group
from launch.run.inputs import load_inputs
from launch.run.token_budget import TokenBudget

SHARE = 0.003  # of an RL step, at most
BUDGET = ("rollout.budget.share=1.0", "objective.name=duet")
FORMS = {"budget": BUDGET, "budget and abort": (*BUDGET, "rollout.abort.enabled=true")}
OUT = ROOT / "experiments/results/planner_overhead.json"


def prompt_of(prompt_id: int) -> Prompt:
    return Prompt(prompt_id=prompt_id, uid="", text="", tokens=np.zeros(1, np.int32), record={})


def group_of(pick: Pick, count: int, rng: np.random.Generator) -> Group:
    """Rewards and lengths drawn."""
    members = []
    for size, solved in zip(rng.integers(20, 200, count).tolist(), rng.random(count) < 0.5, strict=True):
        sampled = Sampled(np.zeros(size, np.int32), np.zeros(size, np.float32))
        rollout = Rollout(
            request_id=0,
            sampled=sampled,
            finish_reason=FinishReason.STOP,
            weights_version=0,
            started_s=0.0,
            finished_s=0.0,
        )
        members.append(Graded(rollout=rollout, grade=Grade(value=float(solved)), text=""))
    return Group(pick, members)


def measure(form: str, prompts: int, steps: int) -> dict[str, Any]:
    """Milliseconds of an RL step: the median of `steps` after two epochs of four steps."""
    config = load_config(DEMO / "config.yaml", FORMS[form]).config
    budget = TokenBudget(config, None, load_inputs(config).answer)
    rng = np.random.default_rng(0)
    planned, observed, kept = [], [], []
    for step in range(8 + steps):
        picks = [Pick(0, prompt_of(step % 4 * prompts + i)) for i in range(prompts)]
        start_s = time.perf_counter()
        plan = budget.plan(picks)
        planned.append(time.perf_counter() - start_s)
        groups = [group_of(pick, count, rng) for pick, count in zip(picks, plan.counts, strict=True)]
        start_s = time.perf_counter()
        budget.observe(groups)
        observed.append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        budget.state_dict()
        kept.append(time.perf_counter() - start_s)
    plan_ms, observe_ms, state_ms = (1000 * float(np.median(times[8:])) for times in (planned, observed, kept))
    return {
        "form": form,
        "prompts": prompts,
        "responses": prompts * 8,
        "plan_ms": round(plan_ms, 3),
        "observe_ms": round(observe_ms, 3),
        "state_ms": round(state_ms, 3),
        "step_s": round((plan_ms + observe_ms + state_ms) / 1000 / SHARE, 3),
    }


def main(steps: int = 40, prompts: Sequence[int] = (16, 128, 1024), out: Path = OUT) -> None:
    rows = [measure(form, count, steps) for form in FORMS for count in prompts]
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    write(out, "what a token budget costs the driver in each RL step", {"rows": rows}, settings={"steps": steps})


if __name__ == "__main__":
    command(main)
