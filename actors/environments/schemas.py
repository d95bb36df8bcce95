"""JSON schema of a tool for chat templates, from its function's signature, type hints and docstring.

The form is the one that models are trained with, that of `transformers.utils.get_json_schema`, wherever that accepts
the function. Where it refuses (no docstring, an argument without description, a user's own type), the schema has less
information. Imports nothing of Paceline, because it runs in the environment's child.
"""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_TYPES = {**_SCALARS, list: "array", tuple: "array", dict: "object"}
_SECTION = re.compile(r"(Args|Returns|Raises):\s*(.*)")
_ARGUMENT = re.compile(r"(\s*)(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\s*\)$", re.IGNORECASE)


def schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the tool in OpenAI's form. Raises errors from reading the type hints."""
    hints = typing.get_type_hints(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = {key: one for key, one in inspect.signature(function).parameters.items() if one.kind not in variadic}
    sections = _sections(inspect.getdoc(function) or "")
    described = _arguments(sections["Args"])
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {key: _described(type_of(hints.get(key, Any)), described.get(key)) for key in known},
    }
    if required := [key for key, parameter in known.items() if parameter.default is inspect.Parameter.empty]:
        parameters["required"] = required
    made = {"name": name, "description": "\n".join(sections[""]).strip(), "parameters": parameters}
    if returned := type_of(hints.get("return", Any)):
        made["return"] = _described(returned, "\n".join(sections["Returns"]).strip() or None)
    return {"type": "function", "function": made}


def type_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint; {}: any type, or one that JSON cannot express."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _one_of([member.value for member in hint])
        return {"type": _TYPES[hint]} if hint in _TYPES else {}
    if origin in (typing.Union, types.UnionType):
        return _any_of([type_of(one) for one in inner if one is not type(None)], nullable=type(None) in inner)
    if origin is typing.Literal:
        return _one_of(list(inner))
    if origin is list:
        return {"type": "array", "items": type_of(inner[0])}
    if origin is tuple:
        if inner[-1:] == (...,):
            return {"type": "array", "items": type_of(inner[0])}
        return {"type": "array", "prefixItems": [type_of(one) for one in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_of(inner[1])}
    return {}


def _one_of(values: Sequence[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_SCALARS.get(type(value), "") for value in values))
    if not kinds or "" in kinds:
        return {}
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _any_of(kinds: list[dict[str, Any]], *, nullable: bool) -> dict[str, Any]:
    """Combine alternatives: a single one, several plain types, or any others."""
    if len(kinds) == 1:
        made = kinds[0]
    elif all(list(kind) == ["type"] and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        made = {"type": names[0] if len(names) == 1 else names}
    else:
        made = {"anyOf": kinds}
    return {**made, "nullable": True} if nullable else made


def _described(kind: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Add a description; `(choices: ["a", "b"])` at its end lists the allowed values."""
    if text is None:
        return kind
    if found := _CHOICES.search(text):
        try:
            choices = json.loads(found[1])
        except ValueError:
            return {**kind, "description": text}
        kind = {**kind, "enum": [one.strip() if isinstance(one, str) else one for one in choices]}
        text = text[: found.start()].strip()
    return {**kind, "description": text}


def _sections(docstring: str) -> dict[str, list[str]]:
    """Return the lines of the description (""), and of the sections in Google's form."""
    found: dict[str, list[str]] = {"": [], "Args": [], "Returns": [], "Raises": []}
    now = ""
    for line in docstring.splitlines():
        if (head := _SECTION.fullmatch(line.strip())) is not None:
            now, line = head[1], head[2]
        found[now].append(line if now in ("", "Args") else line.strip())
    return found


def _arguments(lines: Sequence[str]) -> dict[str, str]:
    """Return descriptions by argument; a line that is indented deeper, or starts no other argument, continues the
    last."""
    found: dict[str, str] = {}
    depth, last = None, ""
    for line in filter(str.strip, lines):
        head = _ARGUMENT.fullmatch(line)
        if head is not None and (depth is None or len(head[1]) <= depth):
            depth, last = len(head[1]), head[2]
            found[last] = head[3].strip()
        elif last:
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found
