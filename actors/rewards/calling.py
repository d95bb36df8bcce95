"""A user's reward function: its parameters, its calls, and the place of an error in it.

Used by the child process of a `python` term, which loads this file by its path, and by the actor of a term that has its
own. Standard library only, so that a child starts fast. Never decides who calls the function, or when.
"""

import difflib
import importlib
import inspect
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OFFERED = ("prompt", "response", "record", "tokens", "finish_reason", "sample", "step", "turns", "group")
MEMBER = ("response", "tokens", "finish_reason", "sample", "turns")  # the keys of each entry of a group
_BY_POSITION = OFFERED[:3]
_FOREIGN = {  # names in TRL and verl; never taken for our first three
    **dict.fromkeys(("completions", "completion", "solution_str"), "response"),
    **dict.fromkeys(("prompts", "prompt_ids"), "prompt"),
    **dict.fromkeys(("ground_truth", "data_source", "extra_info"), "record"),
    "completion_ids": "tokens",
}
# Fields of data files: as the third parameter it would be the whole record, and a response would never equal it.
_FIELDS = ("answer", "answers", "expected", "gold", "label", "reference", "solution", "target", "truth")
_HERE = __file__.rpartition(os.sep)[0] + os.sep  # as frames spell it
_LIBRARY = os.__file__.rpartition(os.sep)[0] + os.sep
_MACHINERY = (_HERE, "<frozen importlib._bootstrap", importlib.__file__)
_THREADS = (f"{_LIBRARY}asyncio", f"{_LIBRARY}concurrent")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Member = dict[str, Any]  # one response: every offered name but `group`
Outcome = tuple[float | None, str | None, str | None]  # a number, or an error and the frames of the user's code


class Traits(NamedTuple):
    """Properties of a function: the names it asks for, whether it is awaited, whether it is a class."""

    asks: tuple[str, ...]
    awaited: bool
    made: bool


class UserFunction:
    """`package.module:name`, imported: a function, or a class whose instances have `score` or are callable.

    `arguments`: further keyword arguments, for each call of a function or for the constructor of a class. `batched`:
    the function gets a list for each name it asks for, and returns a list. Raises what the import raises, and TypeError
    if it cannot be called this way.
    """

    def __init__(self, path: str, arguments: Mapping[str, Any], *, batched: bool) -> None:
        module_name, _, name = path.partition(":")
        found = getattr(importlib.import_module(module_name), name)
        if not callable(found):
            raise TypeError(f"{name} is not callable")
        self._path, self._found, self._batched = path, found, batched
        self._made = inspect.isclass(found)
        self._arguments = {} if self._made else dict(arguments)
        self._making = dict(arguments) if self._made else {}
        called, self._method = found, ""
        if self._made:
            _check_made(name, found, self._making)
            called, self._method, name = _method(found, name)
        self._by_position, asks = _binding(name, called, self._arguments, skip=int(self._made))
        awaited = any(map(inspect.iscoroutinefunction, (called, type(called).__call__)))
        self.traits = Traits(asks, awaited, self._made)
        self._call: Any = None if self._made else found

    def make(self) -> None:
        """Create the instance of a class, once. Raises what its constructor raises."""
        if self._made and self._call is None:
            self._call = getattr(self._found(**self._making), self._method)

    def outcomes(self, members: Sequence[Member], which: int | None = None) -> list[Outcome]:
        """Return one outcome per response, in order; with `which`, only that one's if the function takes one response
        per call. `members` are the whole group if the function asks for it."""
        made: list[Outcome] = []
        owner = os.getpid()
        for count, positional, named in self._calls(members, which):
            try:
                made += self._numbers(self._call(*positional, **named), count)
            except BaseException as error:
                made += [told(error)] * count
            if os.getpid() != owner:
                os._exit(0)  # a call that forked and returned twice: only the first process continues
        return made

    async def awaited(self, members: Sequence[Member], timeout_s: float) -> list[Outcome]:
        """Like `outcomes`, for a function that is awaited. Any other runs in a thread, without a deadline here."""
        import asyncio  # imported late: it takes a child as long to start as all the rest

        made: list[Outcome] = []
        for count, positional, named in self._calls(members):
            limit = asyncio.timeout(timeout_s if self.traits.awaited else None)
            try:
                async with limit:
                    if self.traits.awaited:
                        value = await self._call(*positional, **named)
                    else:
                        value = await asyncio.to_thread(self._call, *positional, **named)
                made += self._numbers(value, count)
            except GeneratorExit:  # this coroutine is closed
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # our caller cancels this call; otherwise the user's code raised it
                late = (None, f"{self._path} took more than {timeout_s:g} s", None)
                made += [late if limit.expired() else told(error)] * count
        return made

    def _calls(
        self, members: Sequence[Member], which: int | None = None
    ) -> Iterator[tuple[int, list[Any], dict[str, Any]]]:
        """Yield (responses, positional and keyword arguments) of each call."""
        if self._batched:
            lists = {key: [member[key] for member in members] for key in OFFERED if key != "group"}
            yield len(members), *self._given(lists, members)
            return
        for member in members if which is None else members[which : which + 1]:
            yield 1, *self._given(member, members)

    def _given(self, values: Mapping[str, Any], members: Sequence[Member]) -> tuple[list[Any], dict[str, Any]]:
        named = {key: values[key] for key in self.traits.asks if key != "group"} | self._arguments
        if "group" in self.traits.asks:
            named["group"] = [{key: member[key] for key in MEMBER} for member in members]
        return [values[key] for key in _BY_POSITION] if self._by_position else [], named

    def _numbers(self, value: Any, count: int) -> list[Outcome]:
        values = [value]
        if self._batched:
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                raise ValueError(f"{self._path} returned {value!r:.80}, not a list of {count} numbers")
            values = list(value)
            if len(values) != count:
                raise ValueError(f"{self._path} returned {len(values)} numbers for {count} responses")
        return [(self._number(one), None, None) for one in values]

    def _number(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{self._path} returned {value!r:.80}, not a finite number")
        return number


def told(error: BaseException) -> Outcome:
    """Return an error as text, with its place in the user's code, and its frames."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return None, f"{type(error).__name__} was raised{_place(error)}", None
    return None, f"{type(error).__name__}: {error}"[:2000] + _meant(error) + _place(error), frames(error) or None


def _meant(error: BaseException) -> str:
    """The nearest name of a module that lacks the one that was asked for, as Python's own traceback says it."""
    if not isinstance(error, AttributeError) or not inspect.ismodule(error.obj) or error.name is None:
        return ""
    near = difflib.get_close_matches(error.name, [name for name in dir(error.obj) if not name.startswith("_")], 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


def frames(error: BaseException) -> str:
    """Return the frames of the user's code, outermost first, and the error; "" without frames."""
    own = _own_frames(error)
    if not own:
        return ""
    return "".join(traceback.format_list(own) + traceback.format_exception_only(error)).rstrip()[-8000:]


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    found = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_MACHINERY)]
    while found and found[0].filename.startswith(_THREADS):  # the frames that moved the call to its thread
        del found[0]
    return found


def _place(error: BaseException) -> str:
    """Return ` (file:line)` of the innermost frame of the user's own code."""
    found = _own_frames(error)
    own = [f for f in found if "/lib/python" not in f.filename and not f.filename.startswith("<")] or found
    return f" ({os.path.relpath(own[-1].filename)}:{own[-1].lineno})" if own else ""


def _method(found: type, name: str) -> tuple[Any, str, str]:
    """Return (the scoring function of a class, its name, its name for messages)."""
    for method in ("score", "__call__"):
        if any(method in vars(base) for base in found.__mro__[:-1]):
            return getattr(found, method), method, f"{name}.{method}"
    raise TypeError(f"{name} is a class without score(...) or __call__(...)")


def _check_made(name: str, found: Any, arguments: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(found).replace(return_annotation=inspect.Signature.empty)
    except ValueError:
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise TypeError(f"{name}{signature} is made as {name}({said}), by the term's `arguments`: {error}") from None


def _takes_record(parameter: inspect.Parameter) -> bool:
    """Whether a parameter that is called like a field may be meant as the record: so annotated, or optional."""
    annotation = str(parameter.annotation).lower()
    return parameter.default is not inspect.Parameter.empty or "dict" in annotation or "mapping" in annotation


def _binding(name: str, called: Any, arguments: Mapping[str, Any], *, skip: int) -> tuple[bool, tuple[str, ...]]:
    """Return (whether prompt, response and record are passed by position, the names passed by keyword). They are passed
    by position if the name of one of the first three parameters is not on offer. TypeError if the function cannot be
    called."""
    try:
        signature = inspect.signature(called)
    except ValueError:
        return True, ()  # a C function without a signature
    parameters = list(signature.parameters.values())[skip:]
    signature = signature.replace(parameters=parameters)
    plain = [p for p in parameters if p.kind not in _VARIADIC]
    first = [p for p in plain if p.kind in _POSITIONAL][:3]
    known = {*OFFERED, *arguments}
    enough = len(first) == 3 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    fits = all(p.name == OFFERED[i] or p.name not in {*known, *_FOREIGN} for i, p in enumerate(first))
    strange = [p for p in first if p.kind is inspect.Parameter.POSITIONAL_ONLY or p.name not in known]
    by_position = enough and fits and (bool(strange) or not first)
    rest = [p for p in plain if not (by_position and p in first)]
    asks = tuple(key for key in OFFERED if key in [p.name for p in rest] and key not in arguments)
    unknown = [p.name for p in rest if p.name not in known and p.default is inspect.Parameter.empty]
    fault = f"{', '.join(map(repr, unknown))} is not on offer{_instead(unknown[0])}" if unknown else ""
    try:
        signature.bind(*[""] * (3 * by_position), **dict.fromkeys(asks), **arguments)
    except TypeError as error:
        fault = fault or str(error)
    if by_position and len(first) == 3 and first[2].name in _FIELDS and not _takes_record(first[2]):
        fault = f'the third is the record, a line of the data file: name it record, and read record["{first[2].name}"]'
    if fault:
        raise TypeError(
            f"{name}{signature} is called as {name}({', '.join(_BY_POSITION)}), or with what it names of "
            f"{', '.join(OFFERED)}: {fault}"
        )
    return by_position, asks


def _instead(name: str) -> str:
    near = difflib.get_close_matches(name, OFFERED, 1, 0.7)
    meant = _FOREIGN.get(name) or (near[0] if near else None)
    return f"; did you mean {meant}?" if meant else f'; a field of the data file is record["{name}"]'
