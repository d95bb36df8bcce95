"""Answers for another trainer's key: our overrides ("eval.samples=4"), or a sentence if there is no override.

Owns the words that all answers share.
"""

import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.config.schema import render

ABSENT = "is not supported"
LEFT = "leave it out"
HERE = "Paceline behaves this way"
Written = Mapping[str, Any]  # every value of the document by its `plain` key
Answer = Callable[[Any, Written], str]


class ForeignName(NamedTuple):
    """One setting by its foreign names: whole keys of verl and names of TRL, each with an example's value. A key of
    verl that ends (or begins) in `*` stands for all keys with that beginning (or end) that have no row of their own."""

    verl: tuple[str, ...]
    trl: tuple[str, ...]
    answer: Answer
    others: tuple[str, ...] = ()  # names of other trainers, and earlier ones
    beside: tuple[str, ...] = ()  # keys beside the examples, on which their values depend
    null: bool = False  # the answer also holds for null, which otherwise counts as not written


def plain(key: str) -> str:
    """Return a key of verl as its files nest it, without Hydra's signs and the name of the largest section."""
    return key.lstrip("+").removeprefix("actor_rollout_ref.")


def last(key: str) -> str:
    return key.rpartition(".")[2]


def put(*pairs: tuple[str, Any]) -> str:
    """Join overrides, each quoted for a shell."""
    return " ".join(shlex.quote(f"{key}={render(value)}") for key, value in pairs)
