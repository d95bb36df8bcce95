"""What switching speculation on and off costs: `python -m experiments.switching [--strategies suffix:4 ngram:4]`.

Owns `results/switching.json`. One run decodes the demo's requests while a policy switches between plain decoding and a
strategy every few engine steps, at least `--switches` times. It must draw the tokens of plain decoding and prefill no
more prompt tokens. The cost of a switch is the time of the first step behind it less the median of the other steps of
the same kind with as many running requests and drafted rows in the same run: what drafters catch up with falls there.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from actors.engine.batch.telemetry import EngineStepRecord
from benchmarks.harness import ROOT, command, write
from benchmarks.tools import rollouts
from benchmarks.tools.contenders import fixed
from benchmarks.tools.rollouts import MEASURED_EPOCH, decode, engine_options, wave
from benchmarks.tools.targets import DTYPES, SIZES, Target, Task, find_demo, load_target, load_task
from config.strategy import PLAIN, Strategy
from policies.speculation.policy import FixedPolicy
from policies.steps import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sizes: Annotated[Sequence[str], "of the target", SIZES] = ("demo", "20m")
    dtypes: Annotated[Sequence[str], "of the target", DTYPES] = ("float32",)
    strategies: Sequence[str] = ("suffix:4", "ngram:4", "suffix:4x2/8")
    eagle: Annotated[Sequence[str], "SIZE=DIR: drafter weights of a size"] = ()
    switches: Annotated[int, "at least"] = 1000
    every_steps: int = 3
    running: int = 8
    threads: int = 2
    out: Path = ROOT / "experiments/results/switching.json"


class SwitchingPolicy(FixedPolicy):
    """`strategy` for some steps, plain decoding for as many, and so on; counts its switches."""

    def __init__(self, strategy: Strategy, every_steps: int) -> None:
        super().__init__(strategy)
        self._every, self._steps, self.switches = every_steps, 0, 0

    def choose(self, load: Load) -> Strategy:
        on = (self._steps // self._every) % 2 == 1
        self.switches += self._steps > 0 and self._steps % self._every == 0
        self._steps += 1
        return super().choose(load) if on else PLAIN


def switch_costs(steps: Sequence[EngineStepRecord]) -> dict[str, list[float]]:
    """Seconds that the first steps behind a switch ("on", "off") took beyond their like; pure.

    Steps with prompt chunks are no steps of either kind, nor is one behind such a step a switch.
    """
    alike: dict[tuple[bool, int, int], list[float]] = defaultdict(list)
    first: list[tuple[bool, int, int, float]] = []
    for before, step in zip([None, *steps], steps, strict=False):
        if step.prefill_tokens:
            continue
        on = step.strategy.depth > 0
        key = (on, step.running, step.drafted)
        switched = before is not None and not before.prefill_tokens and (before.strategy.depth > 0) != on
        if switched:
            first.append((*key, step.elapsed_s))
        else:
            alike[key].append(step.elapsed_s)
    costs: dict[str, list[float]] = {"on": [], "off": []}
    for on, running, drafted, elapsed_s in first:
        others = alike.get((on, running, drafted), [])
        if len(others) >= 3:
            costs["on" if on else "off"].append(elapsed_s - median(others))
    return costs


def measure(target: Target, task: Task, strategy: str, eagle: str | None, options: Options) -> dict[str, Any]:
    """One switching run, between two plain ones."""
    requests = [request for i in range(len(task.prompts)) for request in wave(task, i, rollouts.GROUP, MEASURED_EPOCH)]
    running = options.running
    contender = fixed(target, strategy, eagle)
    before = decode(target, [requests], running=running)
    policy = SwitchingPolicy(Strategy.parse(strategy), options.every_steps)
    run = decode(
        target, [requests], running=running, policy=policy, drafters=contender.drafters(engine_options(running))
    )
    after = decode(target, [requests], running=running)
    rollouts.require_same(before, run, f"{strategy} with {policy.switches} switches")
    if policy.switches < options.switches:
        raise SystemExit(f"only {policy.switches} switches: lower --every-steps or --running")
    prefilled = [sum(step.prefill_tokens for step in of.steps) for of in (before, run)]
    if prefilled[0] != prefilled[1]:
        raise SystemExit(f"{strategy}: {prefilled[1]} prompt tokens were prefilled, {prefilled[0]} without switching")
    costs = switch_costs(run.steps)
    plain_step_s = median(step.elapsed_s for step in (*before.steps, *after.steps) if not step.prefill_tokens)
    return {
        "target": target.size,
        "dtype": target.dtype,
        "strategy": strategy,
        "running": running,
        "requests": len(requests),
        "tokens": run.tokens,
        "switches": policy.switches,
        "every_steps": options.every_steps,
        "same_tokens": True,
        "prefill_tokens": prefilled[1],
        "prefill_tokens_plain": prefilled[0],
        "plain_step_us": round(plain_step_s * 1e6, 1),
        **{f"switch_{kind}_us": round(median(found) * 1e6, 1) for kind, found in costs.items() if found},
        **{f"switch_{kind}_measured": len(found) for kind, found in costs.items()},
    }


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    eagles = dict(pair.split("=", 1) for pair in options.eagle)
    rows = []
    for size, dtype in ((size, dtype) for dtype in options.dtypes for size in options.sizes):
        target = load_target(demo, size, dtype)
        eagle = eagles.get(size)
        for strategy in [*options.strategies, *(["eagle:4", "eagle:4x2/8"] if eagle is not None else [])]:
            rows.append(measure(target, task, strategy, eagle, options))
            print(json.dumps(rows[-1]), flush=True)
    settings = {"threads": options.threads, "seed": rollouts.SEED}
    write(options.out, "what do switches of speculation cost?", {"rows": rows}, settings=settings)


if __name__ == "__main__":
    main(command(Options))
