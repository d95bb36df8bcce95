"""SmolLM2-135M by precision: the CPU time of a decoding step by part, and the speed of the demo's rollouts.

    python -m benchmarks.smollm_precision

All times are CPU seconds of one thread, which other processes disturb less than the clock. All precisions take turns in
one process, and ratios are paired by turn. Two parts:

steps     a decoding step of several requests after prompts of several tokens: whole, and the language-model head alone
rollouts  the demo's prompts, sampling and stop tokens, 4 prompts x 8 responses, as one of its two workers has them in
          an RL step: tokens per second over float32's, and the share of the engine steps that hold prompts. `less`: the
          same in float32, with the common prefix (system prompt, template) removed from all prompts but one. It bounds
          what computing the prefix once can save. Its tokens differ, so only prompt steps are compared.

benchmarks.smollm_agreement compares each precision with a float32 learner.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch

from actors.data import load_prompts, load_tokenizer
from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from benchmarks.harness import RESULTS, ROOT, command, interval, machine, markdown, write
from benchmarks.smollm_agreement import FORMS
from benchmarks.tools.rollouts import GROUP, MEASURED_EPOCH, engine_options, options_of, wave
from benchmarks.tools.targets import Task, requests_of
from config.formats import FORMATS
from contracts.rollout import Request
from launch.config import load_config
from launch.config.hub import converted
from launch.run.inputs import stop_tokens_of
from models.checkpoint import load_model
from models.transformer import Transformer

CONFIG = ROOT / "examples/smollm/config.yaml"
CELLS = ((1, 24), (8, 24), (32, 24), (16, 300))  # requests, prompt tokens
SETTLED = 3  # decoding steps before the counted ones
LONGEST = 200  # most new tokens of a cell's requests
PROMPTS = 4  # of a worker in an RL step of the demo
EXACT, LESS = "float32", "float32, less"
Models = Mapping[str, Transformer]


@dataclass(frozen=True, slots=True)
class Turn:
    """One wave of rollouts."""

    prompt_s: float  # of engine steps that hold prompts
    decode_s: float  # of the others
    tokens: int
    prompt_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.prompt_s + self.decode_s)


def cpu_s(call: Callable[[], object]) -> float:
    start_s = time.process_time()
    call()
    return time.process_time() - start_s


def settled(model: Transformer, requests: int, prompt_tokens: int) -> NativeEngine:
    """Return an engine in which `requests` requests decode."""
    steps: list[EngineStepRecord] = []
    engine = NativeEngine(model, engine_options(requests, prompt_tokens + LONGEST + 16), steps=steps)
    prompts = np.random.default_rng(0).integers(0, 40_000, (requests, prompt_tokens))
    engine.submit(requests_of(prompts, [LONGEST] * requests))
    while sum(step.running == requests and not step.prefill_tokens for step in steps) < SETTLED:
        engine.step()
    return engine


def cell(models: Models, requests: int, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds of a decoding step and of its head, the minimum over all repeats."""
    engines = {name: settled(model, requests, prompt_tokens) for name, model in models.items()}
    whole: dict[str, list[float]] = {name: [] for name in models}
    head: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for _ in range(repeats):
            for name, model in models.items():
                hidden = torch.ones(requests, model.config.hidden_size, dtype=model.embed_tokens.weight.dtype)
                whole[name].append(cpu_s(engines[name].step))
                head[name].append(cpu_s(partial(model.logits, hidden)))
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "step_ms": {name: round(1e3 * min(of), 2) for name, of in whole.items()},
        "head_ms": {name: round(1e3 * min(of), 2) for name, of in head.items()},
    }


class Worker:
    """An engine that is kept from wave to wave, as in a run."""

    def __init__(self, model: Transformer, requests: Sequence[Request]) -> None:
        self._steps: list[EngineStepRecord] = []
        self._engine = NativeEngine(model, options_of([requests]), steps=self._steps)

    def roll(self, requests: Sequence[Request]) -> Turn:
        self._steps.clear()
        self._engine.submit(requests)
        prompt_s = decode_s = 0.0
        while self._engine.has_work:
            before = len(self._steps)
            seconds = cpu_s(self._engine.step)
            if any(step.prefill_tokens for step in self._steps[before:]):
                prompt_s += seconds
            else:
                decode_s += seconds
        tokens, prompt_tokens = (
            sum(of) for of in zip(*((s.emitted, s.prefill_tokens) for s in self._steps), strict=True)
        )
        return Turn(prompt_s, decode_s, tokens, prompt_tokens)


def without(requests: Sequence[Request], common: int) -> list[Request]:
    """Remove the first `common` tokens from all prompts but the first."""
    first = requests[0].prompt_id
    return [r if r.prompt_id == first else replace(r, prompt_tokens=r.prompt_tokens[common:]) for r in requests]


def rollouts(models: Models, task: Task, temperature: float, rounds: int) -> dict[str, Any]:
    """Measure by precision, over the waves of `rounds` RL steps."""
    columns = zip(*(prompt.tolist() for prompt in task.prompts), strict=False)
    common = next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
    steps = [wave(task, number, PROMPTS * GROUP, MEASURED_EPOCH, temperature) for number in range(rounds + 1)]
    workers = {name: Worker(model, steps[0]) for name, model in models.items()}
    workers[LESS] = Worker(models[EXACT], steps[0])
    turns: dict[str, list[Turn]] = {name: [] for name in workers}
    for requests in steps:
        for name, worker in workers.items():
            turns[name].append(worker.roll(without(requests, common) if name == LESS else requests))
        print(f"rollouts: {turns[EXACT][-1]}", flush=True)
    for of in turns.values():
        del of[0]  # the first wave of an engine: buffers, packed weights
    exact = turns[EXACT]
    saved = [(a.prompt_s - b.prompt_s) / (a.prompt_s + a.decode_s) for a, b in zip(exact, turns[LESS], strict=True)]
    rows = {
        name: {
            "tokens_per_cpu_s": round(fmean(turn.tokens_per_s for turn in turns[name]), 1),
            "over_float32": interval(
                [a.tokens_per_s / b.tokens_per_s for a, b in zip(turns[name], exact, strict=True)]
            ),
            "prompt_share": round(fmean(turn.prompt_s / (turn.prompt_s + turn.decode_s) for turn in turns[name]), 3),
        }
        for name in models
    }
    return {
        "prompt_tokens": {"of_a_prompt": fmean(map(len, task.prompts)), "all_begin_with": common},
        "tokens_of_a_wave": fmean(turn.tokens for turn in exact),
        "precisions": rows,
        "saved_by_sharing": interval(saved),
    }


def table(cells: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    """Render Markdown."""
    names = list(found["precisions"])
    head = ["requests", "prompt tokens", *(f"{name}: step (head), ms" for name in names)]
    steps = [
        [of["requests"], of["prompt_tokens"]]
        + [f"{of['step_ms'][name]:.1f} ({of['head_ms'][name]:.1f})" for name in names]
        for of in cells
    ]
    rolled = [
        (
            name,
            f"{row['tokens_per_cpu_s']:,.0f}",
            "{median:.2f}x ({low:.2f} to {high:.2f})".format(**row["over_float32"]),
            f"{row['prompt_share']:.1%}",
        )
        for name, row in found["precisions"].items()
    ]
    prompt, saved = found["prompt_tokens"], found["saved_by_sharing"]
    return (
        f"# SmolLM2-135M by precision\n\nCPU time of one thread, {machine()['cpu']}; `python -m "
        f"benchmarks.smollm_precision`.\n\n## A decoding step\n\n{markdown(head, steps)}\n\n## The demo's rollouts\n\n"
        f"{markdown(('precision', 'tokens/s', 'over float32', 'share of steps with prompts'), rolled)}\n\n"
        f"All prompts begin with {prompt['all_begin_with']} of their {prompt['of_a_prompt']:.0f} tokens. Computed "
        f"once, that saves at most {saved['median']:.1%} ({saved['low']:.1%} to {saved['high']:.1%}) of their time.\n"
    )


def main(
    *,
    forms: Annotated[Sequence[str], "of the engine, float32 among them", tuple(FORMS)] = tuple(FORMS)[:4],
    repeats: Annotated[int, "decoding steps that count, of each cell"] = 10,
    rounds: Annotated[int, "RL steps' rollouts"] = 6,
    config: Annotated[Path, "of the demo"] = CONFIG,
    run_dir: Annotated[Path, "where the converted model and the questions are kept"] = ROOT / "runs",
    out: Path = RESULTS / "smollm_precision.json",
) -> None:
    torch.set_num_threads(1)
    loaded = converted(load_config(config, [f"run.dir={run_dir}"]).config, sys.stdout)
    folder, tokenizer = Path(loaded.model.path), load_tokenizer(loaded.model.path)
    prompts = [prompt.tokens for prompt in load_prompts(loaded.data, "train", tokenizer)]
    task = Task(prompts, stop_tokens_of(loaded, tokenizer), loaded.rollout.sampling.max_new_tokens)
    models: dict[str, Transformer] = {}
    for name in forms:
        dtype, quantization = FORMS[name]
        low_bit = FORMATS.get(quantization)
        models[name] = load_model(folder, dtype=dtype, batch_invariant=True, low_bit=low_bit).requires_grad_(False)
    cells = []
    for requests, prompt_tokens in CELLS:
        cells.append(cell(models, requests, prompt_tokens, repeats))
        print(cells[-1], flush=True)
    found = rollouts(models, task, loaded.rollout.sampling.temperature, rounds)
    settings = {"threads": 1, "repeats": repeats, "rounds": rounds, "temperature": loaded.rollout.sampling.temperature}
    question = "which precision is SmolLM2 fastest in, and where does a step's time go?"
    write(out, question, {"cells": cells, "rollouts": found}, settings=settings)
    text = table(cells, found)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    command(main, timed=False)
