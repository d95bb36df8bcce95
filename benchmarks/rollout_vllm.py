"""Paceline on stock vLLM against vLLM alone and its own drafters: `python -m benchmarks.rollout_vllm [--quick]`.

Same model (the demo's and its function-preserving inflations), same prompts, same response lengths, temperature 1,
log-probs of the sampled token. No noise is shared, so ends are off: a response is as long as the shortest of three
unmeasured ones. The share of tokens after a natural end, which are easy to guess, is reported (`past_end`). Contenders
are separate processes (benchmarks/tools/vllm_contenders.py):

plain        stock vLLM, no speculative configuration, no seeds: the baseline
ngram, suffix, draft_model   vLLM's own drafters, each at the fixed length that is fastest in the first round
paceline     Paceline on vLLM with default options: policy and drafters that know one earlier epoch of the same prompts
             (other noise), and the policy some runs of this size; "cold" ones know nothing
native       Paceline's own engine, likewise

Rounds are interleaved: plain, every contender, plain, every contender, ..., plain. A speed-up is the mean time of the
two plain runs around a contender's run over its own; medians are reported. The bound is the estimate of
`tools/bound.py` with vLLM's passes as measured in the same run. It covers every step that Paceline made on vLLM, and
fixed strategies, whose acceptance and drafting time come from the native engine. A slow model's lengths are cut so that
a wave ends in time, as noted in the record. A record is of one machine.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from json import dumps
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np

from actors.engine.batch.telemetry import EngineStepRecord
from benchmarks.harness import RESULTS, ROOT, command, interval, write
from benchmarks.tools import rollouts
from benchmarks.tools.bound import PassCost, bucket, estimate_s, interpolated
from benchmarks.tools.peers import Peer
from benchmarks.tools.rollouts import History
from benchmarks.tools.targets import DTYPES, SIZES, Target, Task, find_demo, load_target, load_task
from benchmarks.tools.vllm_contenders import MAX_TOKENS, Case, packed
from benchmarks.tools.vllm_report import table, verdicts
from config.strategy import Strategy
from contracts.rollout import SamplingParams

PYTHON = ROOT / ".venv-vllm/bin/python"
BUILT_INS = ("ngram", "suffix", "draft_model")
PROMPTS = 48  # of the demo's, at most
# Each with its own noise; MEASURED_EPOCH + round.
LENGTHS_EPOCHS, LEARNING_EPOCH, MEASURED_EPOCH = (10, 11, 12), 20, 100
FIXED = ("suffix:4", "suffix:8", "suffix:12", "ngram:4", "ngram:8")  # of the bound, besides those that the policy tried
LEAST_LENGTH = 24  # shortest length to which responses of a slow model are cut
QUESTION = "Paceline on stock vLLM beside vLLM alone and its own drafters"
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    vllm_python: Annotated[Path, "interpreter with vLLM and this checkout"] = PYTHON
    target: Annotated[Path | None, "the demo's model directory; default: the newest in runs/"] = None
    sizes: Annotated[Sequence[str], "of the target", SIZES] = SIZES
    dtype: Annotated[str, "of the target", DTYPES] = "float32"
    requests: Annotated[Sequence[int], "running together"] = (1, 2, 4, 8, 32)
    built_ins: Annotated[Sequence[str], "vLLM's own methods", BUILT_INS] = BUILT_INS
    lengths: Annotated[Sequence[int], "of their drafts; suffix has its own"] = (2, 4, 8)
    arctic: Annotated[Path | None, "folder of the package arctic_inference, for the method suffix"] = None
    rounds: Annotated[int, "at most"] = 5
    learning_runs: Annotated[int, "runs in which what learns learns, not counted"] = 3
    seconds: Annotated[float, "of a plain run, about"] = 0.8
    wave_seconds: Annotated[float, "of a plain wave: longer responses are cut"] = 2.0
    cell_seconds: Annotated[float, "no further round beyond it, but two at least"] = 24.0
    minutes: Annotated[float, "cells that do not begin within it are left out"] = 12.0
    threads: int = 2
    eager: Annotated[bool, "every vLLM with enforce_eager; else with torch.compile, its default and Paceline's"] = False
    quick: Annotated[bool, "the demo alone at 1 and 8 requests, two rounds: no result"] = False
    logs: Annotated[Path, "folder for what the contenders print"] = Path("/tmp")
    out: Path = RESULTS / "rollout_vllm.json"


def quickly(options: Options) -> Options:
    """Return options for a run of about a minute and a half on a quiet machine."""
    short = replace(options, sizes=options.sizes[:1], requests=(1, 8), lengths=(4,), rounds=2)
    return replace(short, learning_runs=1, seconds=0.3, cell_seconds=0.0)


@dataclass(slots=True)
class Contender:
    """A process, and how to call it. `built_in`: it is one of vLLM's own drafters. `learns`: from its own runs."""

    name: str
    peer: Peer
    built_in: bool = False
    asked: dict[str, Any] = field(default_factory=dict)
    learns: bool = False

    def run(self, case: Case, **more: Any) -> Record:
        found: Record = self.peer.ask({"waves": case} | self.asked | more)
        return found


def built_ins(options: Options, copy: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return vLLM's own drafters (speculative configurations by method), and why others are missing. `copy`: the
    configuration of the target's quantised copy, without its length."""
    longest = {"num_speculative_tokens": max(options.lengths)}
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    missing = {name: "not asked for" for name in BUILT_INS if name not in options.built_ins}
    found = {"ngram": lookup | longest, "draft_model": {**copy, **longest}}
    found = {name: method for name, method in found.items() if name not in missing}
    if "suffix" not in missing and options.arctic is not None:
        found["suffix"] = {"method": "suffix"}  # it chooses the draft length itself
    elif "suffix" not in missing:
        missing["suffix"] = "arctic-inference is not there: --arctic PATH"
    return found, missing


@contextmanager
def opened(
    options: Options, folder: Path, size: str, drafting: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Contender]]:
    """Yield the contenders of one target, each up and waiting. `folder`: its model and history. `drafting`: from
    `built_ins`."""
    python, running = str(options.vllm_python), max(options.requests)
    history = str(folder / "history.npz")
    shape = {"path": str(folder / "model"), "dtype": options.dtype, "running": running, "compiled": not options.eager}

    def start(name: str, kind: str, program: str = python, speculative: Any = None) -> Peer:
        said = shape | {"kind": kind, "speculative": speculative, "history": history, "threads": options.threads}
        words = [program, "-m", "benchmarks.tools.vllm_contenders", dumps(said)]
        arctic = {"PYTHONPATH": str(options.arctic)} if options.arctic is not None and name.startswith("suffix") else {}
        log = options.logs / f"rollout_vllm-{size}-{name}.log"
        return stack.enter_context(closing(Peer(name, words, log, options.threads, **arctic)))

    with ExitStack() as stack:
        plain = start("plain", "stock")
        plain.answer()  # Later ones find what the first of a kind has compiled.
        ours = start("paceline", "paceline")
        ours.answer()
        found = {"plain": Contender("plain", plain)}
        for method, speculative in drafting.items():
            peer = start(method, "stock", speculative=speculative)
            for length in options.lengths if method != "suffix" else (None,):
                name = method if length is None else f"{method}:{length}"
                found[name] = Contender(name, peer, built_in=True, asked={"length": length}, learns=length is None)
        for name, peer in (("paceline", ours), ("native", start("native", "native", sys.executable))):
            found[name] = Contender(name, peer, learns=True)
            found[f"{name}, cold"] = Contender(f"{name}, cold", peer, asked={"cold": True})
        for peer in dict.fromkeys(contender.peer for contender in found.values()):
            if peer not in (plain, ours):
                peer.answer()
        yield found


class Cell:
    """One target at one number of requests: its cases, and the rounds."""

    def __init__(self, demo: Target, task: Task, requests: int, contenders: Mapping[str, Contender], options: Options):
        self.demo, self.task, self.requests, self.options = demo, task, requests, options
        self.contenders = dict(contenders)
        plain = contenders["plain"]
        short = [[12] * requests]
        plain.run(self._packed(short, LEARNING_EPOCH))
        step_s = plain.run(self._packed(short, LEARNING_EPOCH))["seconds"] / 12
        longest = int(options.wave_seconds / step_s)
        natural = [
            rollouts.decode(demo, rollouts.waves(task, 64, requests, epoch), record=False).responses
            for epoch in LENGTHS_EPOCHS
        ]
        shortest = [min(len(of[i]) for of in natural) for i in sorted(natural[0])]
        self.cut = max(LEAST_LENGTH, min(rollouts.MAX_NEW_TOKENS, longest))
        self.limits = fitting(shortest, requests, self.cut, step_s, options.seconds)

    def case(self, epoch: int) -> Case:
        return self._packed(self.limits, epoch)

    def _packed(self, limits: Sequence[Sequence[int]], epoch: int) -> Case:
        return packed(rollouts.waves(self.task, len(limits), self.requests, epoch), limits)

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.limits))

    def measure(self, fixed: Sequence[EngineStepRecord], cost: PassCost) -> Record:
        """Run the rounds. Returns a row of the record."""
        options, begin_s = self.options, time.monotonic()
        for peer in dict.fromkeys(contender.peer for contender in self.contenders.values()):
            warmed = next(contender for contender in self.contenders.values() if contender.peer is peer)
            for turn in range(options.learning_runs if warmed.learns else 1):
                warmed.run(self.case(LEARNING_EPOCH + turn))
        off: list[Record] = [self._plain(MEASURED_EPOCH)]
        runs: dict[str, list[Record]] = {name: [] for name in self.contenders if name != "plain"}
        left_out: set[str] = set()
        for turn in range(options.rounds):
            if turn >= 2 and time.monotonic() - begin_s > options.cell_seconds:
                break
            for name in [name for name in runs if name not in left_out]:
                runs[name].append(self.contenders[name].run(self.case(MEASURED_EPOCH + turn)))
            off.append(self._plain(MEASURED_EPOCH + turn + 1))
            if turn == 0:
                left_out = slower({name: runs[name][0]["seconds"] for name in self._built_ins()})
        around_s = [fmean((a["seconds"], b["seconds"])) for a, b in pairwise(off)]
        found = {name: summary(of, around_s) for name, of in runs.items()}
        tried = [step for name in ("paceline", "paceline, cold") for run in runs[name] for step in steps_of(run)]
        off_steps = [step for run in off for step in steps_of(run)]
        off_s = sum(run["seconds"] for run in off)
        outside_s = off_s - sum(step.elapsed_s for step in off_steps)
        bound = off_s / (estimate_s(off_steps, [*tried, *fixed], cost) + outside_s)
        kept = {name: found[name]["speedup"] for name in self._built_ins() if name not in left_out}
        best = max(kept, key=lambda name: kept[name])
        case = self.case(LEARNING_EPOCH)
        row = {
            "requests": self.requests,
            "waves": len(self.limits),
            "tokens": self.tokens,
            "longest": self.cut,
            "rounds": len(around_s),
            "plain_tokens_per_s": round(self.tokens / median(run["seconds"] for run in off), 1),
            "plain_spread": round(max(r["seconds"] for r in off) / min(r["seconds"] for r in off), 3),
            "contenders": found,
            "best_built_in": {"name": best, "speedup": kept[best]},
            "bound_speedup": round(bound, 3),
            "step_us": {
                **self.contenders["plain"].run(case, parts=True)["parts"],
                **self.contenders["paceline, cold"].run(case, parts=True)["parts"],  # of both kinds of steps
            },
        }
        return row | {"targets": verdicts(row)}

    def _built_ins(self) -> list[str]:
        return [name for name, contender in self.contenders.items() if contender.built_in]

    def _plain(self, epoch: int) -> Record:
        return self.contenders["plain"].run(self.case(epoch))


def fitting(natural: Sequence[int], requests: int, cut: int, step_s: float, seconds: float) -> list[list[int]]:
    """Return limits of as many waves as fill about `seconds` of plain decoding: at least one, at most all."""
    limits: list[list[int]] = []
    steps = 0
    for first in range(0, len(natural) - requests + 1, requests):
        wave = [min(length, cut) for length in natural[first : first + requests]]
        if limits and (steps + max(wave) / 2) * step_s > seconds:
            break
        limits.append(wave)
        steps += max(wave)
    return limits


def slower(seconds: Mapping[str, float]) -> set[str]:
    """Return, of "method:length", every length of a method except its fastest."""
    methods: dict[str, list[str]] = {}
    for name in seconds:
        methods.setdefault(name.partition(":")[0], []).append(name)
    return set(seconds) - {min(names, key=lambda name: seconds[name]) for names in methods.values()}


def steps_of(run: Mapping[str, Any]) -> list[EngineStepRecord]:
    """See `benchmarks.tools.vllm_contenders.row_of`."""
    return [
        EngineStepRecord(
            at_s=0.0,
            running=running,
            context_tokens=0,
            strategy=Strategy.parse(strategy),
            drafted=drafted,
            accepted=0,
            emitted=emitted,
            elapsed_s=elapsed_s,
            draft_s=draft_s,
            prefill_tokens=prefill_tokens,
        )
        for running, strategy, drafted, emitted, elapsed_s, draft_s, prefill_tokens in run["steps"]
    ]


def summary(runs: Sequence[Mapping[str, Any]], around_s: Sequence[float]) -> Record:
    """Summarise a contender's runs: paired speed-ups, and the use of each strategy if known."""
    speedups = [off_s / run["seconds"] for off_s, run in zip(around_s, runs, strict=False)]
    steps = [step for run in runs for step in steps_of(run)]
    speed = rollouts.speed_of(steps)
    used = {str(step.strategy) for step in steps}
    share = {name: round(sum(str(step.strategy) == name for step in steps) / len(steps), 3) for name in sorted(used)}
    return {
        "speedup": round(median(speedups), 3),
        "speedups": [round(value, 3) for value in speedups],
        "interval": interval(speedups),
        "tokens_per_s": round(median(run["tokens"] / run["seconds"] for run in runs), 1),
        "tokens_per_request_step": round(speed.accept_length, 2),
        "draft_share": round(speed.draft_s / max(speed.elapsed_s, 1e-9), 3),
        "steps": share,
    }


def fixed_steps(cell: Cell, history: History) -> tuple[list[EngineStepRecord], float]:
    """Return what fixed strategies draft and have accepted over the cell's requests, and the share of tokens after a
    natural end. Acceptance depends on the model's function, not on its size or engine. The steps' times are
    meaningless: inf."""
    from benchmarks.tools.contenders import fixed

    demo, ends = cell.demo, cell.task.stop_token_ids
    waves = rollouts.waves(cell.task, len(cell.limits), cell.requests, MEASURED_EPOCH)
    requests = [
        [replace(request, sampling=SamplingParams(limit)) for request, limit in zip(of, limits, strict=True)]
        for of, limits in zip(waves, cell.limits, strict=True)
    ]
    steps: list[EngineStepRecord] = []
    responses: list[rollouts.Tokens] = []
    for text in FIXED:
        contender = fixed(demo, text)
        drafters = contender.drafters(rollouts.engine_options(cell.requests))
        run = rollouts.decode(demo, requests, policy=contender.policy(), drafters=drafters, history=history)
        steps += [replace(step, elapsed_s=float("inf")) for step in run.steps if step.draft_s]
        responses = list(run.responses.values())
    return steps, past_end(responses, ends)


def past_end(responses: Sequence[rollouts.Tokens], ends: Sequence[int]) -> float:
    """Return the share of tokens after the first that ends a response."""
    behind = 0
    for tokens in responses:
        ended = np.flatnonzero(np.isin(tokens, ends))
        behind += len(tokens) - 1 - int(ended[0]) if len(ended) else 0
    return behind / sum(map(len, responses))


def pass_cost(ours: Peer, requests: int) -> PassCost:
    """Measure vLLM's passes, for request counts of powers of two up to `requests`."""

    def seconds(number: int) -> dict[int, float]:
        return {int(rows): found for rows, found in ours.ask({"passes": number})["passes"].items()}

    return interpolated({1 << i: seconds(1 << i) for i in range(bucket(requests).bit_length())})


def save_history(history: History, path: Path) -> None:
    """Save the history for `benchmarks.tools.vllm_contenders.Speculation`."""
    arrays: dict[str, Any] = {}
    for name, of in zip(("prompts", "responses"), history, strict=True):
        arrays |= {name: np.concatenate(of), f"{name}_ends": np.cumsum([len(tokens) for tokens in of])}
    np.savez(path, **arrays)


def main(given: Options) -> None:
    import torch

    from actors.engine.vllm.model_drafters import self_drafter
    from models.checkpoint import save_model

    options = quickly(given) if given.quick else given
    if not options.vllm_python.is_file():
        sys.exit(f"{options.vllm_python} is not there: `make demo-vllm` builds it, or give another by --vllm-python")
    torch.set_num_threads(options.threads)
    demo_path = find_demo(options.target)
    whole = load_task(demo_path)
    task = Task(whole.prompts[:PROMPTS], whole.stop_token_ids)
    demo = load_target(demo_path, "demo", options.dtype)
    history = rollouts.record_history(demo, task)
    rows: list[Record] = []
    begin_s = time.monotonic()
    for size in options.sizes:
        target = demo if size == "demo" else load_target(demo_path, size, options.dtype)
        folder = ROOT / "runs/rollout_vllm" / f"{size}-{options.dtype}"  # a fixed path, which vLLM's cache is keyed by
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_model(target.model, folder / "model")
        save_history(history, folder / "history.npz")
        copy = self_drafter(folder / "model", folder / "copy").speculative_config(max(options.lengths))
        drafting, missing = built_ins(options, copy)
        with opened(options, folder, size, drafting) as contenders:
            cost = pass_cost(contenders["paceline"].peer, max(options.requests))
            for requests in options.requests:
                if time.monotonic() - begin_s > 60 * options.minutes:
                    print(f"{size} at {requests} requests: no time was left", flush=True)
                    continue
                cell = Cell(demo, task, requests, contenders, options)
                fixed, past = fixed_steps(cell, history)
                row = {"target": size, "dtype": options.dtype, "parameters": target.parameters, "missing": missing}
                rows.append(row | {"past_end": round(past, 3)} | cell.measure(fixed, cost))
                print(f"{(time.monotonic() - begin_s) / 60:4.1f} min  {line(rows[-1])}", flush=True)
                save(options, rows)
    print(table({"cases": rows}))


def save(options: Options, rows: Sequence[Record]) -> None:
    settings = {
        "threads": options.threads,
        "quick": options.quick,
        "compiled": not options.eager,
        "temperature": 1.0,
        "seed": rollouts.SEED,
        "max_tokens": MAX_TOKENS,
        "learning_runs": options.learning_runs,
    }
    write(options.out, QUESTION, {"cases": list(rows)}, settings=settings)
    options.out.with_suffix(".md").write_text(table({"cases": rows}) + "\n", encoding="utf-8")


def line(row: Record) -> str:
    speeds = "  ".join(f"{name} {found['speedup']:.2f}" for name, found in row["contenders"].items())
    return (
        f"{row['target']:>5} {row['dtype']:>8} {row['requests']:3d} requests, plain "
        f"{row['plain_tokens_per_s']:8,.0f}/s: {speeds}  bound {row['bound_speedup']:.2f}"
    )


if __name__ == "__main__":
    main(command(Options))
