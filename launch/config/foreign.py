"""What a key of another trainer is here, with its value: looked up where a key is unknown. Owns the lookup and the
page's table; the names are in launch.config.foreign_names.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launch.config.document import parse_value
from launch.config.foreign_names import objective, running, sampling
from launch.config.foreign_names.answers import ABSENT, Answer, Row, last

ROWS = (*sampling.ROWS, *objective.ROWS, *running.ROWS)

_OVERRIDES = re.compile(r"[a-z_]+(?:\.\w+)+=")
_MOST_WORDS = 4  # of a name that is looked up


def elsewhere(key: str, value: Any, written: Mapping[str, Any]) -> tuple[str, str]:
    """(what to do about a key that is another trainer's, the overrides that say the same here); ("", "") if it is
    none that we know. `written`: everything that was, by the last word of its key: some values follow from two keys."""
    parts = key.split(".")
    for count in range(min(len(parts), _MOST_WORDS), 0, -1):
        name = ".".join(parts[-count:])
        if (answer := names().get(name)) is None:
            continue
        said = answer(value, written)
        if not _OVERRIDES.match(said):
            return f"{name} {said}" if said == ABSENT else said, ""
        keys = [each.partition("=")[0] for each in said.split(" ") if "=" in each]
        close = len(keys) == 1 and last(keys[0]) == parts[-1]
        return (f"did you mean {said}?" if close else f"here it is {said}"), said
    return "", ""


@functools.cache
def names() -> dict[str, Answer]:
    """By the last words of a key, as many as tell it apart: every ending of two words or more, and single words that
    are names and no plain English."""
    found: dict[str, Answer] = {}
    for row in ROWS:
        for example in (*row.verl, *row.trl):
            parts = example.partition("=")[0].split(".")
            least = 1 if "_" in parts[-1] or len(parts) == 1 else 2
            for count in range(least, len(parts) + 1):
                found.setdefault(".".join(parts[-count:]), row.answer)
        for other in row.others:
            found[other] = row.answer
    return found


def table() -> Iterator[str]:
    """The table of docs/coming_from.md, as Markdown lines: each example in the words of the three programs."""
    yield "| verl | TRL | here |"
    yield "|---|---|---|"
    for row in ROWS:
        if row.verl or row.trl:
            yield f"| {_cell(row.verl)} | {_cell(row.trl)} | {_here(row)} |"


def _cell(examples: tuple[str, ...]) -> str:
    shown = [example.removeprefix("actor_rollout_ref.") for example in examples]
    return ", ".join(f"`{example}`" for example in shown).replace("|", "\\|")


def _here(row: Row) -> str:
    name, _, text = (row.verl or row.trl)[0].partition("=")
    said = row.answer(parse_value(text), {last(name): parse_value(text)})
    if said == ABSENT:
        return said
    return f"`{said}`" if _OVERRIDES.match(said) else said
