"""What stop rules cost an engine step: rollouts of the demo with rules that end nothing, beside rollouts without.

    python -m benchmarks.stop_rules [--batches 1 16 64]

Owns `results/stop_rules.json` and `stop_rules.md`. Tokens are the same in every run, so are the steps; what is paired
is the time of a whole rollout, in turns. Rules:

asleep   an answer marker that counts from a number of tokens on that no response reaches: what abort costs before it
awake    a stop string and an answer marker, both read at every token: the most that a rule can cost

`alone` is the call that hears the rules by itself, over as many requests that all gained a token: a difference of a
thousandth is within the noise of whole rollouts. Its share is of a step of the rollouts without rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch

from actors.data import load_tokenizer
from actors.data.stop_strings import stop_strings
from actors.engine.batch.plan import StepPlan
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Settled
from actors.engine.batch.stops import RuleStops
from benchmarks.harness import RESULTS, command, in_turns, markdown, paired, write
from benchmarks.tools import rollouts
from benchmarks.tools.targets import Target, Task, find_demo, load_target, load_task
from contracts.rollout import Request, StopRule

NEVER = "\u0007 no response says this"
CALLS = 4000


def rules_of(demo: Path) -> dict[str, StopRule | None]:
    marker = stop_strings([NEVER], load_tokenizer(str(demo)))
    never = rollouts.MAX_NEW_TOKENS + 1
    return {
        "no rule": None,
        "asleep": StopRule(answer=marker, poll_from_tokens=never),
        "awake": StopRule(strings=marker, answer=marker),
    }


def measure(
    target: Target, task: Task, rules: Mapping[str, StopRule | None], batch: int, seconds: float, repeats: int
) -> dict[str, Any]:
    """One number of requests that run together."""
    number = 1
    while (plain := run(target, task, number, batch, None)).seconds < seconds:
        number *= 2

    def contestant(name: str) -> Any:
        def decode() -> None:
            found = run(target, task, number, batch, rules[name])
            assert all(np.array_equal(tokens, plain.responses[i]) for i, tokens in found.responses.items()), name
            seconds_of[name].append(found.seconds)

        return decode

    seconds_of: dict[str, list[float]] = {name: [] for name in rules}
    in_turns({name: contestant(name) for name in rules}, repeats)
    steps = len(rollouts.decode(target, waves(task, number, batch, None)).steps)
    step_us = 1e6 * median(seconds_of["no rule"][1:]) / steps
    row: dict[str, Any] = {"requests": batch, "steps": steps, "step_us": round(step_us, 1)}
    for name, rule in rules.items():
        alone_us = 1e6 * alone_s(rule, batch)
        row[name] = {
            "alone_us": round(alone_us, 3),
            "share": round(alone_us / step_us, 5),
            "seconds": [round(s, 5) for s in seconds_of[name][1:]],
        }
        if rule is not None:
            row[name]["ratio"] = paired(seconds_of[name][1:], seconds_of["no rule"][1:])
    return row


def waves(task: Task, number: int, batch: int, rule: StopRule | None) -> list[list[Request]]:
    found = rollouts.waves(task, number, batch, rollouts.MEASURED_EPOCH)
    return [[replace(request, stop=rule) for request in wave] for wave in found]


def run(target: Target, task: Task, number: int, batch: int, rule: StopRule | None) -> rollouts.Run:
    return rollouts.decode(target, waves(task, number, batch, rule), record=False)


def alone_s(rule: StopRule | None, batch: int) -> float:
    """Seconds of `RuleStops.apply` where `batch` requests gained a token each."""
    table = SlotTable(batch, CALLS + 8, 1)
    stops = RuleStops(table, 4096)
    for slot in range(batch):
        table.prompt_length[slot] = table.length[slot] = 4
        table.rules[slot] = rule
        stops.begin(slot, None)
    slots = np.arange(batch)
    plan = StepPlan(slots, np.ones(batch, np.int64), np.ones(batch, np.bool_))
    settled = Settled(new_tokens=batch, ended=[], due=[])

    def without() -> float:
        table.length[:] = 4
        start_s = perf_counter()
        for _ in range(CALLS):
            table.length += 1
        return perf_counter() - start_s

    def with_rules() -> float:
        table.length[:] = 4
        start_s = perf_counter()
        for _ in range(CALLS):
            table.length += 1
            stops.apply(plan, settled)
        return perf_counter() - start_s

    found = []
    for _ in range(5):
        for slot in range(batch):
            stops.end(slot, False)
            stops.begin(slot, None)
        found.append((with_rules() - without()) / CALLS)
    return median(found)


def table(record: dict[str, Any]) -> str:
    lines = []
    for row in record["cases"]:
        for name in ("asleep", "awake"):
            found = row[name]
            span = found["ratio"]
            ratio = f"{span['median']:.4f} [{span['low']:.4f}, {span['high']:.4f}]"
            alone = f"{found['alone_us']:.2f} us ({found['share']:.2%})"
            lines.append([row["requests"], f"{row['step_us']:.0f} us", name, alone, ratio])
    return markdown("requests | a step | rule | alone (share of a step) | time of a rollout / without", lines) + "\n"


def main(
    *,
    target: Annotated[Path | None, "a model of the demo; default: the newest in runs/"] = None,
    batches: Annotated[Sequence[int], "requests that run together"] = (1, 16, 64),
    seconds: Annotated[float, "of a run, at least"] = 0.4,
    repeats: int = 15,
    threads: int = 1,
    out: Path = RESULTS / "stop_rules.json",
) -> None:
    torch.set_num_threads(threads)
    demo = find_demo(target)
    model, task, rules = load_target(demo, "demo", "float32"), load_task(demo), rules_of(demo)
    cases = []
    for batch in batches:
        cases.append(row := measure(model, task, rules, batch, seconds, repeats))
        print(batch, row["step_us"], {name: row[name]["share"] for name in ("asleep", "awake")}, flush=True)
    settings = {"threads": threads, "seconds": seconds, "repeats": repeats}
    write(out, "what stop rules cost an engine step", {"cases": cases}, settings=settings)
    out.with_suffix(".md").write_text(text := table({"cases": cases}))
    print(text)


if __name__ == "__main__":
    command(main)
