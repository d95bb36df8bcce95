"""The task "guess and check": find x with a * x = c (mod p).

Owns the 264 problems, their split, the wording of prompts and demonstrations, and the words of the tokenizer.
Never touches files, the network or global randomness: generators are passed in.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from examples.words import EOS, PAD, UNK

PRIMES = (5, 7, 11, 13)
LARGEST_NUMBER = 199
VOCAB_SIZE = 228
# Every word includes its own blanks, so that decoding is plain concatenation and returns the exact text.
WORDS = (
    *("find x: ", " * x = ", " (mod ", ")"),
    *("\ntry ", ": ", " is ", ", off ", " by ", ", not ", ", so x = "),
    *("\n\\boxed{", "}"),
)


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """a * x = c (mod p) with 2 <= a < p and 1 <= c < p; p is prime, so exactly one x in [1, p) solves it."""

    p: int
    a: int
    c: int

    @property
    def answer(self) -> int:
        return self.c * pow(self.a, -1, self.p) % self.p

    @property
    def prompt(self) -> str:
        return f"find x: {self.a} * x = {self.c} (mod {self.p})"

    @property
    def uid(self) -> str:
        return f"p{self.p}-a{self.a}-c{self.c}"

    def attempt(self, x: int) -> str:
        """Write out one try: the product, its residue, its distance from c, and the verdict.

        The verdict repeats x: boxing it is then a copy from the token before, which small models learn reliably.
        """
        residue = self.a * x % self.p
        verdict = ", so x = " if residue == self.c else ", not "
        return f"\ntry {x}: {self.a * x} is {residue}, off {self.c} by {abs(residue - self.c)}{verdict}{x}"


@dataclass(frozen=True, slots=True)
class DemonstrationStyle:
    """The behaviour of demonstrations. They check correctly but are impatient, which RL can remove."""

    give_up: float = 0.2  # probability of boxing a random number after a failed try
    with_replacement: float = 0.4  # share of demonstrations that may try the same value twice
    max_tries: int = 16  # 12 tokens each: a response stays below 200 tokens
    reach: int = LARGEST_NUMBER  # no larger value is tried or guessed
    stubborn: float = 0.0  # share of demonstrations that never give up


@dataclass(frozen=True, slots=True)
class Split:
    """`train` and `held_out` are disjoint, and demonstrations never use a held-out problem."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    demonstrated: tuple[Problem, ...]  # all that is not held out


def problems(p: int, multipliers: Iterable[int] | None = None) -> list[Problem]:
    """Return all problems of modulus p. multipliers: values of a, by default all but 1, where x can be read off."""
    return [Problem(p, a, c) for a in multipliers or range(2, p) for c in range(1, p)]


def split(rng: random.Random, *, train: dict[int, int], held_out: dict[int, int]) -> Split:
    """Draw `held_out[p]` and `train[p]` problems of every modulus p. Raises ValueError if there are too few."""
    chosen_train: list[Problem] = []
    chosen_held_out: list[Problem] = []
    rest: list[Problem] = []
    for p in PRIMES:
        shuffled = problems(p)
        rng.shuffle(shuffled)
        first, last = held_out[p], held_out[p] + train[p]
        if last > len(shuffled):
            raise ValueError(f"modulus {p} has {len(shuffled)} problems, but {last} were asked for")
        chosen_held_out += shuffled[:first]
        chosen_train += shuffled[first:last]
        rest += shuffled[last:]
    return Split(tuple(chosen_train), tuple(chosen_held_out), tuple(sorted(chain(chosen_train, rest))))


def demonstrate(problem: Problem, style: DemonstrationStyle, rng: random.Random) -> str:
    """Return one response: tries until one fits (or patience or `max_tries` ends), then a boxed number.

    If a is 1, the first try is c. After all values within reach were tried, they are tried again.
    """
    if problem.a == 1:
        return problem.attempt(problem.c) + f"\n\\boxed{{{problem.c}}}"
    values = range(1, min(problem.p, style.reach + 1))
    untried = list(values)
    rng.shuffle(untried)
    repeats = rng.random() < style.with_replacement
    stubborn = style.stubborn > 0 and rng.random() < style.stubborn
    lines: list[str] = []
    for _ in range(style.max_tries):
        if not untried:
            untried = rng.sample(values, len(values))
        x = rng.choice(values) if repeats else untried.pop()
        lines.append(problem.attempt(x))
        if x == problem.answer:
            return "".join(lines) + f"\n\\boxed{{{x}}}"
        if not stubborn and rng.random() < style.give_up:
            break
    return "".join(lines) + f"\n\\boxed{{{rng.choice(values)}}}"


def vocabulary() -> list[str]:
    """Return 228 words in the order of their ids: special tokens, words, numbers 0 to 199, and reserved ones to fill
    up."""
    words = [PAD, EOS, UNK, *WORDS, *(str(n) for n in range(LARGEST_NUMBER + 1))]
    return words + [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(words))]
