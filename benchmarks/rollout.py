"""The gain of speculation in a rollout, with unchanged tokens: `python -m benchmarks.rollout [--sizes demo 20m] ...`.

Owns `results/rollout.json` and `rollout.svg`. Targets are the demo's model and its function-preserving inflations, in
float32 and bfloat16, in fast mode. Requests are the demo's training prompts in groups of 8 at temperature 1 with their
natural lengths. A case is a number of requests submitted together and decoded until the last has ended, for as many
waves (of other prompts) as fill `--seconds`. Repeats are interleaved: off, every contender, off, every contender, ...,
off. A speed-up is the mean time of the two plain runs around a contender's run over its own; medians are reported.
Every run must draw the tokens of the first.

adaptive             drafters know one earlier epoch of the same prompts (other noise), as in RL, and the chooser has
                     decoded `--learning-runs` runs of this size
cold                 the same drafters, a fresh chooser with a calibration: a worker that has just started
cold, no history     a fresh chooser and drafters that know nothing: the first RL step, with a calibration
cold, uncalibrated   the first RL step of a user who never ran `paceline calibrate`
hostile              drafters that are wrong at every token; "cold": a fresh chooser that trusts them

The self-drafter is available unless other drafters are given. Its copy of the target, made once per RL step, is made
before a run's time begins; its seconds are reported separately (`prep_s`).

`first`: adaptive and cold decode on to `--first-seconds` of engine time. The work is the tokens that adaptive has
written by then. The comparison is each one's time for that many tokens, from its first step on.

The bound is that of `tools/bound.py`: no contender of the case can exceed it. Cases are merged into the record one by
one, so a run may cover only some of them; a record is of one machine. `--before`: the record of an older checkout on
this machine, whose adaptive column is shown too.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch

from benchmarks.harness import RESULTS, command, interval, load
from benchmarks.tools import rollouts
from benchmarks.tools.bound import bound_s
from benchmarks.tools.calibrated import calibrate
from benchmarks.tools.contenders import FIXED, FIXED_EAGLE, Contender, adaptive, fixed, hostile
from benchmarks.tools.rollout_report import merge, plot, table
from benchmarks.tools.rollouts import MEASURED_EPOCH, WARMUP_EPOCH, History, Run, decode, engine_options, waves
from benchmarks.tools.targets import DTYPES, SIZES, Target, Task, find_demo, load_target, load_task
from config.strategy import PLAIN
from policies.calibration.document import Calibration
from policies.speculation.policy import FixedPolicy, StrategyPolicy

ALWAYS = 6  # contenders that no time limit leaves out
PAUSE_S = 0.02  # between runs, so that the last one's background work ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sizes: Annotated[Sequence[str], "of the target", SIZES] = SIZES
    dtypes: Annotated[Sequence[str], "of the target", DTYPES] = DTYPES
    batches: Annotated[Sequence[int], "requests submitted together"] = (1, 2, 4, 8, 16, 32, 128)
    fixed: Annotated[Sequence[str], "strategies"] = FIXED
    eagle: Annotated[Sequence[str], "SIZE=DIR: drafter weights of a size"] = ()
    repeats: int = 3
    learning_runs: Annotated[int, "runs in which the chooser learns, not counted"] = 4
    seconds: Annotated[float, "of a plain run, at least"] = 0.4
    min_requests: Annotated[int, "in a run, at least"] = 8
    case_seconds: Annotated[float, "leave out fixed contenders beyond it"] = 12.0
    first_seconds: Annotated[float, "in which cold is compared with adaptive; 0: not at all"] = 2.0
    first_repeats: int = 2
    calibration_seconds: Annotated[float, "of every target"] = 10.0
    threads: int = 2
    before: Annotated[Path | None, "an older checkout's record, for a column beside ours"] = None
    out: Path = RESULTS / "rollout.json"


class Case:
    """One target at one number of requests: its runs, interleaved."""

    def __init__(
        self,
        target: Target,
        task: Task,
        history: History,
        batch: int,
        options: Options,
        calibration: Calibration | None = None,
    ) -> None:
        """calibration: of choosers that start with one."""
        self.target, self.history, self.batch, self._task = target, history, batch, task
        self.calibration = calibration
        once = decode(target, waves(task, 1, batch, WARMUP_EPOCH))
        needed = max(options.seconds / once.seconds, options.min_requests / batch)
        self.count = max(1, min(round(needed), len(task.prompts)))
        self.waves = waves(task, self.count, batch, MEASURED_EPOCH)
        self.warmup_waves = waves(task, self.count, batch, WARMUP_EPOCH)
        self.reference = decode(target, self.waves)
        self.engine = engine_options(batch)
        self._policies: dict[str, StrategyPolicy | None] = {}

    def unused_token(self) -> int:
        """Return a token that no response of the case contains; one past the vocabulary if they contain all."""
        used = {int(token) for tokens in self.reference.responses.values() for token in tokens}
        return next(token for token in range(self.target.model.config.vocab_size + 1) if token not in used)

    def run(self, contender: Contender, warmup: bool = False) -> Run:
        run = self._decode(contender, self.warmup_waves if warmup else self.waves)
        if not warmup:
            rollouts.require_same(self.reference, run, f"{contender.name} at {self.batch} requests")
        return run

    def off(self) -> Run:
        """Run plain decoding: no drafters, no policy."""
        time.sleep(PAUSE_S)
        run = decode(self.target, self.waves)
        rollouts.require_same(self.reference, run, f"off at {self.batch} requests")
        return run

    def long_pair(self, first: Contender, second: Contender, count: int) -> tuple[Run, Run]:
        """Run both on the same `count` waves, one after the other."""
        together = waves(self._task, count, self.batch, MEASURED_EPOCH)
        runs = self._decode(first, together), self._decode(second, together)
        rollouts.require_same(*runs, f"{second.name} at {self.batch} requests, {count} waves")
        return runs

    def _decode(self, contender: Contender, together: Sequence[Sequence[Any]]) -> Run:
        if contender.name not in self._policies or not contender.learns:
            self._policies[contender.name] = contender.policy()
        time.sleep(PAUSE_S)
        return decode(
            self.target,
            together,
            policy=self._policies[contender.name],
            drafters=contender.drafters(self.engine),
            history=self.history if contender.knows_history else None,
        )


def measure(case: Case, contenders: Sequence[Contender], *, repeats: int, learning_runs: int) -> dict[str, Any]:
    """Do all runs of a case. Returns a row of the record."""
    for contender in contenders:
        if contender.learns:
            for _ in range(learning_runs):
                case.run(contender, warmup=True)
    off = [case.off()]
    turns: list[dict[str, Run]] = []
    for _ in range(repeats):
        turns.append({contender.name: case.run(contender) for contender in contenders})
        off.append(case.off())
    around_s = [fmean((before.seconds, after.seconds)) for before, after in pairwise(off)]
    found = {of.name: summary([turn[of.name] for turn in turns], around_s) for of in contenders}
    bounds = [
        bound_s([(run.seconds, run.steps) for run in (*turn.values(), *plain)])
        for turn, plain in zip(turns, pairwise(off), strict=True)
    ]
    of_bound = [bound / turn["adaptive"].seconds for bound, turn in zip(bounds, turns, strict=True)]
    return {
        "target": case.target.size,
        "dtype": case.target.dtype,
        "requests": case.batch,
        "waves": case.count,
        "tokens": case.reference.tokens,
        "mean_response_tokens": round(fmean(map(len, case.reference.responses.values())), 1),
        "off_tokens_per_s": round(case.reference.tokens / median(run.seconds for run in off), 1),
        "off_spread": round(max(r.seconds for r in off) / min(r.seconds for r in off), 3),
        "contenders": found,
        "bound_speedup": round(median(at / bound for at, bound in zip(around_s, bounds, strict=True)), 3),
        "adaptive_of_bound": round(median(of_bound), 3),
    }


def summary(runs: Sequence[Run], around_s: Sequence[float]) -> dict[str, Any]:
    """Summarise a contender's repeats."""
    speedups = [off_s / run.seconds for off_s, run in zip(around_s, runs, strict=True)]
    steps = [step for run in runs for step in run.steps]
    speed = rollouts.speed_of(steps, rollouts.is_speculative)
    used = Counter(str(step.strategy) for step in steps)
    return {
        "speedup": round(median(speedups), 3),
        "seconds": round(median(run.seconds for run in runs), 4),
        "prep_s": round(median(run.prep_s for run in runs), 5),
        "speedups": [round(value, 3) for value in speedups],
        "interval": interval(speedups),
        "tokens_per_s": round(median(run.tokens / run.seconds for run in runs), 1),
        "accept_length": round(speed.accept_length, 2),
        "drafted_per_request_step": round(speed.drafted / max(speed.request_steps, 1), 2),
        "draft_share": round(speed.draft_s / max(speed.elapsed_s, 1e-9), 3),
        "steps": {name: round(count / len(steps), 3) for name, count in used.most_common(8)},
    }


def measure_first(case: Case, warm: Contender, cold: Contender, seconds: float, repeats: int) -> dict[str, Any]:
    """Measure the two in their first `seconds`; `warm` has learnt already. See the module docstring."""
    usual = case.run(warm)
    count = max(1, ceil(1.1 * seconds / usual.seconds * case.count))
    shares, compared = [], []
    for turn in range(repeats):
        pair = (warm, cold) if turn % 2 == 0 else (cold, warm)
        runs = dict(zip(pair, case.long_pair(*pair, count), strict=True))
        share, warm_s = share_of_first(runs[warm], runs[cold], seconds)
        shares.append(share)
        compared.append(warm_s)
    return {
        "cold_of_adaptive": round(median(shares), 3),
        "shares": [round(value, 3) for value in shares],
        "seconds": round(median(compared), 2),
    }


def share_of_first(warm: Run, cold: Run, seconds: float) -> tuple[float, float]:
    """Return (speed of `cold` relative to `warm` for the tokens that `warm` writes in its first `seconds`, time of
    `cold`)."""
    tokens = 0
    for step in warm.steps:
        tokens += step.emitted
        warm_s = step.at_s + step.elapsed_s - warm.steps[0].at_s
        if warm_s >= seconds:
            break
    written = 0
    for step in cold.steps:
        written += step.emitted
        if written >= tokens:
            break
    cold_s = step.at_s + step.elapsed_s - cold.steps[0].at_s
    return warm_s / cold_s, warm_s


def contenders_for(case: Case, eagle: str | None, options: Options) -> tuple[list[Contender], list[str]]:
    """Return the contenders that fit the time of a case, the most informative first, and the names of the others."""
    target, token, known = case.target, case.unused_token(), case.calibration
    free = [
        adaptive(target, calibration=known, eagle=eagle),
        hostile(token, calibration=known),
        adaptive(target, "cold", calibration=known, eagle=eagle, learnt=False),
        adaptive(target, "cold, no history", calibration=known, eagle=eagle, history=False, learnt=False),
        adaptive(target, "cold, uncalibrated", eagle=eagle, history=False, learnt=False),
        hostile(token, calibration=known, learnt=False),
    ]
    plain = Contender("off, policy asked", lambda: FixedPolicy(PLAIN), adaptive(target, eagle=eagle).drafters)
    strategies = [*options.fixed, *(FIXED_EAGLE if eagle is not None else ())]
    everyone = [*free, *(fixed(target, text, eagle) for text in strategies), plain]
    fitting = int(options.case_seconds / (case.reference.seconds * (options.repeats + 0.5)))
    kept = max(ALWAYS, fitting)
    return everyone[:kept], [contender.name for contender in everyone[kept:]]


def measure_target(demo: Path, size: str, dtype: str, task: Task, history: History, options: Options) -> None:
    """Measure all cases of one target, writing each as soon as it is complete."""
    target = load_target(demo, size, dtype)
    eagle = dict(pair.split("=", 1) for pair in options.eagle).get(size)
    trained = "warm start" if demo.parent.name == "warm_starts" else "after RL"
    begin_s = time.monotonic()
    calibration = calibrate(target, max(options.batches), options.calibration_seconds)
    print(f"{target.name}: calibrated in {time.monotonic() - begin_s:.0f} s", flush=True)
    for batch in options.batches:
        begin_s = time.monotonic()
        case = Case(target, task, history, batch, options, calibration)
        contenders, left_out = contenders_for(case, eagle, options)
        row = measure(case, contenders, repeats=options.repeats, learning_runs=options.learning_runs)
        if options.first_seconds:
            warm, cold = (next(of for of in contenders if of.name == name) for name in ("adaptive", "cold"))
            row["first"] = measure_first(case, warm, cold, options.first_seconds, options.first_repeats)
        row |= {"parameters": target.parameters, "eagle": eagle is not None, "left_out": left_out}
        row["measured_in_s"] = round(time.monotonic() - begin_s, 1)
        print(line(row), flush=True)
        question = "what does speculation give a rollout, beside the same engine decoding plainly?"
        merge(options.out, row, question, {"threads": options.threads, "demo": trained})


def line(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{name} {found['speedup']:.2f}" for name, found in row["contenders"].items())
    return (
        f"{row['target']:>5} {row['dtype']:>8} {row['requests']:4d} requests, off {row['off_tokens_per_s']:8,.0f}/s: "
        f"{speeds}  bound {row['bound_speedup']:.2f}  adaptive/bound {row['adaptive_of_bound']:.2f}  "
        f"cold/adaptive {row['first']['cold_of_adaptive'] if 'first' in row else float('nan'):.2f} in the first seconds"
        f" ({row['measured_in_s']:.0f} s)"
    )


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    for dtype in options.dtypes:
        history = rollouts.record_history(load_target(demo, "demo", dtype), task)
        for size in options.sizes:
            measure_target(demo, size, dtype, task, history, options)
    record = load(options.out)
    plot(record, options.out.with_suffix(".svg"))
    print(table(record, load(options.before) if options.before else None))


if __name__ == "__main__":
    main(command(Options))
