r"""Plain numbers as people and models write them, read exactly. Never guesses: anything else is None."""

import re
from fractions import Fraction

_NOTHING = re.compile(r"\\[!,]|\\(?:left|right)(?![A-Za-z])|\\?\$")
_SPACE = re.compile(r"(?:\\[;: ]|\s)+")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")  # one between digits or words stays: 1 1/2 is not 11/2
_NUMBER = re.compile(r"([-+]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)")
_FRACTION = re.compile(r"([-+]?)(?:\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}|\\[dt]?frac(\d)(\d)|(\d+)/(\d+))")
_MAX_DIGITS = 400  # longer digit strings are never answers; bounds the cost of exact arithmetic


def strip_markup(text: str) -> str:
    r"""The text without thin spaces, \left and \right, dollar signs and idle white space; `{,}` becomes `,`."""
    text = _NOTHING.sub("", text.replace("{,}", ","))
    return _IDLE_SPACE.sub("", _SPACE.sub(" ", text)).strip()


def plain_number(text: str) -> tuple[Fraction, bool] | None:
    r"""(value, percent) of `1,234.50`, `$18`, `-7`, `\frac{3}{4}`, `3/4`, `25\%`, `18.`; None for anything else.

    The value of a percentage is the number before the sign. Commas count only as thousands separators, so `1,2` (two
    numbers, or a decimal comma) is not a plain number.
    """
    text = strip_markup(text)
    if len(text) > _MAX_DIGITS:
        return None
    percent = text.endswith("%")
    if percent:
        text = text.removesuffix("%").removesuffix("\\")
    if number := _NUMBER.fullmatch(text):
        sign, digits = number.groups()
        return Fraction(sign + digits.replace(",", "").removesuffix(".")), percent
    if fraction := _FRACTION.fullmatch(text):
        numerator, denominator = [int(g) for g in fraction.groups()[1:] if g is not None]
        if denominator:
            return Fraction(numerator, denominator) * (-1 if fraction[1] == "-" else 1), percent
    return None
