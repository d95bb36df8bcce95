r"""Numbers as people and models write them, read exactly. Never guesses: anything else is None.

A comma is a thousands separator only between digits: `12, 144` is two numbers.
"""

import re
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from actors.rewards.markup import squeeze, tidy, without_text_macros
from actors.rewards.units import split_unit

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([-+]?)({_DIGITS})")
_FRACTION = re.compile(r"([-+]?)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)\.?/(\d+)\.?)")
_POWER = r"\{[-+]?\d{1,3}\}|\([-+]?\d{1,3}\)|[-+]?\d{1,3}"
_SCIENTIFIC = re.compile(  # 4.5e33, 4.5\times 10^{33}, 10^{-5}
    rf"([-+]?)(?:({_DIGITS})[eE]([-+]?\d{{1,3}})|(?:({_DIGITS})(?:\\(?:times|cdot|ast)|[*x]))?10\^({_POWER}))"
)
_REPEATING = re.compile(  # 0.1\overline{6}, 0.\dot{1}4285\dot{7}
    r"([-+]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\{(\d+)\}|\\dot\{(\d)\}(\d*)\\dot\{(\d)\})"
)
_DOLLARS = re.compile(r"(\d+) dollars?,? (?:and )?(\d{1,2}) cents?")
_MIXED = re.compile(r"([-+]?)(\d+|[1-9]\d{0,2}(?: \d{3})+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))")
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))")
_MAX_DIGITS = 400  # longer digit strings are never answers; bounds the cost of exact arithmetic
PLACES = 6  # decimals that decide if one number is inexact; below 1, significant digits


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; 25 for `25%`."""

    value: Fraction
    percent: bool = False
    decimal_places: int | None = 0  # None: written as a fraction, not as a decimal


def plain_number(text: str) -> Number | None:
    r"""Read `1,234.50`, `$18`, `-7`, `\frac{3}{4}`, `3/4`, `1 1/2`, `25\%`, `18.`, `4.5e33`, `4.5 \times 10^{33}`,
    `0.\overline{3}`; None for anything else."""
    text = tidy(text)
    if len(text) > _MAX_DIGITS or ", " in text:
        return None
    text = squeeze(text)
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    if number := _NUMBER.fullmatch(text):
        sign, digits = number.groups()
        digits = re.sub("[, ]", "", digits).removesuffix(".")
        return Number(Fraction(sign + digits), percent, len(digits.partition(".")[2]))
    if scientific := _SCIENTIFIC.fullmatch(text):
        return _scaled(scientific, percent)
    if repeating := _REPEATING.fullmatch(text):
        return Number(_repeated(*repeating.groups("")), percent, None)
    mixed = _MIXED.fullmatch(text)
    fraction = _FRACTION.fullmatch(text) if mixed is None else None
    if mixed is None and fraction is None:
        return None
    whole = int(mixed[2].replace(" ", "")) if mixed else 0
    groups = mixed.groups()[2:] if mixed else fraction.groups()[1:] if fraction else ()
    numerator, denominator = [int(group) for group in groups if group is not None]
    if not denominator or (mixed and numerator >= denominator):
        return None
    sign = mixed[1] if mixed else fraction[1] if fraction else ""
    return Number((whole + Fraction(numerator, denominator)) * (-1 if sign == "-" else 1), percent, None)


def _scaled(match: re.Match[str], percent: bool) -> Number:
    """Return the number of a match of _SCIENTIFIC."""
    sign, digits, exponent, factor, power = match.groups()
    digits = re.sub("[, ]", "", digits or factor or "1").removesuffix(".")
    shift = int(exponent or power.strip("{}()"))
    places = max(0, len(digits.partition(".")[2]) - shift)
    return Number(Fraction(sign + digits) * Fraction(10) ** shift, percent, places)


def _repeated(sign: str, whole: str, fixed: str, block: str, first: str, middle: str, last: str) -> Fraction:
    """Return the number of the groups of a match of _REPEATING."""
    block = block or first + middle + last
    tail = Fraction(int(fixed or "0")) + Fraction(int(block), int("9" * len(block)))
    value = int(whole or "0") + tail / int("1" + "0" * len(fixed))
    return -value if sign == "-" else value


def amount(text: str) -> Number | None:
    r"""Read a number, with or without its unit: `100 dollars`, `15\mbox{ cm}^2`, `90^\circ`, `28 percent`, `2 million`,
    `9.8\,\mathrm{m/s^2}`, `5 dollars and 50 cents`."""
    number = plain_number(text)
    if number is None:
        text = tidy(text)
        if "cent" in text and (sum_of := _DOLLARS.fullmatch(without_text_macros(text))):
            return Number(int(sum_of[1]) + Fraction(int(sum_of[2]), 100), decimal_places=2)
        rest, factor, percent = split_unit(text)
        if rest is not None and (number := plain_number(rest)) is not None:
            number = Number(number.value * factor, percent or number.percent, number.decimal_places)
    return number


def decimal_digits(number: Number) -> str | None:
    """Write a decimal out, without a power of ten; None for a fraction and for a percentage."""
    if number.percent or number.decimal_places is None:
        return None
    units = Decimal(int(number.value * 10**number.decimal_places))
    return format(units.scaleb(-number.decimal_places, Context(prec=2 * _MAX_DIGITS + 1000)), "f")


def rounded_places(gold: str) -> int | None:
    """Return the decimals of a gold answer that may be rounded: one with at least three significant digits. Else
    None."""
    number = amount(gold)
    return None if number is None else _rounded(number)


def _rounded(number: Number) -> int | None:
    if not number.decimal_places or abs(number.value) * 10**number.decimal_places < 100:
        return None
    return min(number.decimal_places, _exact_places(number.value))


def _exact_places(value: Fraction) -> int:
    """Return the places for comparing an inexact number: six, or below 1 as many as give six significant digits."""
    places, size = PLACES, abs(value)
    while size and size * 10 < 1:
        places, size = places + 1, size * 10
    return places


def same_number(gold: Number, answer: Number) -> bool:
    """Return whether a gold number and an answer are equal, by exact arithmetic.

    A percentage equals its number and its fraction: 28% is 28 and 0.28. A gold answer with at least three significant
    digits may be the rounded form of an exact answer. If one of them is a fraction or has more than six decimals, six
    decide; below 1, six significant digits.
    """
    values = [answer.value]
    if gold.percent != answer.percent:
        values.append(answer.value * (100 if gold.percent else Fraction(1, 100)))
    if gold.value in values:
        return True
    places = _rounded(gold)
    if answer.decimal_places is None and places is not None:  # 16.67 is 50/3
        if gold.percent and not answer.percent:
            values = [answer.value, answer.value * 100]
        return any(abs(value - gold.value) * 2 <= Fraction(1, 10**places) for value in values)
    if not any(number.decimal_places is None or number.decimal_places > PLACES for number in (gold, answer)):
        return False
    if all(number.decimal_places in (None, 0) for number in (gold, answer)):
        return False
    return any(
        abs(value - gold.value) * 2 <= Fraction(1, 10 ** _exact_places(max(value, gold.value, key=abs)))
        for value in values
    )


def decimal_comma(text: str) -> Fraction | None:
    """Read `2,74` as 2.74; None without a comma, or if it could separate thousands."""
    text = tidy(text)
    return Fraction(text.replace(",", ".")) if len(text) < _MAX_DIGITS and _DECIMAL_COMMA.fullmatch(text) else None
