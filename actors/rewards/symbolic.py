r"""Equality of two expressions by math-verify, in the process that child_main.py runs. Loaded by its path: imports
nothing of Paceline. Owns how an expression is read, and to how many digits numbers must agree.

An expression that cannot be read as a whole has no value: no part of it may stand for it. The value of a chain of
equations is that of its last member.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import grader, verify
from math_verify.parser import get_last_eq
from sympy import Abs, Expr, Float, floor, log, nan, zoo

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs every expression that it cannot read
# Without its units, which remove letters: it reads 2 - c as "2 -", and 4m as 4.
_SPELLING = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])[A-Za-z]?i[A-Za-z]?(?![A-Za-z])")
_PLACES = 6  # decimals to which inexact numbers must agree; below 1, significant digits
_EXACT, _INEXACT = 1e-25, 1e-12  # largest relative difference of equal values, without and with decimals
_Expression = Any  # sympy's classes have no common base: numbers, sets, tuples, matrices, relations


def comparison() -> Callable[[Any], bool]:
    """Return the function that answers `equal` (gold, answer, places), `near` (exact, decimal, places) and `readable`
    (text)."""
    theirs = grader.sympy_numeric_eq
    explicit = False  # whether the places are those of the gold answer's own digits

    def numeric(gold: _Expression, answer: _Expression, places: int, precision: int) -> bool:
        # Theirs rounds to absolute places and treats everything below 1e-15 as zero.
        return bool(theirs(gold, answer, places, precision)) and (explicit or _agree(gold, answer))

    grader.sympy_numeric_eq = numeric

    def answer(question: tuple[str, ...]) -> bool:
        nonlocal explicit
        kind, *texts = question
        if kind == "readable":
            return _read(texts[0], complex=_IMAGINARY.search(texts[0]) is not None) is not None
        either = any(_IMAGINARY.search(text) is not None for text in texts[:2])
        gold, given = (_read(text, complex=either) for text in texts[:2])
        if gold is None or given is None:
            return False
        if texts[0] == texts[1]:
            return True
        if kind == "near":
            return _near(gold, given, int(texts[2]))
        explicit = texts[2] != ""
        # No timeout of its own: it needs the main thread's SIGALRM, which is this process's last resort.
        return bool(verify([gold], [given], float_rounding=int(texts[2] or _PLACES), timeout_seconds=0))

    answer(("equal", "x+1", "1+x", ""))  # fills the parser's tables and sympy's caches for every fork
    return answer


@lru_cache(maxsize=256)
def _read(text: str, *, complex: bool) -> _Expression | None:
    """Return the value of an expression; None if it cannot be read as a whole."""
    latex = normalize_latex(text, _SPELLING)
    for part in dict.fromkeys((latex, get_last_eq(latex))):
        try:
            value = latex2sympy(part, is_real=not complex, convert_degrees=False, normalization_config=None)
            if not (hasattr(value, "has") and value.has(zoo, nan)):  # such as 1/0, which equals every other such
                return value
        except Exception:  # the parser may raise any exception
            continue
    return None


def _agree(left: _Expression, right: _Expression) -> bool:
    """Return whether the difference of two expressions that were found equal is small relative to them."""
    if not (isinstance(left, Expr) and isinstance(right, Expr)) or left == right:
        return True
    inexact = left.has(Float) or right.has(Float)
    try:
        size = max(_size(side.doit().evalf(50)) for side in (left, right))
        difference = _size((left - right).doit().evalf(50))
        if difference == 0 or not inexact or left.free_symbols or right.free_symbols:
            return bool(difference <= (_INEXACT if inexact else _EXACT) * size)
        if size >= 1:
            return True
        unit = Float(10) ** (floor(log(size, 10)) + 1 - _PLACES)
        return bool(2 * difference <= unit * (1 + _INEXACT))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return True


def _size(expression: _Expression) -> _Expression:
    """Return the absolute value of a number, or the largest coefficient of an expression."""
    if not expression.free_symbols:
        return Abs(expression).evalf(50)
    return max((Abs(factor).evalf(50) for factor in expression.as_coefficients_dict().values()), default=Float(0))


def _near(exact: _Expression, decimal: _Expression, places: int) -> bool:
    """Return whether a decimal equals a value to its last place, rounded or truncated."""
    try:
        return bool(Abs(exact - decimal).doit().evalf(50) <= Float(10) ** -places * (1 + _INEXACT))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False
