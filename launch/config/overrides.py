"""Apply dotted overrides, `key=value`, to a parsed document. Knows the tree's shape; leaves values to validation."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from launch.config.document import Document, KeyPath, parse_value
from launch.config.issues import Issue
from launch.config.schema import by_name, generic

OVERRIDE = "override"


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Write each override into `document`, later ones over earlier ones. Faults are appended to its issues."""
    for text in overrides:
        name, equals, raw = text.partition("=")
        name = name.strip()
        if not equals or not name:
            document.issues.append(Issue("", f"{text!r} is not an override", OVERRIDE, "write key=value"))
            continue
        path = tuple(name.split("."))
        try:
            value = _value(name, raw)
            _assign(document, path, value)
        except ValueError as error:
            document.issues.append(Issue(name, str(error), OVERRIDE))
            continue
        _forget_below(document, path)
        document.places[path] = OVERRIDE
        _mark_below(document, path, value)


def contradictions(overrides: Sequence[str]) -> list[Issue]:
    """Return the keys that one command line sets to two values: one is a slip, and only the user knows which."""
    given: dict[str, str] = {}
    found = []
    for text in overrides:
        name, _, raw = (part.strip() for part in text.partition("="))
        if given.setdefault(name, raw) != raw:
            found.append(Issue(name, f"given as {given[name]} and as {raw}", OVERRIDE, "leave one out"))
    return found


def _value(name: str, raw: str) -> Any:
    """Parse a value as YAML. A shell removes quotes, so `run.name=7` stays text for a key that takes text."""
    value = parse_value(raw)
    key = by_name().get(generic(name))
    if key is not None and key.accepts_text and isinstance(value, bool | int | float):
        return raw.strip()
    return value


def _assign(document: Document, path: KeyPath, value: Any) -> None:
    node: Any = document.values
    for depth, part in enumerate(path[:-1], start=1):
        child = _get(node, part)
        if child is None:  # not in the file: start from the default, to keep a list's other elements
            child = _default(path[:depth])
            _put(node, part, child)
        if not isinstance(child, dict | list):
            raise ValueError(f"{'.'.join(path[:depth])} is {child!r}, it has no parts")
        node = child
    _put(node, path[-1], value)


def _get(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.get(part)
    index = _index(node, part)
    return node[index] if index < len(node) else None


def _put(node: Any, part: str, value: Any) -> None:
    if isinstance(node, dict):
        node[part] = value
        return
    index = _index(node, part)
    if index == len(node):
        node.append(value)
    else:
        node[index] = value


def _index(node: list[Any], part: str) -> int:
    if not part.isdigit() or int(part) > len(node):
        raise ValueError(f"{part!r} is no position of a list of {len(node)} (the next free one is {len(node)})")
    return int(part)


def _default(path: KeyPath) -> Any:
    key = by_name().get(generic(".".join(path)))
    default = key.default if key is not None else None
    if isinstance(default, tuple):
        return [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in default]
    return {}


def _forget_below(document: Document, path: KeyPath) -> None:
    for known in [p for p in document.places if p[: len(path)] == path]:
        del document.places[known]


def _mark_below(document: Document, path: KeyPath, value: Any) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, child in items:
        document.places[(*path, str(part))] = OVERRIDE
        _mark_below(document, (*path, str(part)), child)
