"""How a key of another trainer is answered: our overrides ("eval.samples=4"), or a sentence where there is nothing to
write, or another thing to do. Owns the words that all answers share.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.config.schema import render

ABSENT = "is not supported"
LEFT = "leave it out"
HERE = "Paceline behaves this way"
Written = Mapping[str, Any]  # every value of the document by its whole key, as `plain` has it
Answer = Callable[[Any, Written], str]


class ForeignName(NamedTuple):
    """One thing, by its names elsewhere: whole keys of verl and names of TRL, each with an example's value. A key of
    verl that ends in `*` is all that begins so and has no row of its own; a `*` at its beginning likewise."""

    verl: tuple[str, ...]
    trl: tuple[str, ...]
    answer: Answer
    others: tuple[str, ...] = ()  # names of other trainers, and earlier ones
    beside: tuple[str, ...] = ()  # what the examples stand beside: their values follow from it
    null: bool = False  # the answer is for null too, which else means: as if it were not written


def plain(key: str) -> str:
    """A key of verl as its files nest it, without Hydra's signs and the name of the one section that has most keys."""
    return key.lstrip("+").removeprefix("actor_rollout_ref.")


def last(key: str) -> str:
    return key.rpartition(".")[2]


def put(*pairs: tuple[str, Any]) -> str:
    """Overrides, each as a shell takes it."""
    return " ".join(shlex.quote(f"{key}={render(value)}") for key, value in pairs)
