"""EAGLE, HASS, EAGLE-3 and OSD for the same number of updates on the same data: what they cost and what they accept.

    python -m experiments.drafter_variants [--target runs/demo/model] [--updates 240] [--threads 1]

The setting of TLT Table 7 (and 8) on the demo: the target is the demo's, inflated to 8 layers of the same function; all
drafters start from the same seed and see the same packs of the target's own rollouts in the same order, one micro-step
each in turn, so that times and cost ratios come from one interleaved run. Then, in the engine at T = 1 with coupled
chains: accept length (tokens per verification, the target's own included) on other rollouts, share accepted by depth
(as TLT Figure 16), and tokens/s of one request at a time beside plain decoding, in turns as well.

`short` is the same drafter after `updates / passes` of its updates: about the time that EAGLE needs for all of its own.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from benchmarks.harness import ROOT, command, in_turns, markdown, write
from benchmarks.tools.drafting import accept, drafting_engine
from benchmarks.tools.rollouts import GROUP, MEASURED_EPOCH, decode, engine_options, record_history, wave
from benchmarks.tools.targets import Target, deep_target, find_demo, load_target, load_task
from config.drafter import Algorithm, DrafterOptions
from contracts.rollout import Request
from drafter.training.fit import TargetRecords
from drafter.training.head import TargetHead
from drafter.training.packing import MIN_ROWS
from drafter.training.trainer import DrafterTrainer
from drafter.training.variants import VARIANTS

LAYERS = 8
LEARNING_RATE = 3e-3  # the demo's
SEED = 0
TLT = {  # Table 7; OSD: Table 8, EAGLE trained in OSD's way
    "eagle": {"accept_length": 6.53, "speedup": 2.24, "cost": 1},
    "hass": {"accept_length": 6.67, "speedup": 2.29, "cost": 3},
    "eagle3": {"accept_length": 6.83, "speedup": 2.55, "cost": 7},
    "osd": {"accept_length": 6.77, "speedup": None, "cost": None},
}


def packs(tokens: Sequence[int], order: Sequence[int], size: int, count: int) -> list[list[int]]:
    """`count` packs of at least `size` tokens, over and over through `order`."""
    made: list[list[int]] = []
    at = 0
    while len(made) < count:
        pack: list[int] = []
        while sum(tokens[i] for i in pack) < size:
            pack.append(order[at % len(order)])
            at += 1
        made.append(pack)
    return made


class Run:
    """One variant's training."""

    def __init__(self, algorithm: Algorithm, head: TargetHead, records: TargetRecords | None, updates: int) -> None:
        options = DrafterOptions(algorithm=algorithm, learning_rate=LEARNING_RATE, seed=SEED)
        self.trainer = DrafterTrainer(head, options)
        self.passes = VARIANTS[algorithm].passes
        self.short_updates = max(updates // self.passes, 1)
        self.short = self.trainer
        self.records = records
        self.seconds: list[float] = []
        self.rows: list[int] = []

    def step(self, pack: Sequence[int]) -> None:
        assert self.records is not None
        taken = self.records.take(pack)
        start_s = time.perf_counter()
        result = self.trainer.micro_step(taken)
        self.seconds.append(time.perf_counter() - start_s)
        self.rows.append(result.positions)
        if self.trainer.steps == self.short_updates:
            self.short = DrafterTrainer(self.trainer.head, self.trainer.options, model=self.trainer.model)


def train(runs: Mapping[Algorithm, Run], plan: Sequence[Sequence[int]]) -> None:
    """Each variant in turn on each pack."""
    for number, pack in enumerate(plan, 1):
        for run in runs.values():
            run.step(pack)
        if number % 20 == 0 or number == len(plan):
            spent = ", ".join(f"{name} {median(run.seconds):.3f} s" for name, run in runs.items())
            print(f"update {number}/{len(plan)}: {spent}", flush=True)


def speeds(
    target: Target, runs: Mapping[Algorithm, Run], requests: Sequence[Request], depth: int, rounds: int
) -> dict[str, float]:
    """Median tokens/s of one request at a time, plain and with each drafter in turns."""
    engines: dict[str, NativeEngine] = {}
    for algorithm, run in runs.items():
        engines[algorithm] = drafting_engine(target, run.trainer.model, 1, depth)
    engines["plain"] = NativeEngine(target.model, engine_options(1))
    made: dict[str, int] = {}

    def decode_all(name: str) -> None:
        made[name] = sum(len(rollout.tokens) for rollout in engines[name].generate(requests).values())

    seconds = in_turns({name: partial(decode_all, name) for name in engines}, rounds)
    return {name: made[name] / median(taken) for name, taken in seconds.items()}


def report_of(
    runs: Mapping[Algorithm, Run], target: Target, requests: Sequence[Request], depth: int, judged: list[int]
) -> dict[str, Any]:
    """What each variant came to."""
    expected = decode(target, [requests], record=False).responses
    found: dict[str, Any] = {}
    for name, run in runs.items():
        assert run.records is not None
        whole = accept(drafting_engine(target, run.trainer.model, len(requests), depth), requests)
        if any(not np.array_equal(whole.rollouts[i].tokens, tokens) for i, tokens in expected.items()):
            raise SystemExit(f"{name} is not lossless: its responses differ from plain decoding's")
        short = whole
        if run.short is not run.trainer:
            short = accept(drafting_engine(target, run.short.model, len(requests), depth), requests)
        held_out = run.trainer.evaluate(run.records.take(judged))
        cost = [mine / base for mine, base in zip(run.seconds, runs["eagle"].seconds, strict=True)]
        found[name] = {
            "passes": run.passes,
            "trainable_parameters": sum(p.numel() for p in run.trainer.model.parameters()),
            "updates": run.trainer.steps,
            "accept_length": round(whole.accept_length, 3),
            "verifications": whole.verifications,
            "accepted_by_depth": whole.by_depth,
            "short": {
                "updates": min(run.short_updates, run.trainer.steps),
                "accept_length": round(short.accept_length, 3),
            },
            "held_out_top1": round(held_out.accuracy, 4),
            "held_out_top3": round(held_out.top3_accuracy, 4),
            "micro_step_s": round(median(run.seconds), 4),
            "training_tokens_per_s": round(sum(run.rows) / sum(run.seconds)),
            "cost_relative_to_eagle": round(median(cost), 2),
            "tlt": TLT[name],
        }
    return found


def table(found: Mapping[str, Any], speed: Mapping[str, float]) -> str:
    """Markdown, as in docs/drafter_variants.md."""
    head = "variant | passes | accept length | after EAGLE's time | top-3 | training tokens/s | cost | "
    head += "tokens/s of one request | TLT: accept length, speed-up, cost"
    lines = []
    for name, row in found.items():
        tlt = row["tlt"]
        theirs = [f"{tlt['accept_length']}", *(f"{tlt[key]}x" if tlt[key] else "-" for key in ("speedup", "cost"))]
        lines.append(
            f"{name} | {row['passes']} | {row['accept_length']:.2f} | {row['short']['accept_length']:.2f} | "
            f"{100 * row['held_out_top3']:.1f} % | {row['training_tokens_per_s']:,} | "
            f"{row['cost_relative_to_eagle']:.2f}x | {speed[name]:,.0f} ({speed[name] / speed['plain']:.2f}x) | "
            f"{', '.join(theirs)}"
        )
    return markdown(head, lines)


def main(
    *,
    target: Annotated[Path | None, "model directory of the demo; default: the newest in runs/"] = None,
    updates: int = 240,
    requests: Annotated[int, "in which accept lengths are measured"] = 96,
    micro_step_tokens: int = 2048,
    depth: Annotated[int, "of the drafted chains"] = 8,
    threads: int = 1,
    out: Path = ROOT / "experiments/results/drafter_variants.json",
) -> None:
    torch.set_num_threads(threads)
    directory = find_demo(target)
    small, task = load_target(directory, "demo", "float32"), load_task(directory)
    prompts, responses = record_history(small, task)
    deep = deep_target(small, LAYERS)
    head = TargetHead.of(deep.model, 0)
    runs = {name: Run(name, head, None, updates) for name in VARIANTS}
    plain = TargetRecords(deep.model, prompts, responses)
    fused = TargetRecords(deep.model, prompts, responses, layers=runs["eagle3"].trainer.model.layers)
    for name, run in runs.items():
        run.records = fused if VARIANTS[name].network == "eagle3" else plain
    usable = [int(i) for i in np.random.default_rng(SEED).permutation(len(prompts)) if plain.tokens[int(i)] > MIN_ROWS]
    judged, order = usable[: GROUP * 4], usable[GROUP * 4 :]
    train(runs, packs(plain.tokens, order, micro_step_tokens, updates))
    found = report_of(runs, deep, wave(task, 0, requests, MEASURED_EPOCH), depth, judged)
    speed = speeds(deep, runs, wave(task, 0, 8, MEASURED_EPOCH), depth, rounds=3)
    settings = {
        "target": deep.name,
        "target_parameters": deep.parameters,
        "updates": updates,
        "micro_step_tokens": micro_step_tokens,
        "learning_rate": LEARNING_RATE,
        "strategy": f"eagle:{depth}",
        "temperature": 1.0,
        "threads": threads,
        "seed": SEED,
    }
    rates = {name: round(value) for name, value in speed.items()}
    question = "drafter variants, same updates on the same data (TLT Tables 7 and 8)"
    write(out, question, {"variants": found, "tokens_per_s_of_one_request": rates}, settings=settings)
    print(table(found, speed))


if __name__ == "__main__":
    command(main)
