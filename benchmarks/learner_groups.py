"""The learner's RL step on groups of a chat prompt: shared prefixes computed once, against every sequence by itself.

    python -m benchmarks.learner_groups [--rank 16] [--answer 20] [--own 12]
    python -m benchmarks.learner_groups --own 983 --answer 250 --longest 250 --prompts 4 --repeats 1

SmolLM2-135M-Instruct in float32, or `--model`; 8 prompts x 8 responses of random tokens. Prompts have 17 common tokens
(system prompt, template) and `--own` of their own. Responses are log-normal with median `--answer`, cut at `--longest`;
by default those of `examples/smollm`. They begin differently, so that only prompts are shared. Both ways take turns in
one process, with one set of weights. Throughput counts each response's tokens and its prompt's, computed or not.

`products` is the floor of a shared step: seconds of the same matrix products alone, as `floor_products` lists them. It
takes turns with the steps. `page_faults` are those of the last step of each way.
"""

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch

from actors.learner import fix_threads
from actors.training.trainer import Trainer
from benchmarks.harness import RESULTS, ROOT, command, in_turns, paired, write
from benchmarks.learner_packing import profile_step
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from launch.config import load_config
from launch.config.hub import converted
from models.transformer import Projection, Transformer

SYSTEM_TOKENS = 17
VOCAB = 40_000  # below SmolLM2's 49,152
HEAD_ROWS = 341  # rows of logits that the learner has at a time


def make_step(
    own: int, answer: int, longest: int, prompts: int, responses: int = 8, seed: int = 0
) -> list[TrainSequence]:
    """Return groups of responses to prompts with a common prefix."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, SYSTEM_TOKENS)
    made = []
    for _ in range(prompts):
        prompt = np.concatenate((system, rng.integers(0, VOCAB, own))).astype(np.int32)
        firsts = rng.choice(VOCAB, responses, replace=False)
        for first in firsts:
            length = int(np.clip(round(answer * np.exp(rng.normal(0, 0.5))), 1, longest))
            tokens = np.concatenate(([first], rng.integers(0, VOCAB, length - 1))).astype(np.int32)
            unknown = np.full(length, -10.0, np.float32)
            made.append(
                TrainSequence(
                    prompt_tokens=prompt,
                    response_tokens=tokens,
                    sampler_logprobs=unknown,
                    sampler_logprobs_t1=unknown,
                    advantage=float(rng.normal()),
                )
            )
    return made


def floor_products(trainer: Trainer, tokens: int, predicted: int) -> Callable[[], None]:
    """Return a function that multiplies what a step of frozen weights cannot avoid, by torch: every matrix of the
    layers with `tokens` rows, forward and for the gradient of its input, and the head with `predicted` rows."""
    network = trainer.network
    assert isinstance(network, Transformer)
    matrices = [p.weight for p in network.modules() if isinstance(p, Projection) and p is not network.lm_head]
    work = [(m.detach(), tokens) for m in matrices] + [(network.head_weight.detach(), predicted)]
    widths = {side for m, _ in work for side in m.shape}
    rows = {width: torch.randn(tokens, width, dtype=work[0][0].dtype) for width in widths if width < VOCAB}

    def multiply() -> None:
        for matrix, count in work:
            columns, depth = matrix.shape
            for start in range(0, count, HEAD_ROWS if columns > VOCAB else count):
                part = min(HEAD_ROWS, count - start) if columns > VOCAB else count
                out = rows[depth][:part] @ matrix.t()
                (out if columns > VOCAB else rows[columns][:part]) @ matrix

    return multiply


def main(
    *,
    model: Annotated[Path | None, "default: examples/smollm's, converted if needed"] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rank: Annotated[int, "of LoRA; 0: all weights are trained"] = 16,
    own: Annotated[int, "tokens of a prompt behind what all share"] = 12,
    answer: Annotated[int, "tokens of the median response"] = 20,
    longest: Annotated[int, "tokens at which a response is cut"] = 24,
    prompts: int = 8,
    threads: int = 2,
    repeats: int = 5,
    warm_up: int = 1,
    ways: Annotated[str, "the contestants, by commas"] = "alone,shared,products",
    out: Path = RESULTS / "learner_groups.json",
) -> None:
    fix_threads(threads)
    torch.set_num_threads(threads)
    if model is None:
        config = load_config(ROOT / "examples/smollm/config.yaml", [f"run.dir={ROOT / 'runs'}"]).config
        model = Path(converted(config, sys.stdout).model.path)
    learner = LearnerOptions.model_validate({"lora": {"rank": rank} if rank else None})
    trainer = Trainer(ModelOptions(path=str(model), dtype=dtype), learner, ObjectiveOptions())
    trainer.begin(OptimizerOptions(lr=1e-6), 1)
    step = make_step(own, answer, longest, prompts)
    asked = sum(len(s.prompt_tokens) + len(s.response_tokens) for s in step)
    predicted = sum(len(s.response_tokens) for s in step)
    computed, faults = dict[str, int](), dict[str, int]()

    def run(name: str) -> None:
        trainer.shares_prefixes = name == "shared"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        computed[name] = trainer.rl_step(step, temperature=0.7).tokens
        faults[name] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    shared = trainer._mini_batch(step).computed_tokens
    contestants: dict[str, Callable[[], None]] = {name: partial(run, name) for name in ("alone", "shared")}
    contestants["products"] = floor_products(trainer, shared, predicted)
    seconds = in_turns({name: contestants[name] for name in ways.split(",")}, repeats, warm_up)
    found: dict[str, Any] = {
        "load": os.getloadavg()[0],
        "tokens": computed,
        "page_faults": faults,
        "step_s_median": {name: round(median(taken), 4) for name, taken in seconds.items()},
        "step_s": {name: [round(s, 4) for s in taken] for name, taken in seconds.items()},
        "tokens_per_s": {name: round(asked / median(taken)) for name, taken in seconds.items() if name in computed},
        **{f"{a}_over_{b}": paired(seconds[a], seconds[b]) for a, b in combinations(seconds, 2)},
        "profile": profile_step(trainer, step) if "shared" in seconds else [],
    }
    print(json.dumps(found, indent=1))
    settings = {
        "model": model.name,
        "dtype": dtype,
        "rank": rank,
        "own": own,
        "answer": answer,
        "longest": longest,
        "prompts": prompts,
        "threads": threads,
    }
    write(out, "a step of grouped chat responses, beginnings shared and not", found, settings=settings)


if __name__ == "__main__":
    command(main)
