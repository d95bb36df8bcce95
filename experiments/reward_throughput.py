"""Grades per second of each kind of reward, one caller, medians of interleaved repeats. Owns the measurement only.

python -m experiments.reward_throughput [--seconds 1] [--repeats 5]
"""

import itertools
import json
import time
from pathlib import Path
from typing import Annotated

from actors.rewards import GradeItem, Grader, build
from benchmarks.harness import ROOT, command, interval, write
from config.rewards import RewardOptions, RewardTerm

CODE = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def response(answer: str) -> str:
    """A response of about 200 tokens that ends in an answer."""
    return (
        "We look at each part of the problem in turn and add what we find. " * 12 + rf"So it is $\boxed{{{answer}}}$."
    )


def cases() -> dict[str, tuple[RewardTerm, list[GradeItem]]]:
    """Name -> (term, items that are visited in turn; all differ, so nothing is answered from a cache)."""
    exact = [
        GradeItem(prompt="", response=response(f"{n:,}"), record={"answer": f"so it is\n#### {n}"})
        for n in range(1000, 1500)
    ]
    algebra = [
        GradeItem(prompt="", response=response(rf"{n}(x+{n + 1})"), record={"answer": f"{n}x+{n * (n + 1)}"})
        for n in range(2, 502)
    ]
    shape = [GradeItem(prompt="", response=response(str(n)), record={}) for n in range(500)]
    code = [GradeItem(prompt="", response=f"{CODE}\n{n}", record={"tests": TESTS}) for n in range(500)]
    return {
        "math, plain numbers": (RewardTerm(kind="math"), exact),
        "math, math-verify": (RewardTerm(kind="math"), algebra),
        "format": (RewardTerm(kind="format", pattern=r"boxed\{.*\}"), shape),
        "python": (RewardTerm(kind="python", function="experiments.reward_throughput:length"), shape),
        "code": (RewardTerm(kind="code"), code),
    }


def length(prompt: str, response: str, record: dict[str, object]) -> float:
    """The user function that is timed."""
    return float(len(response))


def rate(grader: Grader, items: "itertools.cycle[GradeItem]", seconds: float) -> float:
    """Grades per second over about `seconds`."""
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        grade = grader.grade(next(items))
        assert grade.error is None, grade.error
        assert grade.value > 0, grade
        count += 1
    return count / elapsed


def measure(seconds: float, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Name -> grades per second."""
    graders = {
        name: (build(RewardOptions(terms=(term,))), itertools.cycle(items)) for name, (term, items) in cases().items()
    }
    try:
        for grader, items in graders.values():
            grader.grade(next(items))  # starts the child process, which imports
        rates: dict[str, list[float]] = {name: [] for name in graders}
        for _ in range(repeats):
            for name, (grader, items) in graders.items():
                rates[name].append(rate(grader, items, seconds))
    finally:
        for grader, _ in graders.values():
            grader.close()
    return {name: {"grades_per_s": interval(values)} for name, values in rates.items()}


def main(
    *,
    seconds: Annotated[float, "per kind and repeat"] = 1.0,
    repeats: int = 5,
    out: Path = ROOT / "experiments/results/reward_throughput.json",
) -> None:
    found = measure(seconds, repeats)
    print(json.dumps(found, indent=1))
    settings = {"seconds": seconds, "repeats": repeats}
    write(out, "grades per second of each kind of reward", {"rewards": found}, settings=settings)


if __name__ == "__main__":
    command(main)
