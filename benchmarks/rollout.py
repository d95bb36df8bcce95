"""What speculation gives a rollout, without changing a token: `python -m benchmarks.rollout [--sizes demo 20m] ...`.

Owns `results/rollout.json` and `rollout.svg`. Targets are the demo's model and its function-preserving inflations, in
float32 and bfloat16, in fast mode; requests are the demo's training prompts in groups of 8 at temperature 1 with their
natural lengths. A case is a number of requests submitted together, decoded until the last has ended, for as many waves
(of other prompts) as fill `--seconds`. Repeats are interleaved: off, every contender, off, every contender, ..., off; a
speed-up is the mean time of the two plain runs around a contender's run over its own, and medians are reported. Every
run must draw the tokens of the first.

Drafters know one earlier epoch of the same prompts (other noise), as in RL, and the chooser has decoded
`--learning-runs` runs of this size, well under a second each; "cold" ones know nothing. A "hostile" drafter is wrong at
every token. The bound is that of `tools/bound.py`.
`--base` adds the plain engine of an older checkout, in a process of its own, to the same interleaving. Cases are merged
into the record one by one, so that a run may cover some of them; a record is of one machine.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.tools import rollouts
from benchmarks.tools.base_engine import BaseEngine
from benchmarks.tools.bound import PassCost, bound_s, interpolated
from benchmarks.tools.contenders import FIXED, FIXED_EAGLE, Contender, adaptive, fixed, hostile
from benchmarks.tools.passes import pass_seconds
from benchmarks.tools.rollout_report import merge, plot, table
from benchmarks.tools.rollouts import MEASURED_EPOCH, WARMUP_EPOCH, History, Run, decode, engine_options, waves
from benchmarks.tools.targets import DTYPES, ROOT, SIZES, Target, Task, find_demo, load_target, load_task
from models.checkpoint import save_model
from policies.speculation.policy import FixedPolicy, StrategyPolicy
from policies.speculation.strategy import PLAIN

RESULTS = ROOT / "benchmarks" / "results"
BATCHES = (1, 2, 4, 8, 16, 32, 128)
ALWAYS = 4  # contenders that no time limit leaves out: adaptive, hostile and both cold


class Case:
    """One target at one number of requests: its runs, interleaved."""

    def __init__(self, target: Target, task: Task, history: History, batch: int, options: argparse.Namespace) -> None:
        self.target, self.history, self.batch = target, history, batch
        once = decode(target, waves(task, 1, batch, WARMUP_EPOCH))
        needed = max(options.seconds / once.seconds, options.min_requests / batch)
        self.count = max(1, min(round(needed), len(task.prompts)))
        self.waves = waves(task, self.count, batch, MEASURED_EPOCH)
        self.warmup_waves = waves(task, self.count, batch, WARMUP_EPOCH)
        self.reference = decode(target, self.waves)
        self.engine = engine_options(batch)
        self._policies: dict[str, StrategyPolicy | None] = {}

    def unused_token(self) -> int:
        """A token that no response of the case holds; one past the vocabulary if they hold all."""
        used = {int(token) for tokens in self.reference.responses.values() for token in tokens}
        return next(token for token in range(self.target.model.config.vocab_size + 1) if token not in used)

    def run(self, contender: Contender, warmup: bool = False) -> Run:
        if contender.name not in self._policies or not contender.learns:
            self._policies[contender.name] = contender.policy()
        run = decode(
            self.target,
            self.warmup_waves if warmup else self.waves,
            policy=self._policies[contender.name],
            drafters=contender.drafters(self.engine),
            history=self.history if contender.knows_history else None,
        )
        if not warmup:
            rollouts.require_same(self.reference, run, f"{contender.name} at {self.batch} requests")
        return run

    def off(self, record: bool = True) -> Run:
        """Plain decoding: no drafters, no policy."""
        run = decode(self.target, self.waves, record=record)
        rollouts.require_same(self.reference, run, f"off at {self.batch} requests")
        return run


def measure(
    case: Case,
    contenders: Sequence[Contender],
    pass_cost: PassCost,
    base: BaseEngine | None,
    *,
    repeats: int,
    learning_runs: int,
) -> dict[str, Any]:
    """All runs of a case, as a row of the record."""
    for contender in contenders:
        if contender.learns:
            for _ in range(learning_runs):
                case.run(contender, warmup=True)
    if base is not None:
        base_over_off(case, base)
    off = [case.off()]
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    base_ratios: list[float] = []
    for _ in range(repeats):
        for contender in contenders:
            runs[contender.name].append(case.run(contender))
        if base is not None:
            base_ratios.append(base_over_off(case, base))
        off.append(case.off())
    around_s = [fmean((before.seconds, after.seconds)) for before, after in pairwise(off)]
    found = {name: summary(of, around_s) for name, of in runs.items()}
    steps = [step for of in runs.values() for run in of for step in run.steps]
    off_steps = [step for run in off for step in run.steps]
    off_s = sum(run.seconds for run in off)
    outside_s = off_s - sum(step.elapsed_s for step in off_steps)
    bound = off_s / (bound_s(off_steps, steps, pass_cost) + outside_s)
    row = {
        "target": case.target.size,
        "dtype": case.target.dtype,
        "requests": case.batch,
        "waves": case.count,
        "tokens": case.reference.tokens,
        "mean_response_tokens": round(fmean(map(len, case.reference.responses.values())), 1),
        "load_1min": describe_machine()["load_1min"],
        "off_tokens_per_s": round(case.reference.tokens / median(run.seconds for run in off), 1),
        "off_spread": round(max(r.seconds for r in off) / min(r.seconds for r in off), 3),
        "contenders": found,
        "bound_speedup": round(bound, 3),
        "adaptive_of_bound": round(found["adaptive"]["speedup"] / bound, 3),
    }
    return row if base is None else row | {"off_over_base": round(median(base_ratios), 3)}


def base_over_off(case: Case, base: BaseEngine) -> float:
    """The older engine's seconds over those of ours around it, all unobserved: above 1, ours is the faster."""
    before = case.off(record=False)
    options = {"max_running": case.engine.max_running, "kv_tokens": case.engine.kv_tokens}
    seconds, tokens = base.decode(case.waves, options)
    difference = rollouts.first_difference(case.reference.responses, tokens)
    if difference is not None:
        print(f"  note: the base engine draws other tokens: {difference}", flush=True)
    return seconds / fmean((before.seconds, case.off(record=False).seconds))


def summary(runs: Sequence[Run], around_s: Sequence[float]) -> dict[str, Any]:
    """A contender's repeats."""
    speedups = [off_s / run.seconds for off_s, run in zip(around_s, runs, strict=True)]
    steps = [step for run in runs for step in run.steps]
    speed = rollouts.speed_of(steps, rollouts.is_speculative)
    used = Counter(str(step.strategy) for step in steps)
    return {
        "speedup": round(median(speedups), 3),
        "speedups": [round(value, 3) for value in speedups],
        "tokens_per_s": round(median(run.tokens / run.seconds for run in runs), 1),
        "accept_length": round(speed.accept_length, 2),
        "drafted_per_request_step": round(speed.drafted / max(speed.request_steps, 1), 2),
        "draft_share": round(speed.draft_s / max(speed.elapsed_s, 1e-9), 3),
        "steps": {name: round(count / len(steps), 3) for name, count in used.most_common(8)},
    }


def contenders_for(case: Case, eagle: str | None, options: argparse.Namespace) -> tuple[list[Contender], list[str]]:
    """Those that fit the time of a case, the most telling first; and the names of those that do not."""
    target, token = case.target, case.unused_token()
    free = [
        adaptive(target, eagle=eagle),
        hostile(token),
        adaptive(target, "adaptive, cold", eagle=eagle, cold=True),
        hostile(token, cold=True),
    ]
    plain = Contender("off, policy asked", lambda: FixedPolicy(PLAIN), adaptive(target, eagle=eagle).drafters)
    strategies = [*options.fixed, *(FIXED_EAGLE if eagle is not None else ())]
    everyone = [*free, plain, *(fixed(target, text, eagle) for text in strategies)]
    fitting = int(options.case_seconds / (case.reference.seconds * (options.repeats + 0.5)))
    kept = max(ALWAYS, fitting)
    return everyone[:kept], [contender.name for contender in everyone[kept:]]


def measure_target(
    demo: Path, size: str, dtype: str, task: Task, history: History, options: argparse.Namespace
) -> None:
    """All cases of one target, each written as soon as it is complete."""
    target = load_target(demo, size, dtype)
    eagle = dict(pair.split("=", 1) for pair in options.eagle).get(size)
    base = None
    with tempfile.TemporaryDirectory() as directory:
        if options.base is not None:
            save_model(target.model, Path(directory) / "model")
            python = options.base_python or str(Path(options.base) / ".venv" / "bin" / "python")
            base = BaseEngine(Path(options.base), python, Path(directory) / "model", dtype, options.threads)
        try:
            for batch in options.batches:
                case = Case(target, task, history, batch, options)
                contenders, left_out = contenders_for(case, eagle, options)
                sizes = [2**i for i in range(batch.bit_length())]
                pass_cost = interpolated({size: pass_seconds(target, size) for size in sizes})
                row = measure(
                    case, contenders, pass_cost, base, repeats=options.repeats, learning_runs=options.learning_runs
                )
                row |= {"parameters": target.parameters, "eagle": eagle is not None, "left_out": left_out}
                print(line(row), flush=True)
                merge(Path(options.out), row, machine(options, demo))
        finally:
            if base is not None:
                base.close()


def line(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{name} {found['speedup']:.2f}" for name, found in row["contenders"].items())
    base = f"  off/base {row['off_over_base']:.2f}" if "off_over_base" in row else ""
    return (
        f"{row['target']:>5} {row['dtype']:>8} {row['requests']:4d} requests, off {row['off_tokens_per_s']:8,.0f}/s: "
        f"{speeds}  bound {row['bound_speedup']:.2f}  adaptive/bound {row['adaptive_of_bound']:.2f}{base}"
    )


def machine(options: argparse.Namespace, demo: Path) -> dict[str, Any]:
    """What all cases of a record share."""
    found = describe_machine(("torch", "numpy"))
    del found["load_1min"]  # of each case instead
    trained = "warm start" if demo.parent.name == "warm_starts" else "after RL"
    return found | {"threads": options.threads, "demo": trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="the demo's model directory; default: the newest in runs/")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--fixed", nargs="*", default=list(FIXED), metavar="STRATEGY")
    parser.add_argument("--eagle", action="append", default=[], metavar="SIZE=DIR", help="drafter weights of a size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learning-runs", type=int, default=4, help="runs in which the chooser learns, not counted")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a plain run, at least")
    parser.add_argument("--min-requests", type=int, default=8, help="in a run, at least")
    parser.add_argument("--case-seconds", type=float, default=25.0, help="leave out fixed contenders beyond it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", help="an older checkout, whose plain engine takes part")
    parser.add_argument("--base-python", help="its interpreter; default: BASE/.venv/bin/python")
    parser.add_argument("--out", default=str(RESULTS / "rollout.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    for dtype in options.dtypes:
        history = rollouts.record_history(load_target(demo, "demo", dtype), task)
        for size in options.sizes:
            measure_target(demo, size, dtype, task, history, options)
    record = json.loads(Path(options.out).read_text())
    Path(options.out).with_suffix(".svg").write_text(plot(record))
    print(table(record))


if __name__ == "__main__":
    main()
