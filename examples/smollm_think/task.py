"""The task "think aloud": stories of things that come and go, most with one or two steps and a few with up to eighteen.

Owns the stories, the wording of prompts and demonstrations, and the distribution of lengths. Never touches files, the
network or global randomness: generators are passed in.
"""

import random
from dataclasses import dataclass

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo"),
    *("Ida", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul"),
)
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "pencils", "marbles", "stickers", "cups")
# Number of steps of a story: stories per hundred. Responses get a long tail.
STEPS = {1: 50, 2: 23, 3: 10, 4: 4, 6: 4, 8: 3, 12: 3, 18: 3}
LARGEST_START, LARGEST_CHANGE, LARGEST = 20, 9, 99
# Probability that a demonstration ends after a step that is not the last, which RL can remove.
GIVE_UP = 0.12

GAINS = ("{n} gets {a} more.", "A friend gives {n} {a} {t}.", "{n} buys {a} {t}.", "{n} finds {a} {t}.")
LOSSES = ("{n} loses {a}.", "{n} gives away {a} {t}.", "{n} sells {a} {t}.", "A friend takes {a} of them.")
OPENINGS = (
    "{n} starts with {x} {t}.",
    "We begin with {x}.",
    "At first there are {x} {t}.",
    "Let us count: there are {x}.",
)
ADDITIONS = (
    "Next, add {a}: {x} + {a} = {y}.",
    "{a} more {t} come in, so {x} + {a} = {y}.",
    "Now there are {y} {t}, because {x} + {a} = {y}.",
    "That is {x} + {a} = {y} {t}.",
    "With {a} more, {n} has {x} + {a} = {y}.",
)
SUBTRACTIONS = (
    "Next, take away {a}: {x} - {a} = {y}.",
    "{a} {t} are gone, so {x} - {a} = {y}.",
    "Now there are {y} {t} left, because {x} - {a} = {y}.",
    "That leaves {x} - {a} = {y} {t}.",
    "Without those {a}, {n} has {x} - {a} = {y}.",
)


@dataclass(frozen=True, slots=True)
class Story:
    """A person has `start` things, and then `changes` of them, each positive or negative and never below one thing."""

    name: str
    thing: str
    start: int
    changes: tuple[int, ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> "Story":
        (steps,) = rng.choices(list(STEPS), list(STEPS.values()))
        start = total = rng.randint(2, LARGEST_START)
        changes = []
        for _ in range(steps):
            change = rng.randint(1, LARGEST_CHANGE)
            gains = total <= change or (rng.random() < 0.6 and total + change <= LARGEST)
            changes.append(change if gains else -change)
            total += changes[-1]
        return cls(rng.choice(NAMES), rng.choice(THINGS), start, tuple(changes))

    @property
    def answer(self) -> int:
        return self.start + sum(self.changes)

    def prompt(self, rng: random.Random) -> str:
        said = [f"{self.name} has {self.start} {self.thing}."]
        for change in self.changes:
            said.append(rng.choice(GAINS if change > 0 else LOSSES).format(n=self.name, t=self.thing, a=abs(change)))
        return " ".join((*said, f"How many {self.thing} does {self.name} have now?"))

    def thoughts(self, rng: random.Random) -> str:
        """Return a demonstration: every calculation is right, but some give up early and answer with what they have."""
        total = self.start
        said = [rng.choice(OPENINGS).format(n=self.name, t=self.thing, x=total)]
        for i, change in enumerate(self.changes):
            if i and rng.random() < GIVE_UP:
                break
            wording = rng.choice(ADDITIONS if change > 0 else SUBTRACTIONS)
            after = total + change
            said.append(wording.format(n=self.name, t=self.thing, x=total, a=abs(change), y=after))
            total = after
        return " ".join((*said, f"Answer: {total}"))
