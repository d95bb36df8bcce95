"""Tools as an environment: reads calls out of a turn, calls the user's functions, and answers as the role `tool`.

The format is Hermes', which Qwen's chat templates ask for too: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, any number of them in a turn. A turn without a call ends the episode. What the model does wrong,
and what a tool raises, it is told. Imports nothing of Paceline: it runs in the environment's child.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def calls_in(text: str) -> list[str]:
    """What stands in the call tags of a turn, as it was written. A last one need not be closed."""
    return [found.strip() for found in _CALL.findall(text)]


class Tools:
    """The environment: keeps no state of its own between turns."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = dict(functions)

    def reset(self, record: Mapping[str, Any]) -> None:
        """The record's prompt says everything."""

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        answers = [{"role": "tool", "content": await self._answer(call)} for call in calls_in(action)]
        return answers, 0.0, not answers

    async def _answer(self, written: str) -> str:
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(arguments, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, AttributeError):
            return 'error: a call must be JSON like {"name": "...", "arguments": {...}}'
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {name!r}, only {', '.join(self._functions)}"
        try:
            value = function(**arguments)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value, default=str)


def schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat templates are told of it (OpenAI's form): from its signature, type hints and docstring."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    required = [key for key, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.cleandoc(function.__doc__ or ""),
            "parameters": {
                "type": "object",
                "properties": {key: _type_of(hints.get(key)) for key in parameters},
                "required": required,
            },
        },
    }


def _type_of(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_type_of(one) for one in inner if one is not type(None)]
        return kinds[0] if len(kinds) == 1 else {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin not in _TYPES:
        return {}  # anything
    made: dict[str, Any] = {"type": _TYPES[origin]}
    if origin is list and inner:
        made["items"] = _type_of(inner[0])
    return made
