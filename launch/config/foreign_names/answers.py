"""How a row of the table says what another trainer's key is here.

An answer is our overrides ("eval.samples=4"), or a sentence where there is nothing to write, or another thing to do.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.config.schema import render

ABSENT = "is not in this version"
Written = Mapping[str, Any]  # every value of the document, by the last word of its key
Answer = Callable[[Any, Written], str]


class Row(NamedTuple):
    """One thing, by its names elsewhere: those of verl and TRL with an example's value."""

    verl: tuple[str, ...]
    trl: tuple[str, ...]
    answer: Answer
    others: tuple[str, ...] = ()  # last words of keys of other trainers


def last(key: str) -> str:
    return key.rpartition(".")[2]


def same(*keys: str) -> Answer:
    """The same value under our key or keys."""
    return lambda value, _: " ".join(f"{key}={render(value)}" for key in keys)


def words(answers: Mapping[Any, str], otherwise: str) -> Answer:
    """By value, texts in lower case; `otherwise` for all others."""

    def answer(value: Any, _: Written) -> str:
        if isinstance(value, str):
            value = value.lower()
        return answers.get(value, otherwise) if isinstance(value, str | int | float) else otherwise

    return answer


def say(text: str) -> Answer:
    return lambda value, _: text


def switch(on: str, off: str = "leave it out: that is how it is here") -> Answer:
    return words({True: on, False: off}, on)


ALWAYS = say("leave it out: that is always so here")
NOT_HERE = say(ABSENT)
