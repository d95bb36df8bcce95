"""Is a run the same when ranks of its learner are killed? In an update, a hand-over of weights, a checkpoint, an
evaluation, a rollout or the export, once or twice in a run.

    PACELINE_LEARNER_RUNS=15 PACELINE_SEED=0 python -m pytest -m long tests/train/test_learner_loss.py

In one process, at any call: test_failover.py. One rank of two in a step and a checkpoint:
tests/learner/test_failover_ray.py. Here a rank may end anywhere in the program; a moment that comes too late, when the
job is over, hits nothing.
"""

import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pytest

from benchmarks.same_losses import first_difference
from benchmarks.tools.turns import processes_of
from launch.observe import now
from tests.train.conftest import SHARP, Runs
from tests.train.test_resume import start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

RUNS, SEED = int(os.environ.get("PACELINE_LEARNER_RUNS", "1")), int(os.environ.get("PACELINE_SEED", "0"))
STEPS = 5
Phase = Literal["rollout", "learn", "publish", "checkpoint", "eval", "export"]
PHASES: tuple[Phase, ...] = get_args(Phase)
COMMON = (SHARP, f"run.steps={STEPS}", "eval.every=2")
VARIANTS: dict[str, tuple[str, ...]] = {
    "reference": (  # two ranks, KL in the reward, a schedule, weights broadcast in pieces
        *("learner.ranks=2", "checkpoint.every=3", "objective.kl=k3", "objective.kl_in=reward"),
        *("objective.kl_coef=0.05", "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=3"),
        "cluster.weights=broadcast",
    ),
    "one-rank": (
        "checkpoint.every=2",
        "drafter.recording.source=learner",
        "drafter.train=true",
        "drafter.while_it_pays=false",
    ),
    "two-ranks": ("learner.ranks=2", "checkpoint.every=0"),  # every loss repeats the updates from the first weights
    "low-bit": ("checkpoint.every=2", "rollout.quantization=w8a8"),
}
LENGTH_S = {"rollout": 0.4, "learn": 0.4, "publish": 0.1, "checkpoint": 0.1, "eval": 0.3, "export": 0.1}


@dataclass(frozen=True, slots=True)
class Blow:
    """After `delay_s` in the phase of RL step `step`, or the first one of its kind afterwards."""

    step: int
    phase: Phase
    delay_s: float


def drawn(seed: int, steps: int) -> list[Blow]:
    source = random.Random(seed)
    blows = []
    for _ in range(source.choice((1, 1, 2))):
        phase = source.choice(PHASES)
        blows.append(Blow(source.randint(1, steps), phase, round(source.uniform(0, LENGTH_S[phase]), 3)))
    return sorted(blows, key=lambda blow: (blow.step, PHASES.index(blow.phase)))


def strike(process: "subprocess.Popen[bytes]", run: Path, blow: Blow, source: random.Random) -> bool:
    """Kill one rank then; whether there was one."""
    in_step = ("rollout", "learn")
    while True:
        if process.poll() is not None:
            return False
        at = now.read(run)
        begun = at is not None and at.step >= blow.step - (blow.phase in in_step)
        if at is not None and begun and at.phase == blow.phase:
            break
        time.sleep(0.01)
    time.sleep(blow.delay_s)
    found = processes_of("learner")
    if process.poll() is not None or not found:
        return False
    source.choice(found).send_signal(signal.SIGKILL)
    return True


def test_blows_are_seeded_and_come_in_order() -> None:
    for seed in range(50):
        blows = drawn(seed, STEPS)
        assert blows == drawn(seed, STEPS)
        assert [blow.step for blow in blows] == sorted(blow.step for blow in blows)
        assert all(1 <= blow.step <= STEPS and 0 <= blow.delay_s <= LENGTH_S[blow.phase] for blow in blows)
    assert {blow.phase for seed in range(50) for blow in drawn(seed, STEPS)} == set(PHASES)


@pytest.mark.long
@pytest.mark.parametrize("index", range(RUNS))
def test_a_run_whose_ranks_are_killed_is_the_undisturbed_one(runs: Runs, ray_head: str, index: int) -> None:
    variant, number = [*VARIANTS][index % len(VARIANTS)], 1000 * SEED + index
    settings, whole = (*COMMON, *VARIANTS[variant]), f"unstruck-{variant}"
    if not (runs.root / whole).exists():
        runs.run(whole, *settings)
    name, source = f"struck-{index}", random.Random(number)
    process = start(runs, ray_head, name, *settings)
    hit = [blow for blow in drawn(number, STEPS) if strike(process, runs.root / name, blow, source)]
    assert process.wait(300) == 0, (runs.root / f"{name}.log").read_text()[-2000:]
    assert first_difference(runs.root / whole, runs.root / name) is None, hit
