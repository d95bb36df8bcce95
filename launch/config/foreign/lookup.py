"""Look up an unknown key of another trainer and its value. Owns the lookup and the page's table; names.yaml has the
names.

A key of verl is identified by its whole path, since the actor, the critic, the reward model and evaluations share last
words. A bare name (TRL's arguments are bare) is identified by its one word.
"""

import functools
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from launch.config.document import parse_value
from launch.config.foreign.answers import ABSENT, HERE, LEFT, ForeignName, last, plain
from launch.config.foreign.table import rows

UNKNOWN = "Paceline has no known equivalent (docs/reference/coming_from.md)"

_OVERRIDES = re.compile(r"'?[a-z_]+(?:\.\w+)+=")
# Sections of verl that we do not have: a key below them without a row has no answer.
_THEIRS = ("actor_rollout_ref", "actor", "ref", "critic", "reward_model", "algorithm", "trainer")


def elsewhere(key: str, value: Any, written: Mapping[str, Any]) -> tuple[str, str]:
    """Return (advice about a key of another trainer, the overrides with the same meaning), or ("", "") for an unknown
    key. `written`: all values of the document by `plain` key, since some answers follow from two of them."""
    if (row := _row(key)) is None:
        return (UNKNOWN, "") if _is_theirs(key) else ("", "")
    if value is None and not row.null:
        return f"{LEFT}: null has no effect", ""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return f"{LEFT}: its value comes from another key", ""
    said = row.answer(value, written)
    if not _OVERRIDES.match(said):
        return f"{last(key)} {said}" if said.startswith(ABSENT) else said, ""
    keys = [each.partition("=")[0] for each in said.split(" ") if "=" in each]
    close = len(keys) == 1 and last(keys[0]) == last(key)
    return (f"did you mean {said}?" if close else f"use {said}"), said


def _is_theirs(key: str) -> bool:
    return key.lstrip("+").partition(".")[0] in _THEIRS and "." in key


def _row(key: str) -> ForeignName | None:
    """Find a row by the whole path, else by the longest matching pattern. A bare name is found by its last word."""
    name = plain(key)
    paths, beginnings, bare = _names()
    if (row := paths.get(name)) is not None:
        return row
    for pattern, found in beginnings:
        if pattern.fullmatch(name):
            return found
    return None if _is_theirs(key) else bare.get(last(name))


@functools.cache
def _names() -> tuple[dict[str, ForeignName], list[tuple[re.Pattern[str], ForeignName]], dict[str, ForeignName]]:
    """Return the rows by whole path, by pattern (the longest first), and by single word."""
    paths: dict[str, ForeignName] = {}
    beginnings: dict[str, ForeignName] = {}
    bare: dict[str, ForeignName] = {}
    words: dict[str, list[ForeignName]] = {}
    for row in rows():
        for example in row.verl:
            name = plain(example.partition("=")[0])
            if "*" in name:
                assert name not in beginnings, name
                beginnings[name] = row
            else:
                assert name not in paths, name
                paths[name] = row
                words.setdefault(last(name), []).append(row)
        for name in (*(example.partition("=")[0] for example in row.trl), *row.others):
            known = beginnings if "*" in name else paths if "." in name else bare
            assert name not in known, name
            known[name] = row
    # A word of verl that is plain English, or ambiguous, is no name by itself.
    for word, found in words.items():
        if "_" in word and len({id(row) for row in found}) == 1:
            bare.setdefault(word, found[0])
    ordered = sorted(beginnings.items(), key=lambda item: (item[0].startswith("*"), -len(item[0])))
    return paths, [(_pattern(name), row) for name, row in ordered], bare


def _pattern(name: str) -> re.Pattern[str]:
    """Compile `critic.*` (all keys below critic) or `*.profiler.*` (all keys below any profiler)."""
    return re.compile(".*".join(map(re.escape, name.split("*"))))


def table() -> Iterator[str]:
    """Yield the table of docs/reference/coming_from.md as Markdown, with each example in the words of the three
    programs. Then yield the keys without a counterpart, grouped by answer."""
    yield "| verl | TRL | here |"
    yield "|---|---|---|"
    without: dict[str, list[str]] = {}
    for row in rows():
        if not row.verl and not row.trl:
            continue
        of_trl = () if row.verl else row.beside
        here = _here(row)
        if here.startswith((f"{LEFT}: Paceline ", ABSENT)):
            whatever = not here.endswith(HERE)  # the answer does not depend on the value
            examples = (each.partition("=")[0] if whatever else each for each in (*row.verl, *row.trl))
            names = (f"`{plain(each)}`" for each in examples)
            without.setdefault(here, []).extend(names)
        else:
            yield f"| {_cell(row.verl, row.beside)} | {_cell(row.trl, of_trl)} | {here} |"
    for here, listed in without.items():
        yield ""
        said, _, why = here.partition(": ")
        yield f"{said[0].upper()}{said[1:]}{f' ({why})' if why else ''}:"
        yield from textwrap.wrap(
            f"{', '.join(dict.fromkeys(listed))}.", 100, break_long_words=False, break_on_hyphens=False
        )


def _cell(examples: tuple[str, ...], beside: tuple[str, ...]) -> str:
    shown = ", ".join(f"`{plain(example)}`" for example in examples)
    others = [f"`{plain(other)}`" for other in beside if other not in examples] if examples else []
    return (shown + (f" beside {', '.join(others)}" if others else "")).replace("|", "\\|")


def _here(row: ForeignName) -> str:
    example = next((each for each in (*row.verl, *row.trl) if "=" in each), "")
    written = {plain(key): parse_value(text) for key, _, text in (each.partition("=") for each in row.beside)}
    key, _, text = example.partition("=")
    value = parse_value(text) if example else "*"
    said = row.answer(value, written | {plain(key): value})
    if said.startswith(ABSENT):
        return said
    return f"`{said}`" if _OVERRIDES.match(said) else said
