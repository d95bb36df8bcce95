"""The game "treasure": a player walks over an island, learns at every step the treasure's direction, and has few steps.

Owns the rules, the wording, the play of demonstrations, and the words of the tokenizer. `Island` is the environment
that `environment.factory` names; Paceline only needs its `reset` and `step`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.words import EOS, PAD, UNK

SIZE = 9  # places in a row of the island
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
PROMPT = "find the treasure"
WORDS = (PROMPT, "\nit lies", "\nwhat? it lies", "\n> ", "go", *(f" {way}" for way in STEPS))


@dataclass(frozen=True, slots=True, order=True)
class Level:
    """The begin of the walk, and the place of the treasure: columns and rows of the island, from 0."""

    x: int
    y: int
    treasure_x: int
    treasure_y: int

    @property
    def distance(self) -> int:
        """The number of steps to the treasure."""
        return abs(self.treasure_x - self.x) + abs(self.treasure_y - self.y)

    @property
    def record(self) -> dict[str, Any]:
        return {"id": f"{self.x}{self.y}-{self.treasure_x}{self.treasure_y}", "prompt": PROMPT, **asdict(self)}


class Island:
    """One game. An action is "go north". The treasure gives a reward of 1 and ends the game; all else gives 0."""

    def reset(self, record: Mapping[str, Any]) -> str:
        self._x, self._y = record["x"], record["y"]
        self._treasure = record["treasure_x"], record["treasure_y"]
        return self._heard()

    def step(self, action: str) -> tuple[str, float, bool]:
        way = action.removeprefix("go ")
        if way not in STEPS or not action.startswith("go "):
            return self._heard("what? "), 0.0, False
        dx, dy = STEPS[way]
        self._x, self._y = (min(max(at, 0), SIZE - 1) for at in (self._x + dx, self._y + dy))  # the sea surrounds it
        if (self._x, self._y) == self._treasure:
            return "", 1.0, True
        return self._heard(), 0.0, False

    def _heard(self, before: str = "") -> str:
        x, y = self._treasure
        ways = [
            *(["north"] if y > self._y else ["south"] if y < self._y else []),
            *(["east"] if x > self._x else ["west"] if x < self._x else []),
        ]
        return f"\n{before}it lies {' '.join(ways)}\n> "


def levels(distances: Sequence[int]) -> list[Level]:
    """Return all levels with the treasure at these distances."""
    places = range(SIZE)
    found = (Level(x, y, tx, ty) for x in places for y in places for tx in places for ty in places)
    return [level for level in found if level.distance in distances]


def demonstrate(level: Level, rng: random.Random, *, turns: int, careless: float) -> tuple[str, list[str]]:
    """Return the prompt, and a game as alternating turns and observations. The player goes toward the treasure or, with
    probability `careless`, anywhere."""
    island = Island()
    heard = island.reset(level.record)
    prompt, parts = PROMPT + heard, list[str]()
    for turn in range(turns):
        told = [way for way in STEPS if way in heard]
        parts.append(f"go {rng.choice(list(STEPS) if rng.random() < careless else told)}")
        heard, _, done = island.step(parts[-1])
        if done or turn == turns - 1:
            break
        parts.append(heard)
    return prompt, parts


def vocabulary() -> list[str]:
    """Return the words in the order of their ids: special tokens, words, and reserved ones to fill up."""
    words = [PAD, EOS, UNK, *WORDS]
    return words + [f"<reserved_{i}>" for i in range(-len(words) % 8)]
