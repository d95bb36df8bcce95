"""Does a run survive what happens to a fleet? Seeded disturbances of whole runs in every layout, one or two at once.

    PACELINE_FLEET_RUNS=50 PACELINE_SEED=0 python -m pytest -m long tests/fleet/test_fleet_chaos.py

Every run draws a layout and a disturbance, two in a third of them: a node joins; a rollout worker's node, or the
learner's, is lost at once or by its raylet; Ray drains it; its cloud gives notice and takes it soon after; a process of
the learner is killed, one of a worker told to end; the head is lost and comes back. A node that has room for what was
lost joins before. A quarter of the runs train a drafter. Each must be what one process does, with nothing left of it. A
run that was over before its moment came is drawn anew.
"""

import os
import random
from itertools import product
from typing import get_args

import pytest

from launch.local import RunRecord
from tests.fleet.layouts import LAYOUTS, MORE, Act, Case, Deed, Phase, TooLateError, survive_alone
from tests.train.conftest import Runs

RUNS, SEED = int(os.environ.get("PACELINE_FLEET_RUNS", "2")), int(os.environ.get("PACELINE_SEED", "0"))
STEPS = 8  # of twelve: what comes later may come too late
# What is done to which part.
DISTURBANCES: dict[str, tuple[Deed, str]] = {
    "join": ("add", "joiner"),
    "worker_node": ("kill", "rollout"),
    "worker_raylet": ("lose", "rollout"),
    "learner_node": ("kill", "learner"),
    "learner_process": ("kill_process", "learner"),
    "drain": ("drain", "rollout"),
    "notice": ("notice", "rollout"),
    "sigterm": ("terminate_process", "rollout"),
    "head": ("restart_head", ""),
}
NO_NODE = ("join", "learner_process", "sigterm", "head")  # is lost with these
FIXED = ("rollout.workers=2",)
DRAWS = 8  # of a moment that comes before the run is over


def draw(seed: int, index: int, steps: int, attempt: int = 0) -> Case:
    """The index-th case, drawn anew at a further attempt. Pairs of layout and disturbance come in a shuffled order,
    none twice before all have come."""
    pairs = sorted(product(LAYOUTS, DISTURBANCES))
    random.Random(seed).shuffle(pairs)
    layout, first = pairs[index % len(pairs)]
    source = random.Random(f"{seed}/{index}/{attempt}" if attempt else f"{seed}/{index}")
    named = [first]
    if source.random() < 1 / 3 and first != "head":
        named.append(source.choice([name for name in DISTURBANCES if name not in ("head", "join", first)]))
    step, phase = source.randint(1, steps), source.choice(get_args(Phase))
    elastic = "join" in named or source.random() < 0.5
    lost = sum(name not in NO_NODE for name in named)
    rooms = lost + (elastic and lost > 0)  # a third worker takes the first
    acts = [Act(step, phase, "add", f"room-{number}") for number in range(rooms)]
    for name in named:
        deed, part = DISTURBANCES[name]
        acts.append(Act(step, phase, deed, part))
    drafter = f"drafter={{train: {'true' if index % 4 == 0 else 'false'}, while_it_pays: false}}"
    workers = MORE if elastic else FIXED
    return Case(f"{index:02d}-{layout}-{'-and-'.join(named)}", layout, tuple(acts), (*workers, drafter))


def test_no_pair_of_layout_and_disturbance_comes_twice_before_all_have_come() -> None:
    names = [draw(SEED, index, STEPS).name for index in range(len(LAYOUTS) * len(DISTURBANCES))]
    assert len({tuple(name.split("-and-")[0].split("-")[1:]) for name in names}) == len(names)
    assert draw(SEED, 3, STEPS) == draw(SEED, 3, STEPS) != draw(SEED, 3, STEPS, attempt=1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", range(RUNS))
def test_a_disturbed_run_is_the_undisturbed_one(runs: Runs, one_process: RunRecord, index: int) -> None:
    for attempt in range(DRAWS):
        try:
            survive_alone(draw(SEED, index, STEPS, attempt), runs, one_process)
        except TooLateError:
            continue
        return
    pytest.fail(f"no moment was found in {DRAWS} runs")
