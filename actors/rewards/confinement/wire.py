"""The data format between judge and candidate. Owns the frames, and how values become data.

Messages to the candidate are pickled: they come from the tests. The candidate sends plain data only: JSON with a tag on
every container, rebuilt from a fixed list of types. So none of it can run in the judge or have its own `__eq__`. Any
other object stays where it is and crosses as a reference.
"""

import os
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

PROGRAM = "<program>"  # file name of the candidate's code in tracebacks
MAX_FRAME_BYTES = 64 << 20
MESSAGE_CHARS = 500
_EXACT_INT = 1 << 53
_NUMBERS = "biufc"  # kinds of numpy's types


def send(descriptor: int, payload: bytes) -> None:
    frame = memoryview(len(payload).to_bytes(8, "little") + payload)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int) -> bytes:
    """Read the next frame. Raises EOFError if the other process has ended."""
    size = int.from_bytes(_read(descriptor, 8), "little")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a message of {size} bytes")
    return _read(descriptor, size)


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other process has ended")
        parts += part
    return bytes(parts)


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Convert a value to JSON; keep what is not plain data, and send a reference to it."""
    if value is None or value is True or value is False:
        return value
    match value:
        case int():
            return int(value) if -_EXACT_INT < value < _EXACT_INT else ["int", hex(value)]
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case list():
            return ["list", [encode(item, keep) for item in value]]
        case tuple():
            return ["tuple", [encode(item, keep) for item in value]]
        case dict():
            return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in value.items()]]
        case set():
            return ["set", [encode(item, keep) for item in value]]
        case frozenset():
            return ["frozenset", [encode(item, keep) for item in value]]
        case deque():
            return ["deque", [encode(item, keep) for item in value]]
        case bytes() | bytearray():
            return [type(value).__name__, value.hex()]
        case complex():
            return ["complex", [value.real, value.imag]]
        case range():
            return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, type) and issubclass(value, BaseException):
        return ["error", [[k.__name__, None if k.__module__ == "builtins" else keep(k)] for k in value.__mro__]]
    module, name = type(value).__module__, type(value).__name__
    if module == "numpy":
        if name != "ndarray":
            return encode(value.item(), keep) if hasattr(value, "item") else ["ref", keep(value)]
        if value.dtype.kind in _NUMBERS:
            return ["ndarray", [str(value.dtype), encode(value.tolist(), keep)]]
    elif (module, name) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return [name, str(value)]
    elif module == "datetime" and name in ("date", "time", "datetime"):
        return [name, value.isoformat()]
    elif (module, name) == ("datetime", "timedelta"):
        return [name, [value.days, value.seconds, value.microseconds]]
    return ["ref", keep(value)]


_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def decode(data: Any, remote: Callable[[int], Any], error: Callable[[Any], Any]) -> Any:
    """Rebuild a value; ValueError (or another exception) for data that encode never sends. `remote` and `error` make
    the stand-ins for an object and for a class of exceptions."""
    if data is None or isinstance(data, bool | int | float | str):
        return data
    tag, body = data
    if tag in _CONTAINERS:
        return _CONTAINERS[tag]([decode(item, remote, error) for item in body])
    match tag:
        case "dict":
            return {decode(key, remote, error): decode(item, remote, error) for key, item in body}
        case "ref":
            return remote(int(body))
        case "error":
            return error(body)
        case "int":
            return int(body, 16)
        case "bytes":
            return bytes.fromhex(body)
        case "bytearray":
            return bytearray.fromhex(body)
        case "complex":
            return complex(*body)
        case "range":
            return range(*body)
        case "ndarray":
            import numpy as np

            if (kind := np.dtype(body[0])).kind not in _NUMBERS:
                raise ValueError(f"no array has the type {kind!r:.80}")
            return np.array(decode(body[1], remote, error), dtype=kind)
        case "Decimal":
            from decimal import Decimal

            return Decimal(body)
        case "Fraction":
            from fractions import Fraction

            return Fraction(body)
        case "date" | "time" | "datetime":
            import datetime

            return getattr(datetime, tag).fromisoformat(body)
        case "timedelta":
            from datetime import timedelta

            return timedelta(*body)
    raise ValueError(f"no value has the tag {tag!r:.80}")


def explain(error: BaseException) -> str:
    """Return `ValueError: text (line 3)`; the line is the program's."""
    try:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == PROGRAM]
        text = "".join(traceback.format_exception_only(error)).strip()
    except BaseException:  # an exception that cannot even be shown
        return type(error).__name__[:MESSAGE_CHARS]
    return text[-MESSAGE_CHARS:] + (f" (line {lines[-1]})" if lines else "")


def lift_int_limit() -> None:
    """Lift the limit of 4,300 digits: programs read and print longer numbers."""
    sys.set_int_max_str_digits(0)
