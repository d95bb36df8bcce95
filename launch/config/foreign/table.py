"""The rows of names.yaml as objects. Owns the fields of a row; docs/reference/coming_from.md prints the table.

A row has names (`verl`, `trl`, `others`; `beside`: keys beside its examples) and one answer:

    key: learner.packing        the same value under our key
    say: "leave it out: ..."    the same words whatever the value
    values: {...}               by value, texts in lower case; `otherwise` for all others
    unless: [1]                 leave it out for these values, and for values that mean off; `otherwise` for all others
    rule: [clip, low, high]     a function of launch.config.foreign.rules, and what else it is called with

`only_with: adapters` restricts the answer to that condition. `null_too: true` answers null as well.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.config.document import parse_document, parse_value
from launch.config.foreign.answers import HERE, LEFT, Answer, ForeignName, Written, put
from launch.config.foreign.rules import CONDITIONS, RULES

_FILE = Path(__file__).with_name("names.yaml")
_AS_HERE = f"{LEFT}: {HERE}"
_OFF: tuple[Any, ...] = ("", 0, [], {})  # values that mean off, besides null and false


@functools.cache
def rows() -> tuple[ForeignName, ...]:
    """Return all rows in the file's order. Read only when a key is unknown, never for a correct configuration."""
    document = parse_document(_FILE.read_text(encoding="utf-8"), _FILE.name)
    assert not document.issues, document.issues
    return tuple(_row(dict(entry)) for section in document.values.values() for entry in section)


def _row(entry: dict[str, Any]) -> ForeignName:
    verl, trl, others, beside = (tuple(entry.pop(name, ())) for name in ("verl", "trl", "others", "beside"))
    null = entry.pop("null_too", False)
    row = ForeignName(verl, trl, _conditional(entry), others=others, beside=beside, null=null)
    assert not entry, entry
    return row


def _conditional(entry: dict[str, Any]) -> Answer:
    condition = entry.pop("only_with", None)
    answer = _answer(entry)
    if condition is None:
        return answer
    return lambda value, written: CONDITIONS[condition](written) or answer(value, written)


def _answer(entry: dict[str, Any]) -> Answer:
    match entry:
        case {"key": str(key)}:
            del entry["key"]
            return lambda value, _: put((key, value))
        case {"say": str(text)}:
            del entry["say"]
            return lambda value, _: text
        case {"values": dict(values), "otherwise": str(otherwise)}:
            del entry["values"], entry["otherwise"]
            return _by_value({parse_value(value): said for value, said in values.items()}, otherwise)
        case {"unless": list(usual), "otherwise": str(otherwise)}:
            del entry["unless"], entry["otherwise"]
            off = (*usual, None, False, *_OFF)
            return lambda value, _: _AS_HERE if value in off else otherwise
        case {"rule": str(name)}:
            del entry["rule"]
            return RULES[name]
        case {"rule": [str(name), *arguments]}:
            del entry["rule"]
            return lambda value, written: RULES[name](value, written, *arguments)
    raise AssertionError(f"no answer in {entry}")


def _by_value(answers: Mapping[Any, str], otherwise: str) -> Answer:
    def answer(value: Any, _: Written) -> str:
        if isinstance(value, str):
            value = value.lower()
        return answers.get(value, otherwise) if isinstance(value, str | int | float) else otherwise

    return answer
