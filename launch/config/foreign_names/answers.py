"""How a row of the table says what another trainer's key is here.

An answer is our overrides ("eval.samples=4"), or a sentence where there is nothing to write, or another thing to do.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.config.schema import render

ABSENT = "is not in this version"
LEFT = "leave it out"
Written = Mapping[str, Any]  # every value of the document by its whole key, as `plain` has it
Answer = Callable[[Any, Written], str]


class Row(NamedTuple):
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


def same(*keys: str) -> Answer:
    """The same value under our key or keys."""
    return lambda value, _: put(*((key, value) for key in keys))


def words(answers: Mapping[Any, str], otherwise: str) -> Answer:
    """By value, texts in lower case; `otherwise` for all others."""

    def answer(value: Any, _: Written) -> str:
        if isinstance(value, str):
            value = value.lower()
        return answers.get(value, otherwise) if isinstance(value, str | int | float) else otherwise

    return answer


def say(text: str) -> Answer:
    return lambda value, _: text


def switch(on: str, off: str = f"{LEFT}: that is how it is here") -> Answer:
    return words({True: on, False: off}, on)


def unless(*usual: Any, otherwise: str = ABSENT) -> Answer:
    """Nothing to write for these values, and for what switches off; all others are not in this version."""
    off = (*usual, None, False, "", 0, [], {})
    return lambda value, _: f"{LEFT}: that is how it is here" if value in off else otherwise


ALWAYS = say(f"{LEFT}: that is always so here")
NOT_HERE = unless("disabled")
MACHINERY = say(f"{LEFT}: there is no such choice here")
