"""The judge's view of the program's objects. Owns which operations reach the program, and which never do.

A `Remote` stands for an object that is not plain data. Asking it for data is safe, because the judge compares; asking
it to compare itself is not. So it never sees an expected value: it is unequal to everything but other Remotes, and has
no arithmetic and no order with plain values.
"""

import builtins
import io
import json
import pickle
from collections.abc import Iterator
from typing import Any

from . import wire

_PREDICATES = {"startswith", "endswith"} | {
    name for kind in (str, bytes, set) for name in dir(kind) if name.startswith("is")
}


class UngradableError(Exception):
    """The tests need an operation that cannot cross the pipe; the program is not at fault."""


class ProgramEndedError(Exception):
    """The program's process has ended."""


class ProgramError(Exception):
    """The program raised something other than an Exception (SystemExit), or one that cannot be rebuilt here."""


class CandidateLink:
    """Asks the program, one question at a time."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[int, type[Exception]] = {}

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Return the answer as data or a Remote; raise what the program raised."""
        payload = io.BytesIO()
        try:
            _ProxyPickler(payload, self._errors).dump((operation, arguments))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UngradableError(f"the tests hand the program what cannot be sent to it: {error}") from error
        try:
            wire.send(self._requests, payload.getvalue())
            reply = json.loads(wire.receive(self._answers))
        except (EOFError, OSError) as error:
            raise ProgramEndedError("ended before its last line (left early, or killed by a limit)") from error
        kind = reply[0]
        if kind == "stop":
            raise StopIteration
        if kind == "raise":
            raise self._exception(*reply[1:])
        for position, now in reply[2]:
            _assign(arguments[1][position], self._decode(now))
        return self._decode(reply[1])

    def _decode(self, data: Any) -> Any:
        return wire.decode(data, self._remote, self._error)

    def _remote(self, reference: int) -> "Remote":
        return self._remotes.setdefault(reference, Remote(self, reference))

    def _error(self, ancestry: list[Any]) -> type[Exception]:
        """Return a class of the judge's own for each of the program's exceptions, so that tests can catch it. Built-in
        ones stay, except those that would end the judge."""
        for position, (name, reference) in enumerate(ancestry):
            if reference is not None:
                if reference not in self._errors:
                    self._errors[reference] = type(str(name), (self._error(ancestry[position + 1 :]),), {})
                return self._errors[reference]
            known = getattr(builtins, str(name), None)
            if isinstance(known, type) and issubclass(known, Exception) and known is not StopIteration:
                return known
        return ProgramError

    def _exception(self, kind: Any, arguments: Any, explained: Any) -> Exception:
        raised = self._decode(kind)
        try:
            error: Exception = raised(*self._decode(arguments))
        except Exception:  # its constructor takes other arguments
            error = ProgramError(str(explained))
        error.explained = str(explained)  # type: ignore[attr-defined]
        return error


class _ProxyPickler(pickle.Pickler):
    """Sends the program's own objects back as references, so that they can always be sent."""

    def __init__(self, stream: io.BytesIO, errors: dict[int, type[Exception]]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._references = {id(kind): reference for reference, kind in errors.items()}

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is Remote:
            return object.__getattribute__(obj, "_reference")
        return self._references.get(id(obj))


class Remote:
    """An object of the program."""

    __slots__ = ("_link", "_reference")

    def __init__(self, link: CandidateLink, reference: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_reference", reference)

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name != "__name__") or name in _PREDICATES:
            # Not the program's: protocols of copy, pickle and numpy, and predicates. Tests that check text or a set
            # mean the built-in method, not any method of that name.
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", arguments, named)

    def __eq__(self, other: object) -> bool:
        return other is self or (type(other) is Remote and _ask(self, "equal", other) is True)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_reference"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __dir__(self) -> list[str]:
        return list(_ask(self, "dir"))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "iter")
        return iterator if iterator is self else iter(iterator)

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __contains__(self, item: Any) -> bool:
        return any(item is mine or item == mine for mine in self)  # the program never sees the wanted item

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and _ask(instance, "isinstance", self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        return type(subclass) is Remote and _ask(subclass, "issubclass", self) is True

    def __neg__(self) -> Any:
        return _ask(self, "neg")

    def __abs__(self) -> Any:
        return _ask(self, "abs")


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    return object.__getattribute__(remote, "_link").ask(operation, remote, *arguments)


def _between_remotes(operation: str) -> Any:
    def method(self: Remote, other: Any) -> Any:
        return _ask(self, operation, other) if type(other) is Remote else NotImplemented

    return method


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Remote, f"__{_name}__", _between_remotes(_name))


def _assign(old: Any, new: Any) -> None:
    """Apply the program's in-place change of an argument."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
