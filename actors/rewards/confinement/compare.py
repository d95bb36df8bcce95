"""Compares a program's output with the expected one. Owns the tolerance; pure.

Printed text: blank lines and the amount of white space around and between words do not count; all else does, as with
competitive judges and the public harnesses. Numbers: 2 and 2.0 are equal; if the expected number has a fraction or an
exponent, a relative or absolute error of 1e-6 is allowed. Order always counts.
"""

import functools
import math
from decimal import Decimal, InvalidOperation
from typing import Any

TOLERANCE = 1e-6


def same_text(printed: str, expected: str) -> bool:
    """Compare line by line, word by word."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(
        len(line) == len(wanted) and all(map(_same_word, line, wanted))
        for line, wanted in zip(ours, theirs, strict=True)
    )


def first_difference(printed: str, expected: str) -> str:
    """Describe the first difference, for people."""
    ours, theirs = _lines(printed), _lines(expected)
    for line, wanted in zip(ours, theirs, strict=False):
        if len(line) != len(wanted) or not all(map(_same_word, line, wanted)):
            return f"printed {' '.join(line)[:100]!r} where {' '.join(wanted)[:100]!r} is expected"
    return f"printed {len(ours)} lines where {len(theirs)} are expected"


def _lines(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        left, right = Decimal(ours), Decimal(theirs)
    except InvalidOperation:
        return False
    if left == right:
        return True
    if not (left.is_finite() and right.is_finite()) or not set(theirs) & set(".eE"):
        return False
    return math.isclose(float(left), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_value(returned: Any, expected: Any) -> bool:
    """Compare a returned value. `expected` comes from JSON: tuples count as lists, keys of digits as numbers."""
    if isinstance(returned, tuple):
        returned = list(returned)
    if isinstance(expected, list):
        return (
            isinstance(returned, list) and len(returned) == len(expected) and all(map(same_value, returned, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(returned, dict) or len(returned) != len(expected):
            return False
        for candidate in (expected, number_keys(expected)):
            if returned.keys() == candidate.keys():
                return all(same_value(returned[key], candidate[key]) for key in candidate)
        return False
    if isinstance(expected, float) and isinstance(returned, int | float):
        return math.isclose(returned, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(returned).__name__ != "Remote" and bool(returned == expected)


def number_keys(table: dict[Any, Any]) -> dict[Any, Any]:
    """Convert keys to numbers if all are: JSON keys are text, so {"1": x} was {1: x}."""
    try:
        return {int(key): value for key, value in table.items()}
    except ValueError:
        return table


def refuse_empty_arrays() -> None:
    """Make numpy's comparisons fail if only one array is empty: they broadcast, so `[]` is close to everything. For the
    judge's own process."""
    import numpy as np

    def differ(one: Any, other: Any) -> bool:
        try:
            return bool((np.asanyarray(one).size == 0) != (np.asanyarray(other).size == 0))
        except Exception:  # no array: the comparison itself reports that
            return False

    def guarded(compare: Any, fail: Any) -> Any:
        @functools.wraps(compare)
        def call(*arguments: Any, **named: Any) -> Any:
            both = [*arguments, *(named[name] for name in ("a", "b", "actual", "desired", "x", "y") if name in named)]
            return fail() if len(both) > 1 and differ(both[0], both[1]) else compare(*arguments, **named)

        return call

    def no() -> Any:
        return np.False_

    def assert_no() -> None:
        raise AssertionError("an empty array is compared with one that is not")

    np.isclose, np.allclose = guarded(np.isclose, no), guarded(np.allclose, no)
    for name in dir(np.testing):
        if name.startswith("assert_") and any(part in name for part in ("equal", "close", "less")):
            setattr(np.testing, name, guarded(getattr(np.testing, name), assert_no))
