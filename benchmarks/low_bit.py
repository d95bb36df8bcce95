"""The gain and cost of low-bit rollouts on CPUs: `python -m benchmarks.low_bit [--parts rollout learner ...]
[--quick]`.

rollout     tokens/s of our engine in fp32, bf16, W8A8 and W4A8, decoding plainly and speculating, against stock vLLM
            in bf16 and in its own W8A8: same prompts and response lengths, T = 1, each engine a separate process,
            compiled. All take a turn per round, starting with another one each time; ratios are taken within a round
learner     one RL step whose forward mirrors W8A8 against the same step in full precision, in turns within one process
publish     quantising and packing after an update, and the engine's part, as shares of an RL step (the learner's step
            and a rollout of as many tokens, both of this run); bytes handed over
agreement   stock vLLM's log-probs of its draws in W8A8 against our own low-bit forward

Targets are the demo's model and its function-preserving inflations. Ends are off, since noise is not shared: a response
is as long as in fp32, cut for slow models. Speculation is Paceline's default. Warm ones know one earlier epoch of the
same prompts and have run a few times; cold ones know nothing. A part, or a cell of `rollout`, that is measured again
replaces its old entry in the record, which is of one machine.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks.harness import RESULTS, ROOT, command, in_turns, is_busy, load, machine, paired, write
from benchmarks.learner_packing import make_step
from benchmarks.rollout_vllm import PYTHON, Contender, fitting, save_history
from benchmarks.tools import rollouts
from benchmarks.tools.low_bit_report import plot, refresh, table
from benchmarks.tools.peers import Peer
from benchmarks.tools.targets import SIZES, Target, Task, find_demo, load_target, load_task
from benchmarks.tools.vllm_contenders import MAX_TOKENS, Case, packed
from config.formats import FORMATS, Quantization

PARTS = ("rollout", "learner", "publish", "agreement")
QUESTION = "what do low-bit rollouts give, and what do they cost?"
PAGE = ROOT / "docs/results/quantization.md"
PROMPTS = 48  # of the demo's, at most
LENGTHS_EPOCH, LEARNING_EPOCH, MEASURED_EPOCH = 10, 20, 100  # MEASURED_EPOCH + round
SETTLE_S = 0.3  # pause before a turn, since threads of the last one may still spin
LEAST_LENGTH = 12  # shortest length to which responses of a slow model are cut
# Engines by name: dtype and format of ours.
OURS = {
    "fp32": ("float32", "none"),
    "bf16": ("bfloat16", "none"),
    "w8a8": ("bfloat16", "w8a8"),
    "w8a8 fp32": ("float32", "w8a8"),  # float32 except for the projections' products
    "w4a8": ("bfloat16", "w4a8"),
}
SPECULATING = ("fp32", "bf16", "w8a8")
THEIRS = {"vllm bf16": "none", "vllm w8a8": "w8a8"}
MAIN = "w8a8"
ROLLOUTS = 128  # of the RL step that costs are compared with, as in the demo
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    parts: Annotated[Sequence[str], "of the record", PARTS] = PARTS
    sizes: Annotated[Sequence[str], "of the target", SIZES] = SIZES
    requests: Annotated[Sequence[int], "running together, at 20m"] = (1, 2, 4, 8, 16, 32, 64)
    few: Annotated[Sequence[int], "of them, at the other sizes"] = (1, 8, 64)
    ours: Annotated[Sequence[str], "our engines that take part", tuple(OURS)] = tuple(OURS)
    vllm_python: Annotated[Path, "interpreter with vLLM and this checkout; without it vLLM is left out"] = PYTHON
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    rounds: int = 3
    learning_runs: Annotated[int, "runs in which a policy learns, not counted"] = 2
    seconds: Annotated[float, "of an fp32 run, about"] = 0.5
    wave_seconds: Annotated[float, "of an fp32 wave: longer responses are cut"] = 1.2
    minutes: Annotated[float, "cells that do not begin within it are left out"] = 10.0
    repeats: Annotated[int, "of a learner's step, and of a hand-over"] = 5
    threads: int = 2
    eager: Annotated[bool, "vLLM with enforce_eager; else with torch.compile, its default"] = False
    quick: Annotated[bool, "the demo alone, two rounds: no result"] = False
    logs: Annotated[Path, "folder for what the contenders print"] = Path("/tmp")
    out: Path = RESULTS / "low_bit.json"


def quickly(options: Options) -> Options:
    """Return options for a run of about a minute, without vLLM."""
    return replace(options, sizes=("demo",), few=(1, 8), rounds=2, learning_runs=1, seconds=0.2, repeats=3)


# Rollout.


class Models:
    """The directories of one size, in full precision and in W8A8, written anew: vLLM's cache is keyed by the path."""

    def __init__(self, demo: Path, size: str) -> None:
        from models.checkpoint import hf_state_dict, read_config, save_model
        from models.compressed_tensors import write_quantised

        self.target = load_target(demo, size, "float32")
        self.folder = ROOT / "runs/low_bit" / size
        shutil.rmtree(self.folder, ignore_errors=True)
        self.full = self.folder / "model"
        self.low_bit: dict[str, Path] = {}
        save_model(self.target.model, self.full)
        for dtype in ("float32", "bfloat16"):
            self.low_bit[dtype] = self.folder / f"w8a8-{dtype}"
            named = hf_state_dict(self.target.model).items()
            write_quantised(
                read_config(self.full), named, FORMATS["w8a8"], self.low_bit[dtype], dtype=getattr(torch, dtype)
            )


@contextmanager
def opened(options: Options, models: Models, history: Path, running: int) -> Iterator[dict[str, Contender]]:
    """Yield the contenders of one size, each up and waiting."""
    with ExitStack() as stack:

        def start(name: str, kind: str, program: str, **more: Any) -> Peer:
            said = {"running": running, "history": str(history), "threads": options.threads}
            said |= {"kind": kind, "compiled": not options.eager} | more
            words = [program, "-m", "benchmarks.tools.vllm_contenders", dumps(said)]
            log = options.logs / f"low_bit-{models.target.size}-{name.replace(' ', '-')}.log"
            return stack.enter_context(closing(Peer(name, words, log, options.threads)))

        found: dict[str, Contender] = {}
        for name in options.ours:
            dtype, form = OURS[name]
            peer = start(name, "native", sys.executable, path=str(models.full), dtype=dtype, quantization=form)
            found[name] = Contender(name, peer, asked={"plain": True})
            if name in SPECULATING:
                found[f"{name}, speculating"] = Contender(f"{name}, speculating", peer, learns=True)
            if name == MAIN:
                found[f"{name}, speculating, cold"] = Contender(
                    f"{name}, speculating, cold", peer, asked={"cold": True}
                )
            peer.answer()
        for name, form in THEIRS.items() if options.vllm_python.is_file() else ():
            path = models.full if form == "none" else models.low_bit["bfloat16"]
            peer = start(name, "stock", str(options.vllm_python), path=str(path), dtype="bfloat16")
            found[name] = Contender(name, peer)
            peer.answer()  # one after the other, so that later ones find what earlier ones compiled
        yield found


class Cell:
    """One target at one number of requests."""

    def __init__(self, demo: Target, task: Task, requests: int, contenders: Mapping[str, Contender], options: Options):
        self.task, self.requests, self.contenders, self.options = task, requests, contenders, options
        slowest = contenders["fp32"]
        short = self._packed([[8] * requests], LEARNING_EPOCH)
        slowest.run(short)
        step_s = slowest.run(short)["seconds"] / 8
        waves = rollouts.waves(task, 64, requests, LENGTHS_EPOCH)
        natural = rollouts.decode(demo, waves, record=False).responses
        self.cut = max(LEAST_LENGTH, min(rollouts.MAX_NEW_TOKENS, int(options.wave_seconds / step_s)))
        lengths = [len(natural[i]) for i in sorted(natural)]
        self.limits = fitting(lengths, requests, self.cut, step_s, options.seconds)

    def _packed(self, limits: Sequence[Sequence[int]], epoch: int) -> Case:
        return packed(rollouts.waves(self.task, len(limits), self.requests, epoch), limits)

    def measure(self) -> Record:
        """Run all rounds. Returns a row of the record."""
        options, names = self.options, list(self.contenders)
        for contender in self.contenders.values():
            for turn in range(options.learning_runs if contender.learns else 1):
                contender.run(self._packed(self.limits, LEARNING_EPOCH + turn))
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(options.rounds):
            at = (turn * 3) % len(names)
            case = self._packed(self.limits, MEASURED_EPOCH + turn)
            for name in (*names[at:], *names[:at]):
                time.sleep(SETTLE_S)
                seconds[name].append(self.contenders[name].run(case)["seconds"])
        tokens = sum(map(sum, self.limits))
        row: Record = {
            "requests": self.requests,
            "waves": len(self.limits),
            "tokens": tokens,
            "longest": self.cut,
            "tokens_per_s": {name: round(tokens / median(of), 1) for name, of in seconds.items()},
            "seconds": {name: [round(s, 4) for s in of] for name, of in seconds.items()},
        }
        return row | {"ratios": ratios(seconds)}


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return how many times faster one is than another, "A / B", paired by rounds."""
    pairs = [(MAIN, "fp32"), (MAIN, "bf16"), ("w4a8", "fp32"), ("w4a8", "bf16"), ("w8a8 fp32", "fp32")]
    pairs += [(MAIN, "vllm w8a8"), (MAIN, "vllm bf16"), ("bf16", "vllm bf16")]
    pairs += [(f"{name}, speculating", name) for name in SPECULATING] + [(f"{MAIN}, speculating, cold", MAIN)]
    known = [(ours, other) for ours, other in pairs if ours in seconds and other in seconds]
    return {f"{ours} / {other}": paired(seconds[other], seconds[ours]) for ours, other in known}


def rollout(options: Options, demo_path: Path, entered: "Entered") -> None:
    whole = load_task(demo_path)
    task = Task(whole.prompts[:PROMPTS], whole.stop_token_ids)
    demo = load_target(demo_path, "demo", "float32")
    history = ROOT / "runs/low_bit/history.npz"
    history.parent.mkdir(parents=True, exist_ok=True)
    save_history(rollouts.record_history(demo, task), history)
    begin_s = time.monotonic()
    for size in options.sizes:
        numbers = options.requests if size == "20m" else options.few
        models = Models(demo_path, size)
        with opened(options, models, history, max(numbers)) as contenders:
            for requests in numbers:
                if time.monotonic() - begin_s > 60 * options.minutes:
                    print(f"{size} at {requests} requests: no time was left", flush=True)
                    continue
                row: Record = {"target": size, "parameters": models.target.parameters}
                row |= Cell(demo, task, requests, contenders, options).measure()
                entered.cell(row)
                speeds = "  ".join(f"{name} {speed:,.0f}" for name, speed in row["tokens_per_s"].items())
                minutes = (time.monotonic() - begin_s) / 60
                print(f"{minutes:4.1f} min  {size:>5} {requests:3d} requests: {speeds}", flush=True)


# The learner, and the hand-over.


def learner_seconds(size: str, models: Models, options: Options) -> Record:
    """Measure an RL step over the demo's lengths, mirrored and not, and its cost for ROLLOUTS rollouts."""
    from actors.training.trainer import Trainer
    from config.learner import LearnerOptions, OptimizerOptions
    from config.model import ModelOptions
    from config.objective import ObjectiveOptions

    count = ROLLOUTS if size == "demo" else 16
    sequences = make_step(count)
    trainers = {}
    learner = LearnerOptions(mini_batches=2)
    formats: dict[str, Quantization] = {"full": "none", "mirrored": "w8a8"}
    for name, form in formats.items():
        model = ModelOptions(path=str(models.full))
        trainers[name] = trainer = Trainer(model, learner, ObjectiveOptions(), quantization=form)
        trainer.begin(OptimizerOptions(lr=1e-6), 100)
    ways = {name: (lambda of=of: of.rl_step(sequences, temperature=1.0)) for name, of in trainers.items()}
    seconds = in_turns(ways, options.repeats)
    tokens = sum(len(of.prompt_tokens) + len(of.response_tokens) for of in sequences)
    return {
        "target": size,
        "rollouts": count,
        "tokens": tokens,
        "step_s": {name: round(median(of), 4) for name, of in seconds.items()},
        "mirrored_over_full": paired(seconds["mirrored"], seconds["full"]),
        "whole_step_s": round(median(seconds["mirrored"]) * ROLLOUTS / count, 3),
    }


def publish_seconds(size: str, models: Models, task: Task, learner_s: float, options: Options) -> Record:
    """Measure an update: rounding, packing into one buffer, and the engine's part; against full precision."""
    from actors.engine.native.engine import NativeEngine
    from models.checkpoint import hf_state_dict, load_model
    from models.low_bit import quantised
    from models.weights import pack

    named = hf_state_dict(models.target.model)
    form = FORMATS["w8a8"]
    low_bit = load_model(models.full, batch_invariant=False, low_bit=form)
    engine = NativeEngine(low_bit, rollouts.engine_options(ROLLOUTS))
    full_engine = NativeEngine(load_model(models.full, batch_invariant=False), rollouts.engine_options(ROLLOUTS))
    packets = {"full": pack(named, 1), "w8a8": pack(dict(quantised(named.items(), form)), 1)}
    ways: dict[str, Callable[[], object]] = {
        "pack_full": lambda: pack(named, 1),
        "quantise": lambda: list(quantised(named.items(), form)),
        "quantise_and_pack": lambda: pack(dict(quantised(named.items(), form)), 1),
        "load_full": lambda: full_engine.update_weights(*packets["full"]),
        "load_w8a8": lambda: engine.update_weights(*packets["w8a8"]),
    }
    seconds = {name: median(of) for name, of in in_turns(ways, options.repeats).items()}
    target = Target(size, "float32", low_bit, models.target.parameters)
    waves = rollouts.waves(task, 1, ROLLOUTS if size == "demo" else 32, MEASURED_EPOCH)
    run = rollouts.decode(target, waves, running=64, record=False)
    rollout_s = run.seconds * ROLLOUTS / len(waves[0])
    step_s = learner_s + rollout_s
    return {
        "target": size,
        "ms": {name: round(1e3 * of, 3) for name, of in seconds.items()},
        "bytes": {name: manifest.total_bytes for name, (manifest, _) in packets.items()},
        "step_s": {"rollout": round(rollout_s, 3), "learner": round(learner_s, 3)},
        "quantising_share": round(seconds["quantise"] / step_s, 5),
        "hand_over_share": round((seconds["quantise_and_pack"] + seconds["load_w8a8"]) / step_s, 5),
    }


# Agreement with stock vLLM.


def agreement(size: str, models: Models, task: Task, history: Path, options: Options) -> Iterator[Record]:
    """Yield the agreement of stock vLLM's log-probs with ours, by dtype: in W8A8, in full precision, and W8A8 against
    full precision."""
    from models.checkpoint import load_model

    waves = rollouts.waves(task, 1, 32, MEASURED_EPOCH)
    case = packed(waves, [[48] * 32])
    for dtype in ("float32", "bfloat16"):
        row: Record = {"target": size, "dtype": dtype, "tokens": 32 * 48}
        for name, path in (("w8a8", models.low_bit[dtype]), ("none", models.full)):
            said = {"kind": "stock", "path": str(path), "dtype": dtype, "running": 32, "compiled": False}
            said |= {"history": str(history), "threads": options.threads}
            words = [str(options.vllm_python), "-m", "benchmarks.tools.vllm_contenders", dumps(said)]
            log = options.logs / f"low_bit-agreement-{size}-{dtype}-{name}.log"
            with closing(Peer(name, words, log, options.threads)) as peer:
                peer.answer()
                drawn = peer.ask({"waves": case, "told": True})["drawn"]
            full = load_model(models.full, dtype=getattr(torch, dtype))
            row[name] = gap(full if name == "none" else low_bit_of(models, dtype), case[0], drawn)
            if name == "w8a8":
                row["unaligned"] = gap(full, case[0], drawn)
        yield row


def low_bit_of(models: Models, dtype: str) -> Any:
    from models.checkpoint import load_model

    return load_model(models.full, dtype=getattr(torch, dtype), low_bit=FORMATS["w8a8"])


@torch.no_grad()
def gap(model: Any, wave: Sequence[Mapping[str, Any]], drawn: Mapping[str, Any]) -> dict[str, float]:
    """Return |vLLM's log-prob - the model's|, over all tokens."""
    from models.packed import PackedContext

    apart: list[float] = []
    for of in wave:
        tokens, logprobs = drawn[str(of["id"])]
        known = [*of["prompt"], *tokens]
        rows = model.logits(model(torch.tensor(known), PackedContext.from_lengths([len(known)]))).float()
        ours = torch.log_softmax(rows, -1)[len(of["prompt"]) - 1 : -1]
        apart += (ours[torch.arange(len(tokens)), torch.tensor(tokens)] - torch.tensor(logprobs)).abs().tolist()
    found = np.array(apart)
    return {"mean": float(f"{found.mean():.3g}"), "max": float(f"{found.max():.3g}")}


# The record.


class Entered:
    """The record on disk, updated as soon as a part or cell is complete."""

    def __init__(self, options: Options) -> None:
        self._out = options.out
        self._settings = {"threads": options.threads, "temperature": 1.0, "seed": rollouts.SEED}
        self._settings |= {"max_tokens": MAX_TOKENS, "compiled": not options.eager, "quick": options.quick}
        self.record: Record = {}
        if options.out.is_file():
            there = load(options.out)
            here = {"cpu": machine()["cpu"], "cores": machine()["cores"]} | self._settings
            differing = sorted(key for key in here if (there["machine"] | there["settings"]).get(key) != here[key])
            if differing:
                sys.exit(f"{options.out} differs in {', '.join(differing)}: give another --out, or remove it")
            self.record = {name: there[name] for name in PARTS if name in there}

    def cell(self, row: Record) -> None:
        rows = [of for of in self.record.get("rollout", []) if _key(of) != _key(row)]
        self.part("rollout", sorted([*rows, row], key=lambda of: (of["parameters"], of["requests"])))

    def part(self, name: str, rows: Sequence[Record]) -> None:
        self.record[name] = list(rows)
        write(self._out, QUESTION, self.record, settings=self._settings)
        self._out.with_suffix(".md").write_text(table(self.record) + "\n", encoding="utf-8")


def _key(row: Record) -> tuple[str, int]:
    return row["target"], row["requests"]


def main(given: Options) -> None:
    options = quickly(given) if given.quick else given
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    demo_path = find_demo(options.target)
    entered = Entered(options)
    if "rollout" in options.parts:
        rollout(options, demo_path, entered)
    trained = [size for size in options.sizes if size != "100m"]  # a step of it takes a minute
    task = load_task(demo_path)
    rows: dict[str, list[Record]] = {name: [] for name in PARTS[1:] if name in options.parts}
    for size in trained if rows else ():
        models = Models(demo_path, size)
        whole_s = 0.0
        if "learner" in rows or "publish" in rows:
            row = learner_seconds(size, models, options)
            whole_s = row["whole_step_s"]
            rows.get("learner", []).append(row)
        if "publish" in rows:
            rows["publish"].append(publish_seconds(size, models, task, whole_s, options))
        if "agreement" in rows and options.vllm_python.is_file():
            rows["agreement"] += agreement(size, models, task, ROOT / "runs/low_bit/history.npz", options)
    for name, of in rows.items():
        entered.part(name, of)
    print(table(entered.record))
    if "rollout" in entered.record:
        plot(entered.record, options.out.with_suffix(".svg"))
    if options.out == RESULTS / "low_bit.json" and not options.quick and not is_busy():
        refresh(PAGE, load(options.out))


if __name__ == "__main__":
    main(command(Options))
