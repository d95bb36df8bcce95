"""RL histories as the suffix experiments replay them: per step its prompts and responses, in order. Never samples.

A *history* is a list of steps, a step a list of (prompt, response). The demo's comes from a run that wrote down every
response (`observe.samples_per_step` of them all) and is tokenised by the run's own tokenizer; texts that are not of an
RL run become one by taking one response of every problem per epoch.
"""

import json
from pathlib import Path

import numpy as np

from actors.data import load_tokenizer
from benchmarks.tools.suffix_data import Problem, Tokens

Step = list[tuple[Tokens, Tokens]]


def run_history(directory: Path) -> list[Step]:
    """Every response of a run, with the token that ended it. SystemExit if it wrote down only some of them."""
    tokenizer = load_tokenizer(str(directory / "model"))
    steps: dict[int, Step] = {}
    prompts: dict[str, Tokens] = {}
    with (directory / "samples.jsonl").open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            prompt = record["prompt"]
            if prompt not in prompts:
                prompts[prompt] = np.array(tokenizer.encode(prompt), np.int32)
            response = tokenizer.encode(record["response"])
            if record["finish_reason"] == "stop":
                response.append(tokenizer.eos_token_id)
            steps.setdefault(record["step"], []).append((prompts[prompt], np.array(response, np.int32)))
    sizes = {len(step) for step in steps.values()}
    if len(sizes) != 1 or sizes == {4}:
        raise SystemExit(
            f"{directory}/samples.jsonl does not hold every response: run with observe.samples_per_step = all of a step"
        )
    return [steps[number] for number in sorted(steps)]


def in_epochs(problems: list[Problem], together: int) -> list[Step]:
    """Epoch e holds the e-th response of every problem, `together` problems to a step."""
    epochs = min(len(problem.samples) for problem in problems)
    return [
        [(problem.prompt, problem.samples[epoch]) for problem in problems[start : start + together]]
        for epoch in range(epochs)
        for start in range(0, len(problems), together)
    ]


def epoch_of(history: list[Step]) -> list[int]:
    """By step: how often its problems were seen in earlier steps, at most."""
    seen: dict[bytes, int] = {}
    epochs = []
    for step in history:
        prompts = {prompt.tobytes() for prompt, _ in step}
        epochs.append(max(seen.get(prompt, 0) for prompt in prompts))
        for prompt in prompts:
            seen[prompt] = seen.get(prompt, 0) + 1
    return epochs
