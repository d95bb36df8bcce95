"""Write the task's files: `python -m examples.long_guess_and_check.make_data [FOLDER]`. Same seed, same bytes.

Problems, wording, tokenizer and files are those of examples/guess_and_check. Owns the choice of problems, their split
and their demonstrations: difficulty is wide, and many problems are beyond what is demonstrated.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.guess_and_check.make_data import DEMONSTRATIONS, write_files
from examples.guess_and_check.make_data import MODEL as SHORT_MODEL
from examples.guess_and_check.task import DemonstrationStyle, Problem, Split, demonstrate, problems
from examples.words import main

DEFAULT_FOLDER = Path(__file__).parent / "data"
REACH = 12  # the largest value that demonstrations try: enough up to modulus 13, and one answer in eight of 97
NEAR = DemonstrationStyle(max_tries=27, reach=REACH)
FAR = DemonstrationStyle(max_tries=27, reach=REACH, stubborn=0.45)  # 27 tries end beyond the limit of 320 tokens
MODEL = SHORT_MODEL | {"max_position_embeddings": 384}


@dataclass(frozen=True, slots=True)
class Level:
    """Problems of some moduli and multipliers, their number in each file, and the style of their demonstrations."""

    moduli: tuple[int, ...]
    multipliers: tuple[int, ...] | None  # None: all but 1
    train: int
    held_out: int
    weight: float  # share of the demonstrations
    style: DemonstrationStyle = NEAR


LEVELS: Mapping[str, Level] = {
    "read off": Level((5, 7, 11, 13, 17), (1,), train=20, held_out=8, weight=0.13),
    "5": Level((5,), None, train=4, held_out=4, weight=0.27),
    "7": Level((7,), None, train=10, held_out=10, weight=0.28),
    "11": Level((11,), None, train=16, held_out=24, weight=0.19),
    "13": Level((13,), None, train=9, held_out=12, weight=0.09),
    "47": Level((47,), (2, 3), train=4, held_out=4, weight=0.005, style=FAR),
    "97": Level((97,), (2, 3), train=33, held_out=10, weight=0.035, style=FAR),
}


def split(rng: random.Random) -> tuple[Split, dict[str, list[Problem]]]:
    """Return the split, and the problems of each level that may be demonstrated: all that are not held out."""
    train: list[Problem] = []
    held_out: list[Problem] = []
    shown: dict[str, list[Problem]] = {}
    for name, level in LEVELS.items():
        shuffled = [problem for p in level.moduli for problem in problems(p, level.multipliers)]
        rng.shuffle(shuffled)
        held_out += shuffled[: level.held_out]
        train += shuffled[level.held_out : level.held_out + level.train]
        shown[name] = shuffled[level.held_out :]
    demonstrated = tuple(sorted(problem for members in shown.values() for problem in members))
    return Split(tuple(train), tuple(held_out), demonstrated), shown


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write every file below `folder`. Returns the number of records of each JSON-lines file."""
    chosen, members = split(random.Random(f"split-{seed}"))
    rng = random.Random(f"demonstrations-{seed}")
    names = rng.choices(list(LEVELS), [level.weight for level in LEVELS.values()], k=demonstrations)
    drawn = ((rng.choice(members[name]), LEVELS[name].style) for name in names)
    shown = ((problem, demonstrate(problem, style, rng)) for problem, style in drawn)
    return write_files(folder, MODEL, chosen, shown)


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=DEMONSTRATIONS)
