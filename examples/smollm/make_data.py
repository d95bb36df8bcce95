"""Write the task's files: `python -m examples.smollm.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/train.jsonl   sums and differences of two numbers from 0 to 20, for RL
FOLDER/eval.jsonl    held-out ones: no pair of numbers and sign is in both
"""

import random
from pathlib import Path

from examples.words import main, write_records

DEFAULT_FOLDER = Path(__file__).parent / "data"
LARGEST = 20
TRAIN, HELD_OUT = 256, 64  # problems


def write_all(folder: Path, *, seed: int) -> dict[str, int]:
    """Write both files below `folder`; returns how many records each has."""
    numbers = range(LARGEST + 1)
    problems = [(a, sign, b) for a in numbers for sign in "+-" for b in numbers]
    random.Random(f"sums-{seed}").shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + TRAIN]
    return write_records(folder, {"train": map(_record, train), "eval": map(_record, held_out)})


def _record(problem: tuple[int, str, int]) -> dict[str, str]:
    a, sign, b = problem
    return {"id": f"{a}{sign}{b}", "prompt": f"What is {a} {sign} {b}?", "answer": str(a + b if sign == "+" else a - b)}


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER)
