"""Does a run survive what happens to a fleet? Seeded disturbances of whole runs in every layout, one or two at once.

    python -m experiments.fleet_chaos [--runs 50] [--seed 0] [--target MODEL]

Every run draws a layout and a disturbance, two in a third of them: a node joins; a rollout worker's node, or the
learner's, is lost at once or by its raylet; Ray drains it; its cloud gives notice and takes it soon after; a process of
the learner is killed, one of a worker told to end; the head is lost and comes back. A node that has room for what was
lost joins before. A quarter of the runs train a drafter. Each must be what one process does (`experiments.layouts`),
with nothing left of it. Rows are appended to --rows as runs end: the same command goes on where it was stopped.
A run that was over before its moment came is drawn anew. About 30 s per run on two quiet cores. Exit code 1 if one run
is not the same.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

from benchmarks.harness import ROOT, command, write
from benchmarks.tools.targets import find_demo
from experiments.layouts import LAYOUTS, MORE, Act, Case, Deed, Phase, one_process, run_one, tell
from launch.observe.journal import read

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
    step, phase = source.randint(1, steps - 1), source.choice(get_args(Phase))  # in the last it may come too late
    elastic = "join" in named or source.random() < 0.5
    lost = sum(name not in NO_NODE for name in named)
    rooms = lost + (elastic and lost > 0)  # a third worker takes the first
    acts = [Act(step, phase, "add", f"room-{number}") for number in range(rooms)]
    for name in named:
        deed, part = DISTURBANCES[name]
        acts.append(Act(step, phase, deed, part))
    drafter = f"drafter.train={'true' if index % 4 == 0 else 'false'}"
    workers = MORE if elastic else FIXED
    return Case(f"{index:02d}-{layout}-{'-and-'.join(named)}", layout, tuple(acts), (*workers, drafter))


def main(
    *overrides: Annotated[str, "of the configuration, for all runs"],
    runs: int = 50,
    seed: int = 0,
    steps: int = 4,
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None,
    folder: Annotated[Path, "its runs"] = ROOT / "runs/fleet_chaos",
    rows: Annotated[Path | None, "one line per run; default: in the folder"] = None,
    only: Annotated[Sequence[int], "these runs; default: all that are missing"] = (),
    out: Path = ROOT / "experiments/results/fleet_chaos.json",
) -> int:
    folder, model = folder.resolve(), find_demo(target).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    journal = rows or folder / f"rows-{seed}.jsonl"
    done: dict[int, dict[str, Any]] = {int(row["index"]): row for row in read(journal)}
    record = one_process(folder, model, steps, overrides)
    for index in only or [index for index in range(runs) if index not in done]:
        for attempt in range(DRAWS):
            case = draw(seed, index, steps, attempt)
            case = Case(case.name, case.layout, case.acts, (*case.overrides, *overrides))
            row = {"index": index, "attempt": attempt, **run_one(case, record, folder, model, steps)}
            if not row["too_late"]:
                break
        done[index] = row
        with journal.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        tell(row)
    good = sum(row["identical"] and not row["left"] for row in done.values())
    kinds = Counter(act.split()[0] for row in done.values() for act in row["acts"])
    found = {
        "runs": len(done),
        "identical_and_nothing_left": good,
        "deeds": dict(sorted(kinds.items())),
        "rows": [done[index] for index in sorted(done)],
    }
    settings = {"steps": steps, "seed": seed}
    write(out, "does a run survive what happens to a fleet?", found, settings=settings)
    print(f"{good} of {len(done)} identical, nothing left")
    return 0 if good == len(done) else 1


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
