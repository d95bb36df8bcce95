"""What the self-drafter gives whole rollouts: EfficientRollout's Table 2 in one run, and its gain from a cold start.

    python -m benchmarks.self_rollout [--sizes 20m 100m] [--batches 1 2 4 8 32 64]

Owns `results/self_rollout.json` and `self_rollout.md`. A case is a rollout as in `benchmarks.rollout`: so many requests
of the demo at their natural lengths, decoded to the last one, so that the batch shrinks; every run draws the tokens of
plain decoding. Drafters are a copy of the target in few bits and nothing else, but for the last row:

self:g               always on, drafting g tokens; Table 2's "quantized self-SD" is the best of them
toggle               the paper's roofline toggle over the best fixed g (`mode: roofline`, one strategy), calibrated
toggle and ladder    with the paper's draft lengths besides, which have climbed in a few rollouts: its EfficientRollout
adaptive, self       our default choice over self:g, with a calibration and a fresh chooser: a cold start
adaptive             our default: all drafters at hand, history known, the chooser has decoded a few runs

Order and figures are those of `benchmarks.rollout`: interleaved with plain decoding, medians of `--repeats`. `prep` is
what making the copy of new weights takes, once per RL step: as in the paper it is told beside the rollout.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch

from benchmarks import rollout
from benchmarks.harness import RESULTS, command, load, markdown
from benchmarks.tools import rollouts
from benchmarks.tools.calibrated import calibrate
from benchmarks.tools.contenders import Contender, adaptive, fixed
from benchmarks.tools.rollout_report import merge
from benchmarks.tools.targets import DTYPES, SIZES, find_demo, load_target, load_task

LENGTHS = (3, 5, 7, 10)
GOALS = {1: 3.0, 4: 2.0}  # requests -> speed-up from a cold start
# Table 2: rollout seconds of plain decoding, always on, EfficientRollout; preparation.
PAPER = {"Qwen2.5-7B": (82.4, 75.6, 66.3, 1.3), "Qwen2.5-14B": (126.6, 135.0, 105.3, 2.6)}
PAPER |= {"Llama3.1-8B": (126.4, 118.9, 112.9, 1.4)}
CHOOSING = ("toggle", "toggle and ladder", "adaptive, self", "adaptive")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(rollout.Options):
    sizes: Annotated[Sequence[str], "of the target", SIZES] = ("20m", "100m")
    dtypes: Annotated[Sequence[str], "of the target", DTYPES] = ("float32",)
    batches: Annotated[Sequence[int], "requests submitted together"] = (1, 2, 4, 8, 32, 64)
    seconds: Annotated[float, "of a plain run, at least"] = 0.3
    min_requests: Annotated[int, "in a run, at least"] = 8
    out: Path = RESULTS / "self_rollout.json"


def contenders_for(case: rollout.Case) -> list[Contender]:
    """All rows; the toggle's draft length is the one that is fastest in one run each, not counted."""
    target, known = case.target, case.calibration
    always = [fixed(target, f"self:{length}") for length in LENGTHS]
    best = min(always, key=lambda contender: case.run(contender, warmup=True).seconds)
    ladder = [contender.name for contender in always]
    high = case.batch  # the model alone decides, not `max_running`

    def choosing(name: str, learnt: bool = False, **how: Any) -> Contender:
        return adaptive(target, name, calibration=known, max_running=high, history=False, learnt=learnt, **how)

    return [
        *always,
        choosing("toggle", mode="roofline", strategies=[best.name]),
        choosing("toggle and ladder", learnt=True, mode="roofline", strategies=ladder),
        choosing("adaptive, self", strategies=ladder),
        adaptive(target, calibration=known),
    ]


def measure(case: rollout.Case, options: Options) -> Record:
    row = rollout.measure(case, contenders_for(case), repeats=options.repeats, learning_runs=options.learning_runs)
    row["off_s"] = round(case.reference.tokens / row["off_tokens_per_s"], 4)
    return row


def best_always(case: Record) -> tuple[str, Record]:
    """The best fixed draft length."""
    always = {name: found for name, found in case["contenders"].items() if name.startswith("self:")}
    name = max(always, key=lambda name: always[name]["speedup"])
    return name, always[name]


def table(record: Record) -> str:
    """Table 2's rows of every case, the paper's below; then what the goals are about."""
    lines: list[list[str]] = []
    for case in record["cases"]:
        of = [f"{case['target']} {case['dtype']}", str(case["requests"])]
        lines.append([*of, "off", "", "", "", "", f"{case['off_s']:.3f}", ""])
        name, always = best_always(case)
        rows = [(f"always on, {name}", always), *((name, case["contenders"][name]) for name in CHOOSING)]
        lines += [[*of, *cells(name, found)] for name, found in rows]
    head = "target | requests | method | prep, s | tokens / drafted | accepted | plain steps | rollout, s | speed-up"
    paper = [
        [model, off, f"{always} ({off / always:.2f}x)", f"{efficient} ({off / efficient:.2f}x)", prep]
        for model, (off, always, efficient, prep) in PAPER.items()
    ]
    below = markdown("paper's Table 2, seconds | off | always on | EfficientRollout | prep", paper)
    said = "\n".join(f"- {line}" for line in verdicts(record))
    return "\n\n".join((markdown(head, lines), below, said)) + "\n"


def cells(name: str, found: Record) -> list[str]:
    drafted = found["drafted_per_request_step"]
    accepted = f"{(found['accept_length'] - 1) / drafted:.1%}" if drafted else ""
    made = f"{found['accept_length']:.2f} / {drafted:.2f}"
    span = found["interval"]
    speedup = f"**{found['speedup']:.2f}x** [{span['low']:.2f}, {span['high']:.2f}]"
    plain = f"{found['steps'].get('plain', 0.0):.0%}"
    return [name, f"{found['prep_s']:.3f}", made, accepted, plain, f"{found['seconds']:.3f}", speedup]


def verdicts(record: Record) -> list[str]:
    found = []
    for case in record["cases"]:
        goal = GOALS.get(case["requests"])
        if goal is not None:
            name, always = best_always(case)
            cold = case["contenders"]["adaptive, self"]["speedup"]
            found.append(
                f"{case['target']} {case['dtype']} at {case['requests']} requests: {cold:.2f}x cold, wanted {goal:g}x "
                f"({'met' if cold >= goal else 'missed'}; always on {always['speedup']:.2f}x with {name})."
            )
    gains = [
        case["contenders"]["toggle and ladder"]["speedup"] / best_always(case)[1]["speedup"] for case in record["cases"]
    ]
    found.append(f"Toggle and ladder over always on: {min(gains):.2f} to {max(gains):.2f}, mean {fmean(gains):.2f}.")
    return found


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    demo = find_demo(options.target)
    task = load_task(demo)
    for dtype in options.dtypes:
        history = rollouts.record_history(load_target(demo, "demo", dtype), task)
        for size in options.sizes:
            target = load_target(demo, size, dtype)
            calibration = calibrate(target, max(options.batches), options.calibration_seconds)
            for batch in options.batches:
                begin_s = time.monotonic()
                row = measure(rollout.Case(target, task, history, batch, options, calibration), options)
                row |= {"parameters": target.parameters}
                row["measured_in_s"] = round(time.monotonic() - begin_s, 1)
                speeds = "  ".join(f"{name} {found['speedup']:.2f}" for name, found in row["contenders"].items())
                print(f"{target.name} at {batch}: {speeds} ({row['measured_in_s']:.0f} s)", flush=True)
                question = "EfficientRollout's Table 2: a low-bit copy drafts, always or where the model says so"
                merge(options.out, row, question, {"threads": options.threads})
    text = table(load(options.out))
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(command(Options))
