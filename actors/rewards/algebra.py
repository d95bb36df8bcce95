r"""Rewrites two expressions so that math-verify reads their intended meaning. Owns only the wording of the question;
actors.rewards.symbolic answers it.
"""

import re
from dataclasses import dataclass

from actors.rewards.equality import listed
from actors.rewards.markup import squeeze, tidy
from actors.rewards.names import distinct, named_values
from actors.rewards.numerals import amount, decimal_digits, plain_number, rounded_places
from actors.rewards.relations import is_interval, is_relation, joined_words, solution_set, without_property
from actors.rewards.units import split_unit

_COUNTED = re.compile(r"(?:\d|\\pi)[^=<>]*\Z")  # what a unit may follow
_MEMBER_OF = re.compile(r"[A-Za-z]\s*\\in\s*(?=[\[({\\])")
_LETTER = re.compile(r"\\(?:text|mathrm)\{([A-Za-z])\}(?!\s*[A-Za-z])")
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")
_SET = r"\\in\s*\\(?:mathbb|mathbf|Bbb)\s*(?:\{[A-Z]\}|[A-Z])(?:\s*[_^]\s*(?:\{[^{}]*\}|\S))?"
_QUALIFIER = re.compile(  # a qualifier behind the expression: what a letter stands for
    rf"(?:(?:[,;]\s*|\s*\()[A-Za-z]\s*{_SET}"
    r"|[,;]?\s*\(?(?:\\text\{\s*,?\s*(?:for (?:all|every|any|each|some)|where|with)\s*(?:integers?)?\s*\}|\\forall)"
    rf"\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*(?:{_SET})?)\s*\)?$"
)
_NAME = r"\\?[A-Za-z]+(?:\s[A-Z]+)?'*(?:[_^](?:\{[^{}=]*(?:\{[^{}=]*\}[^{}=]*)*\}|\w))*(?:\([^()=]*\))?"
_NUMERIC = r"(?:[^A-Za-z=]|\\(?:frac|sqrt|cdot|pi)(?![A-Za-z]))+"
_NAMED = re.compile(rf"{_NAME}\s*(?<![<>!])=\s*([^=]+)|{_NUMERIC}(?<![<>!])=({_NUMERIC})")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")
_THOUSANDS = re.compile(r"(?<![\d,.(\[{])\d{1,3}(?:,\d{3})+(?![\d,])")
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*,[^()\[\]{}]*[)\]}]")
_ROWS = re.compile(r"\\begin\{([bp]matrix)\}((?:(?!\\begin).)*?)\\end\{\1\}", re.DOTALL)
_EXPONENT = re.compile(r"(?<![A-Za-z\d.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])")
_EULER = re.compile(r"(?<![A-Za-z\\])e(?![A-Za-z])")
_EITHER = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_INSIDE = r"\\(?![lr]angle)"
_SPELLINGS: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(rf"\\langle(?![A-Za-z])\s*((?:[^<>|\\,]|{_INSIDE})*,(?:[^<>|\\]|{_INSIDE})*)\\rangle(?![A-Za-z])"),
        r"(\1)",
    ),
    (re.compile(r"(?<![A-Za-z\\}])C\((\d{1,4}),\s*(\d{1,4})\)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\(?:text|mathrm)\{\s*(?:positive )?infinity\s*\}"), r"\\infty"),
    (re.compile(r"(?<![A-Za-z\\])(?:np|numpy|math|sp|sympy)\.(?=[a-z])"), ""),
    (re.compile(r"(?<![A-Za-z\\])(arc(?:sin|cos|tan)|sin|cos|tan|ln|log|exp)(?=\()"), r"\\\1"),
    (re.compile(r"\\frac\{\s*d\s*([A-Za-z]|\\[a-z]+)\s*\}\{\s*d\s*t\s*\}"), r"\\dot{\1}"),
    (re.compile(r"(?<=[\d)])\s*\*\s*(?=[\d(])"), r"\\cdot "),
]
_APPROXIMATELY = re.compile(
    r"\\(?:approx(?:eq)?|thickapprox|simeq|sim)(?![A-Za-z])|^\s*(?:\\text\{\s*)?(?:approximately|approx\.?|about|roughly)(?:\s*\}|\s)"
)
_CONSTANT = re.compile(r"\\pi|e|i|\\phi")


@dataclass(frozen=True, slots=True)
class Question:
    """A question for math-verify."""

    gold: str
    answer: str
    places: int | None  # decimals to which inexact numbers must agree; None: the default number


def question(gold: str, answer: str) -> Question | None:
    """Return the question that decides equality; None if the sides differ in kind, such as a list and an interval."""
    sides = [_plain(text) for text in (gold, answer)]
    places = rounded_places(sides[0]) if "." not in sides[1] else None
    sides = _ordered(*_exponents(*sides))
    radians = [r"\pi" in side for side in sides]
    if radians[0] != radians[1]:  # beside a multiple of pi, degrees mean radians; otherwise the sign says nothing
        sides = [side if r"\pi" in side else in_radians(side) for side in sides]
    sides = [side.replace(r"^\circ", "") for side in sides]
    equations = ["=" in side.replace("<=", "").replace(">=", "") for side in sides]
    if equations[0] != equations[1]:
        side = 0 if equations[0] else 1
        if len(listed(sides[side])) == 1 and (named := _NAMED.fullmatch(sides[side])):
            sides[side] = named[1] or named[2]
    elif all(equations) and (values := _sides_of_one_name(*sides)) is not None:
        sides = values
    sides = [side[member.end() :] if (member := _MEMBER_OF.match(side)) else side for side in sides]
    relations = [is_relation(side) for side in sides]
    if relations[0] != relations[1]:
        other = sides[0 if relations[1] else 1]
        if is_interval(other):
            sides = [_solved(side) or side for side in sides]
        elif len(listed(other)) > 1:
            return None
    elif all(relations):
        solved = [_solved(side) for side in sides]
        sides = [side for side in solved if side] if all(solved) else sides
    told_apart = distinct(_worded(sides[0], sides[1]), _worded(sides[1], sides[0]))
    return None if told_apart is None else Question(*told_apart, places)


def _sides_of_one_name(gold: str, answer: str) -> list[str] | None:
    """Return the two right-hand sides if the left-hand sides are the same. As equations they would be solved for any
    letter."""
    parts = [re.split(r"(?<![<>!])=", side) for side in (gold, answer)]
    if any(len(side) != 2 or len(listed(text)) > 1 for side, text in zip(parts, (gold, answer), strict=True)):
        return None
    if any(side[0].count("{") != side[0].count("}") for side in parts):  # \sum_{i=1}
        return None
    same = squeeze(parts[0][0]) == squeeze(parts[1][0]) and re.search("[A-Za-z]", parts[0][0])
    return [side[1].strip() for side in parts] if same else None


def in_radians(text: str) -> str:
    return _DEGREES.sub(r"\\frac{\1\\pi}{180}", text)


def approximated(text: str) -> tuple[str, str] | None:
    r"""Return (exact, decimal) of `\frac{40}{3} \approx 13.33`; the decimal twice for `\approx 13.33` and `x \approx
    13.33`; None for any other text."""
    parts = _APPROXIMATELY.split(tidy(text))
    if len(parts) < 2 or not (last := parts[-1].strip()):
        return None
    first = parts[0].strip()
    named = re.fullmatch(_NAME, first) is not None and _CONSTANT.fullmatch(first) is None
    return (last, last) if named or not first else (first.rstrip("="), last)


def _plain(text: str) -> str:
    text = without_property(_QUALIFIER.sub("", _LETTER.sub(r"\1", tidy(text))))
    for spelling, replacement in _SPELLINGS:
        text = spelling.sub(replacement, text)
    return text


def _exponents(*sides: str) -> list[str]:
    r"""Write `(4.5e33, 1)` as `(4.5 \times 10^{33}, 1)`. In `2e-2`, e is Euler's number if the other side contains
    it."""
    euler = [_EULER.search(_EXPONENT.sub("", side)) is not None for side in sides]
    return [
        side if euler[1 - index] else _EXPONENT.sub(r"\1 \\times 10^{\2}", side) for index, side in enumerate(sides)
    ]


def _ordered(gold: str, answer: str) -> list[str]:
    r"""Write both sides as tuples where names assign the values: `x = 2, y = 3` beside `(2, 3)`, `2, 3` or `y = 3, x =
    2`. Likewise a vector beside a tuple."""
    sides = [gold, answer]
    rows = [_ROWS.fullmatch(side) for side in sides]
    if (rows[0] is None) != (rows[1] is None):
        side = 0 if rows[0] else 1
        body = rows[side][2].strip(" \\")  # type: ignore[index]
        members = [member.strip() for member in re.split(r"\\\\" if r"\\" in body else "&", body)]
        if sides[1 - side].startswith("(") and not any("&" in member for member in members):
            sides[side] = f"({', '.join(members)})"
        return sides
    joined = [joined_words(side) for side in sides]
    named = [None if _OR.search(text) or "=" not in text else named_values(listed(text)) for text in joined]
    if named[0] is not None and named[1] is not None:
        values = [
            {name.replace("{", "").replace("}", ""): value for name, value in side.items()} for side in named if side
        ]
        if values[0].keys() == values[1].keys():
            return [f"({', '.join(side[name] for name in sorted(side))})" for side in values]
        return sides
    for side in (0, 1):
        if (values_of := named[side]) is not None:
            other = listed(joined[1 - side])
            if len(other) == len(values_of) and not sides[1 - side].startswith(r"\{"):
                sides[1 - side] = f"({', '.join(other)})"
            if sides[1 - side].startswith("("):
                sides[side] = f"({', '.join(values_of.values())})"
    return sides


def _worded(text: str, other: str) -> str:
    r"""The expression with `, ` between members, without thousands separators and units. A letter of the other side is
    no unit: `9.25 m` beside `\frac{37}{4} m`."""
    text = joined_words(text)
    members = listed(text)
    lists_of_lists = ";" in text and "," in text  # math-verify reads these
    if len(members) > 1 and not lists_of_lists and amount(text) is None:
        return ", ".join(_worded(member, other) for member in members)
    if "10^" in text and (number := plain_number(text)) is not None:
        return decimal_digits(number) or text
    if _EITHER.search(text) and not is_relation(text):
        return ", ".join(_worded(_EITHER.sub(signs, text), other) for signs in (_upper, _lower))
    rest, factor, percent = split_unit(text)
    if rest is not None and factor == 1 and not percent and _COUNTED.search(rest):
        unit = text[len(rest) :].strip()
        if len(unit) != 1 or unit not in re.split(r"\\?[A-Za-z]{2,}|[^A-Za-z]", _without_units(other)):
            text = rest
    return _BRACKETED.sub(_spaced, _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text))


def _without_units(text: str) -> str:
    """The text without the units that `_worded` takes from its members."""
    members = []
    for member in listed(joined_words(text)):
        rest, factor, percent = split_unit(member)
        counts = rest is not None and factor == 1 and not percent and _COUNTED.search(rest)
        members.append(rest if rest is not None and counts else member)
    return ", ".join(members)


def _upper(sign: re.Match[str]) -> str:
    return "+" if sign[1] == "pm" else "-"


def _lower(sign: re.Match[str]) -> str:
    return "-" if sign[1] == "pm" else "+"


def _solved(text: str) -> str | None:
    return solution_set(text, listed(joined_words(text)))


def _spaced(match: re.Match[str]) -> str:
    """Put a space after each comma of a bracket: in (0,100) it separates. If other commas have one, tight ones do not
    separate."""
    text = match[0]
    if ", " in text:
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return re.sub(r",\s*", ", ", text)
