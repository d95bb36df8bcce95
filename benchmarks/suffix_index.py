"""The suffix index against arctic-inference's SuffixDecodingCache: `python -m benchmarks.suffix_index --arctic FOLDER`.

Owns `results/suffix_index.json`. FOLDER is the import path of `arctic_inference.suffix_decoding` (0.3.0) with its C++
extension, which builds alone (csrc/suffix_decoding: CMake and nanobind, no torch). Data: `../shared/data` rollouts, and
with `--demo MODEL` responses sampled from the demo's model. Both sides run in one process, taking turns step by step.
Memory is measured in separate processes.

"Like for like" leaves out a feature that the peer lacks: the prompt before a finished rollout, which lets drafts start
with the response. With it more is accepted and more proposed, at about the same ratio.
"""

import ctypes
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from benchmarks.harness import RESULTS, ROOT, command, ratio_of_rates, write
from benchmarks.tools.suffix_data import Problem, long_rollouts, read_rollouts, sample_demo
from benchmarks.tools.suffix_replay import Arctic, Contender, Counts, Ours, replay, suffixes

DATA = ROOT.parent / "shared" / "data"
QUESTION = "the suffix index beside arctic-inference's SuffixDecodingCache"
SETS = {"math": "rollouts_qwen25math_100x8.jsonl.gz", "gsm8k": "rollouts_gsm8k_gpt3_4each.jsonl.gz"}
PEERS = (24, 64)  # tree depths
LENGTHS = (8, 16)  # most drafted tokens
BATCH = 100  # requests that run together
LONG, LONG_COUNT = 16_384, 32
LONG_BYTES = 512 + LONG_COUNT * (128 + 10 * (LONG + 4))  # room for that many, with the end of their prompts


def load_set(name: str, demo: Path | None) -> list[Problem]:
    return sample_demo(demo) if name == "demo" and demo else read_rollouts(DATA / SETS[name])


def compare(problems: list[Problem], tokens: int, folds: int) -> dict[str, Any]:
    """Run all contenders on one data set with chains of at most `tokens`."""
    names: dict[str, Callable[[Sequence[Problem], int], Contender]] = {
        "paceline": partial(Ours, tokens=tokens),
        "paceline, no prompt context": partial(Ours, tokens=tokens, prompt_context=False),
    }
    names |= {f"arctic-{depth}": partial(Arctic, depth, tokens=tokens) for depth in PEERS}
    counts = {name: Counts() for name in names}
    for held_out in range(min(folds, min(len(problem.samples) for problem in problems))):
        for start in range(0, len(problems), BATCH):
            replay(problems[start : start + BATCH], held_out, names, counts)
    rows: dict[str, Any] = {name: summary(found) for name, found in counts.items()}
    for depth in PEERS:
        rows[f"over arctic-{depth}"] = ratio(counts["paceline"], counts[f"arctic-{depth}"])
    rows["no prompt context over arctic-64"] = ratio(counts["paceline, no prompt context"], counts["arctic-64"])
    return rows


def summary(counts: Counts) -> dict[str, float]:
    steps = sum(counts.steps)
    return {
        "accepted_per_step": round(sum(counts.accepted) / steps, 4),
        "proposed_per_step": round(sum(counts.proposed) / steps, 4),
        "draft_p50_us": round(float(np.percentile(counts.draft_us, 50)), 2),
        "draft_p99_us": round(float(np.percentile(counts.draft_us, 99)), 2),
        "append_p50_us": round(float(np.percentile(counts.append_us, 50)), 3),
        "steps": steps,
    }


def ratio(ours: Counts, theirs: Counts) -> dict[str, Any]:
    """Return accepted per step, with an interval over requests, and the other figures as ours over theirs."""
    accepted = ratio_of_rates(*(np.stack((of.accepted, of.steps), 1) for of in (ours, theirs)))
    proposed = ratio_of_rates(*(np.stack((of.proposed, of.steps), 1) for of in (ours, theirs)))
    return {
        "accepted": accepted["median"],
        "accepted_95": [accepted["low"], accepted["high"]],
        "proposed": proposed["median"],
        "draft_speedup": round(median(theirs.draft_us) / median(ours.draft_us), 2),
        "append_speedup": round(median(theirs.append_us) / median(ours.append_us), 2),
    }


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(fields[1]) * 4096


def measure_memory(name: str, problems: list[Problem]) -> float:
    """Return the resident bytes per token that this process gains by holding what `name` describes."""
    tokens = sum(len(sample) for problem in problems for sample in problem.samples)
    if name.startswith("arctic"):
        Arctic(int(name.split("-")[1]), problems[:1], -1, 8)  # load the extension
    before = resident_bytes()
    kept: Any
    if name == "paceline-live":
        samples = [(problem.prompt, sample) for problem in problems for sample in problem.samples]
        tokens += sum(len(prompt) for prompt, _ in samples)
        kept = suffixes(len(samples))
        for handle, (prompt, sample) in enumerate(samples):
            kept.begin(handle, prompt)
            for at in range(0, len(sample), 4):
                part = sample[at : at + 4]
                kept.append_batch(np.array([handle]), part, np.array([0, len(part)]))
    elif name == "paceline":
        kept = suffixes(1)
        for problem in problems:
            for sample in problem.samples:
                kept.publish(problem.prompt, sample, 0)
        kept.flush()
    else:
        kept = Arctic(int(name.split("-")[1]), problems, -1, 8)
    used = resident_bytes() - before
    del kept
    return used / tokens


def memory(data: str, arctic: Path, demo: Path | None) -> dict[str, float]:
    found = {}
    for name in ("paceline", "paceline-live", *(f"arctic-{depth}" for depth in PEERS)):
        asked = [sys.executable, "-m", "benchmarks.suffix_index", "--arctic", str(arctic), "--memory-of", name]
        asked += ["--data", data, *(["--demo", str(demo)] if demo else [])]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT)
        found[name] = round(float(done.stdout.split()[-1]), 1)
    return found


def upkeep(problems: list[Problem]) -> dict[str, Any]:
    """Measure updates of a full window of 32 x 16k tokens, which gains a rollout and loses one, and drafts
    meanwhile."""
    texts = long_rollouts(problems, LONG_COUNT + 7, LONG)
    prompt = problems[0].prompt
    index = suffixes(2, window_bytes=LONG_BYTES)
    for text in texts[:LONG_COUNT]:
        index.publish(prompt, text, 0)
    index.flush()
    merge_ms = []
    for text in texts[LONG_COUNT : LONG_COUNT + 5]:
        index.publish(prompt, text, 0)
        start = time.thread_time_ns()
        index.flush()
        merge_ms.append((time.thread_time_ns() - start) / 1e6)
    return {
        "window_tokens": index.window_tokens,
        "bytes_per_token": round(index.bytes / index.window_tokens, 2),
        "merge_and_evict_ms": round(median(merge_ms), 2),
        "draft_wall_us": during_merges(texts, prompt),
        "arctic-64": arctic_upkeep(texts),
    }


def during_merges(texts: list[Any], prompt: Any) -> dict[str, float]:
    """Return the wall time of one request's draft, while quiet and while the background thread merges continuously."""
    index = suffixes(1, window_bytes=LONG_BYTES, inline_tokens=0)
    for text in texts[:LONG_COUNT]:
        index.publish(prompt, text, 0)
    index.flush()
    index.begin(0, prompt)
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            index.publish(prompt, texts[-1], 0)
            index.flush()

    def drafts(count: int) -> list[float]:
        shape = (1, 8)
        tokens, parents, probs = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.float32)
        counts, handles, budgets = np.empty(1, np.int64), np.zeros(1, np.int64), np.full(1, 8)
        found = []
        for at in range(count):
            index.append_batch(handles, texts[-2][at : at + 1], np.array([0, 1]))
            start = time.perf_counter_ns()
            index.draft_batch(handles, budgets, 8, 1, 0.1, 1.0, tokens, parents, probs, counts)
            found.append((time.perf_counter_ns() - start) / 1e3)
        return found

    quiet = drafts(5000)
    thread = threading.Thread(target=publish)
    thread.start()
    busy = drafts(5000)
    stop.set()
    thread.join()
    return {
        f"{name}_{label}": round(float(np.percentile(values, at)), 2)
        for name, values in (("quiet", quiet), ("merging", busy))
        for label, at in (("p50", 50), ("p99", 99))
    }


def arctic_upkeep(texts: list[Any]) -> dict[str, float]:
    from arctic_inference.suffix_decoding.cache import SuffixTree

    tree = SuffixTree(64)
    for number, text in enumerate(texts[:LONG_COUNT]):
        tree.extend_ndarray(number, text)
    add_ms, remove_ms = [], []
    for number in range(LONG_COUNT, LONG_COUNT + 5):
        start = time.thread_time_ns()
        tree.extend_ndarray(number, texts[number])
        middle = time.thread_time_ns()
        tree.remove(number - LONG_COUNT)
        add_ms.append((middle - start) / 1e6)
        remove_ms.append((time.thread_time_ns() - middle) / 1e6)
    return {"add_ms": round(median(add_ms), 2), "remove_ms": round(median(remove_ms), 2)}


def main(
    *,
    arctic: Annotated[Path, "folder that holds the package arctic_inference"],
    demo: Annotated[Path | None, "directory of the demo's model: adds a data set sampled from it"] = None,
    folds: Annotated[int, "held-out samples per problem, at most"] = 4,
    data: Annotated[str | None, "only this data set", (*SETS, "demo")] = None,
    memory_of: Annotated[str | None, "only the bytes per token that this contender holds, printed"] = None,
    out: Path = RESULTS / "suffix_index.json",
) -> None:
    sys.path.insert(0, str(arctic))
    if memory_of and data:
        print(measure_memory(memory_of, load_set(data, demo)))
        return
    names = [data] if data else [*SETS, *(["demo"] if demo else [])]
    sets = {name: load_set(name, demo) for name in names}
    record: dict[str, Any] = {
        "tokens": {name: sum(len(s) for p in problems for s in p.samples) for name, problems in sets.items()},
        "sets": {
            name: {str(tokens): compare(problems, tokens, folds) for tokens in LENGTHS}
            for name, problems in sets.items()
        },
        "memory_bytes_per_token": {name: memory(name, arctic, demo) for name in names},
        "upkeep": upkeep(next(iter(sets.values()))),
    }
    write(out, QUESTION, record, settings={"batch": BATCH, "folds": folds, "seed": 0, "arctic-inference": "0.3.0"})
    print(json.dumps({name: record[name] for name in ("memory_bytes_per_token", "upkeep")}, indent=1))


if __name__ == "__main__":
    command(main, timed="--memory-of" not in sys.argv)
