"""The data of the suffix benchmark: problems with several responses each, as tokens. Owns no timing.

A regular expression splits text into tokens (words, digits, runs of punctuation, white space), numbered in order of
appearance: about as many as a BPE's, without a model's tokenizer.
"""

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
_TOKEN = re.compile(r" ?[A-Za-z]{1,6}|[A-Za-z]{1,6}| ?\d| ?[^\sA-Za-z\d]{1,3}|\s+")


@dataclass(frozen=True, slots=True)
class Problem:
    prompt: Tokens
    samples: list[Tokens]


def read_rollouts(path: Path) -> list[Problem]:
    """Read JSON lines (gzip) with `prompt` and `samples`. Token 0 ends every response."""
    numbers: dict[str, int] = {}

    def tokens(text: str, end: bool) -> Tokens:
        found = [numbers.setdefault(piece, len(numbers) + 1) for piece in _TOKEN.findall(text)]
        return np.array([*found, 0] if end else found, np.int32)

    with gzip.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [Problem(tokens(r["prompt"], False), [tokens(s, True) for s in r["samples"]]) for r in records]


def sample_demo(directory: Path) -> list[Problem]:
    """Return responses of the demo's model to its training prompts, 8 each, at temperature 1."""
    from benchmarks.tools.rollouts import record_history
    from benchmarks.tools.targets import load_target, load_task

    prompts, responses = record_history(load_target(directory, "demo", "float32"), load_task(directory))
    problems: dict[bytes, Problem] = {}
    for prompt, response in zip(prompts, responses, strict=True):
        problems.setdefault(prompt.tobytes(), Problem(prompt, [])).samples.append(response)
    return list(problems.values())


def long_rollouts(problems: list[Problem], count: int, tokens: int) -> list[Tokens]:
    """Return `count` texts of `tokens` tokens each, concatenated from the responses of different problems."""
    stream = np.concatenate([sample for i in range(8) for p in problems for sample in p.samples[i : i + 1]])
    repeats = -(-count * tokens // len(stream))
    rng = np.random.default_rng(0)
    # Later passes over the same responses differ in one token of twenty, like later rollouts.
    passes = [stream]
    for _ in range(repeats - 1):
        noise = rng.integers(0, stream.max(), len(stream)).astype(np.int32)
        passes.append(np.where(rng.random(len(stream)) < 0.05, noise, stream))
    return list(np.concatenate(passes)[: count * tokens].reshape(count, tokens))
