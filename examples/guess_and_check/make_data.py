"""Write the task's files: `python -m examples.guess_and_check.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/model/{config.json, tokenizer*}   a Qwen3 configuration without weights (the warm start makes them)
FOLDER/train.jsonl                       problems for RL
FOLDER/eval.jsonl                        held-out problems: neither in train.jsonl nor demonstrated
FOLDER/demos.jsonl                       demonstrations for the warm start

Owns the file formats and the split's sizes; task.py has the problems and their wording.
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from examples.guess_and_check import task
from examples.words import MODEL as SMALL
from examples.words import main, word_tokenizer, write_model, write_records

DEFAULT_FOLDER = Path(__file__).parent / "data"
# Problems per modulus. Small moduli have few problems (12 and 30), so most of both sets have modulus 11 or 13.
TRAIN = {5: 8, 7: 20, 11: 36, 13: 32}  # 96 problems
HELD_OUT = {5: 4, 7: 10, 11: 28, 13: 30}  # 72 problems
# Demonstrations favour small moduli, where the checking skill is learned fastest.
DEMONSTRATION_WEIGHTS = {5: 0.35, 7: 0.35, 11: 0.20, 13: 0.10}

MODEL: dict[str, Any] = SMALL | {"vocab_size": task.VOCAB_SIZE}
DEMONSTRATIONS = 22_400


def build_tokenizer(max_tokens: int = MODEL["max_position_embeddings"]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of `task.vocabulary()`."""
    return word_tokenizer(task.vocabulary(), task.WORDS, max_tokens=max_tokens)


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write every file below `folder`. Returns the number of records of each JSON-lines file."""
    split = task.split(random.Random(f"split-{seed}"), train=TRAIN, held_out=HELD_OUT)
    by_modulus = {p: [problem for problem in split.demonstrated if problem.p == p] for p in task.PRIMES}
    rng = random.Random(f"demonstrations-{seed}")
    moduli = rng.choices(task.PRIMES, [DEMONSTRATION_WEIGHTS[p] for p in task.PRIMES], k=demonstrations)
    drawn = (rng.choice(by_modulus[p]) for p in moduli)
    style = task.DemonstrationStyle()
    shown = ((problem, task.demonstrate(problem, style, rng)) for problem in drawn)
    return write_files(folder, MODEL, split, shown)


def write_files(
    folder: Path, model: dict[str, Any], split: task.Split, shown: Iterable[tuple[task.Problem, str]]
) -> dict[str, int]:
    """Write the files of a split and its demonstrations, each a problem and a response. `model`: its config.json.

    Returns the number of records of each JSON-lines file.
    """
    write_model(folder, model, build_tokenizer(model["max_position_embeddings"]))
    files = {
        name: (_record(problem) for problem in members)
        for name, members in (("train", split.train), ("eval", split.held_out))
    }
    demos = ({"prompt": problem.prompt, "response": response} for problem, response in shown)
    return write_records(folder, files | {"demos": demos})


def _record(problem: task.Problem) -> dict[str, str]:
    return {"id": problem.uid, "prompt": problem.prompt, "answer": str(problem.answer)}


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=DEMONSTRATIONS)
