"""The learner's RL step on groups of a chat prompt: shared prefixes computed once, against every sequence by itself.

    python -m benchmarks.learner_groups [--rank 16] [--answer 20] [--own 12]

SmolLM2-135M-Instruct in float32, or `--model`; 8 prompts x 8 responses of random tokens. Prompts have 17 common tokens
(system prompt, template) and `--own` of their own. Responses are log-normal with median `--answer`, cut at 24 like
those of `examples/smollm`. They begin differently, so that only prompts are shared. Both ways take turns in one
process, with one set of weights.
"""

import os
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch

from actors.training.trainer import Trainer
from benchmarks.harness import RESULTS, ROOT, command, in_turns, paired, write
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from launch.config import load_config
from launch.config.hub import converted

SYSTEM_TOKENS, LONGEST = 17, 24
VOCAB = 40_000  # below SmolLM2's 49,152


def make_step(own: int, answer: int, prompts: int = 8, responses: int = 8, seed: int = 0) -> list[TrainSequence]:
    """Return groups of responses to prompts with a common prefix."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, SYSTEM_TOKENS)
    made = []
    for _ in range(prompts):
        prompt = np.concatenate((system, rng.integers(0, VOCAB, own))).astype(np.int32)
        firsts = rng.choice(VOCAB, responses, replace=False)
        for first in firsts:
            length = int(np.clip(round(answer * np.exp(rng.normal(0, 0.5))), 1, LONGEST))
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


def main(
    *,
    model: Annotated[Path | None, "default: examples/smollm's, converted if needed"] = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rank: Annotated[int, "of LoRA; 0: all weights are trained"] = 16,
    own: Annotated[int, "tokens of a prompt behind what all share"] = 12,
    answer: Annotated[int, "tokens of the median response"] = 20,
    threads: int = 2,
    repeats: int = 5,
    out: Path = RESULTS / "learner_groups.json",
) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if model is None:
        config = load_config(ROOT / "examples/smollm/config.yaml", [f"run.dir={ROOT / 'runs'}"]).config
        model = Path(converted(config, sys.stdout).model.path)
    learner = LearnerOptions.model_validate({"lora": {"rank": rank} if rank else None})
    trainer = Trainer(ModelOptions(path=str(model), dtype=dtype), learner, ObjectiveOptions())
    trainer.begin(OptimizerOptions(lr=1e-6), 1)
    step = make_step(own, answer)
    computed: dict[str, int] = {}

    def run(name: str) -> None:
        trainer.shares_prefixes = name == "shared"
        computed[name] = trainer.rl_step(step, temperature=0.7).tokens

    seconds = in_turns({"alone": lambda: run("alone"), "shared": lambda: run("shared")}, repeats)
    found: dict[str, Any] = {
        "tokens": computed,
        "step_s_median": {name: round(median(taken), 4) for name, taken in seconds.items()},
        "step_s": {name: [round(s, 4) for s in taken] for name, taken in seconds.items()},
        "shared_over_alone": paired(seconds["alone"], seconds["shared"]),
    }
    print(found)
    settings = {"model": model.name, "dtype": dtype, "rank": rank, "own": own, "answer": answer, "threads": threads}
    write(out, "a step of grouped chat responses, beginnings shared and not", found, settings=settings)


if __name__ == "__main__":
    command(main)
