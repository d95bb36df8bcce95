"""Tools as an environment: reads calls from a turn, calls the user's functions, and answers in the role `tool`.

The format is Hermes', which Qwen's chat templates use too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
any number of them in a turn. Text in `<think>...</think>` contains no calls. A turn without a call ends the episode.
Faulty calls and exceptions of tools are reported to the model. Imports nothing of Paceline, because it runs in the
environment's child.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_TAG = re.compile("<think>|</think>|<tool_call>")
_END = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")  # end of a call that is JSON; it may be unclosed
_END_OF_OTHER = re.compile(r"</tool_call>|(?=<tool_call>)|(?=</think>)|\Z")
_JSON = json.JSONDecoder(strict=False)  # models write raw line breaks in strings
_FORM = 'error: a call must be JSON like {"name": "...", "arguments": {...}}'


def calls_in(text: str) -> list[str]:
    """Return the contents of a turn's call tags behind its thinking, as written. The last may be unclosed; a closing
    tag within a string of the call does not end it."""
    calls: list[str] = []
    place = 0
    while (tag := _TAG.search(text, place)) is not None:
        place = tag.end()
        if tag[0] == "<think>":
            end = text.find("</think>", place)
            if end < 0:
                break
            place = end + len("</think>")
        elif tag[0] == "</think>":  # the prompt opened it
            calls.clear()
        else:
            end, place = _call_at(text, place)
            calls.append(text[tag.end() : end].strip())
    return calls


def _call_at(text: str, begin: int) -> tuple[int, int]:
    """Return the end of the call that starts there, and the start of the text behind its closing tag."""
    try:
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        end = _JSON.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        end = begin
    else:
        if (closed := _END.match(text, end)) is not None:
            return end, closed.end()
    closed = _END_OF_OTHER.search(text, end)
    assert closed is not None
    return closed.start(), closed.end()


def _read(written: str) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of a call. `parameters` are arguments too; a JSON text of an object is that object, null
    is no argument. Raises ValueError, TypeError, KeyError, RecursionError."""
    call = _JSON.decode(written)
    arguments = call["arguments"] if "arguments" in call else call.get("parameters")
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or not isinstance(call["name"], str):
        raise TypeError
    return call["name"], arguments


class Tools:
    """The environment. It keeps no state between turns."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = dict(functions)

    def reset(self, record: Mapping[str, Any]) -> None:
        """Do nothing: the record's prompt is complete."""

    async def step(self, action: str) -> tuple[list[dict[str, str]], float, bool]:
        answers = [{"role": "tool", "content": await self._answer(call)} for call in calls_in(action)]
        return answers, 0.0, not answers

    async def _answer(self, written: str) -> str:
        try:
            name, arguments = _read(written)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return _FORM
        function = self._functions.get(name)
        if function is None:
            return f"error: there is no tool {name!r}, only {', '.join(self._functions)}"
        try:
            value = function(**arguments)
            value = await value if inspect.isawaitable(value) else value
            return value if isinstance(value, str) else json.dumps(value, default=str)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
