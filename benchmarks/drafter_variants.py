"""EAGLE, HASS, EAGLE-3 and OSD for the same number of updates on the same data: what they cost and what they accept.

    python -m benchmarks.drafter_variants [--target runs/demo/model] [--updates 240] [--threads 1] [--quick]

The setting of TLT Table 7 (and 8) on the demo: the target is the demo's, inflated to 8 layers of the same function; all
drafters start from the same seed and see the same packs of the target's own rollouts in the same order, one micro-step
each in turn, so that times and cost ratios come from one interleaved run. Then, in the engine at T = 1 with coupled
chains: accept length (tokens per verification, the target's own included) on other rollouts, share accepted by depth
(as TLT Figure 16), and tokens/s of one request at a time beside plain decoding, in turns as well.

`short` is the same drafter after `updates / passes` of its updates: about the time that EAGLE needs for all of its own.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.types import Request
from benchmarks.machine import describe_machine
from benchmarks.tools.drafting import accept, deep_target, drafting_engine
from benchmarks.tools.rollouts import GROUP, MEASURED_EPOCH, decode, engine_options, record_history, wave
from benchmarks.tools.targets import Target, find_demo, load_target, load_task
from drafter.training.fit import TargetRecords
from drafter.training.head import TargetHead
from drafter.training.packing import MIN_ROWS
from drafter.training.trainer import DrafterTrainer
from drafter.training.variants import VARIANTS
from policies.drafter.options import Algorithm, DrafterOptions

RESULTS = Path(__file__).parent / "results" / "drafter_variants.json"
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
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            start_s = time.perf_counter()
            rollouts = accept(engine, requests).rollouts
            if turn:  # the first is warm-up
                found[name].append(
                    sum(len(rollout.tokens) for rollout in rollouts.values()) / (time.perf_counter() - start_s)
                )
    return {name: median(values) for name, values in found.items()}


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
    columns = (
        "variant",
        "passes",
        "accept length",
        "after EAGLE's time",
        "top-3",
        "training tokens/s",
        "cost",
        "tokens/s of one request",
        "TLT: accept length, speed-up, cost",
    )
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, row in found.items():
        tlt = row["tlt"]
        theirs = [f"{tlt['accept_length']}", *(f"{tlt[key]}x" if tlt[key] else "-" for key in ("speedup", "cost"))]
        lines.append(
            f"| {name} | {row['passes']} | {row['accept_length']:.2f} | {row['short']['accept_length']:.2f} "
            f"| {100 * row['held_out_top3']:.1f} % | {row['training_tokens_per_s']:,} "
            f"| {row['cost_relative_to_eagle']:.2f}x | {speed[name]:,.0f} ({speed[name] / speed['plain']:.2f}x) "
            f"| {', '.join(theirs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model directory of the demo; default: the newest in runs/")
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--micro-step-tokens", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8, help="of the drafted chains")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="8 updates: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    updates, requests, rounds = (8, 16, 1) if arguments.quick else (arguments.updates, 96, 3)
    torch.set_num_threads(arguments.threads)
    directory = find_demo(arguments.target)
    small, task = load_target(directory, "demo", "float32"), load_task(directory)
    prompts, responses = record_history(small, task)
    target = deep_target(small, LAYERS)
    target.model.requires_grad_(False)
    head = TargetHead.of(target.model, 0)
    runs = {name: Run(name, head, None, updates) for name in VARIANTS}
    plain = TargetRecords(target.model, prompts, responses)
    fused = TargetRecords(target.model, prompts, responses, layers=runs["eagle3"].trainer.model.layers)
    for name, run in runs.items():
        run.records = fused if VARIANTS[name].network == "eagle3" else plain
    usable = [int(i) for i in np.random.default_rng(SEED).permutation(len(prompts)) if plain.tokens[int(i)] > MIN_ROWS]
    judged, order = usable[: GROUP * 4], usable[GROUP * 4 :]
    train(runs, packs(plain.tokens, order, arguments.micro_step_tokens, updates))
    found = report_of(runs, target, wave(task, 0, requests, MEASURED_EPOCH), arguments.depth, judged)
    speed = speeds(target, runs, wave(task, 0, 8, MEASURED_EPOCH), arguments.depth, rounds)
    report = {
        "what": "drafter variants, same updates on the same data (TLT Tables 7 and 8)",
        "machine": describe_machine(),
        "settings": {
            "target": target.name,
            "target_parameters": target.parameters,
            "updates": updates,
            "micro_step_tokens": arguments.micro_step_tokens,
            "learning_rate": LEARNING_RATE,
            "strategy": f"eagle:{arguments.depth}",
            "temperature": 1.0,
            "threads": arguments.threads,
            "seed": SEED,
        },
        "variants": found,
        "tokens_per_s_of_one_request": {name: round(value) for name, value in speed.items()},
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(found, speed))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
