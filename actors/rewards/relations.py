r"""Writes solved inequalities, and sets defined by a property, as intervals.

Examples: `x < 1 \text{ or } x \ge 3`, `\{x \mid x > 2\}`. Owns the wording only; an unsolved inequality is no interval.
"""

import re

from actors.rewards.markup import without_text_macros

_JOINING = re.compile(r"\s*\\(?:text|mbox|textrm|mathrm)\{\s*,?\s*(and|or)\s*\}\s*")
_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")
_SIGNS = {"<": "<", r"\le": "<=", "<=": "<=", ">": ">", r"\ge": ">=", ">=": ">="}
_SIGN = r"(<=?|>=?|\\[lg]e(?![A-Za-z]))"
_UNKNOWN = r"([A-Za-z](?:\([a-z]\))?)"
_BOUND = r"([^<>=]+?)"
_HALF_LINE = re.compile(rf"{_UNKNOWN}\s*{_SIGN}\s*{_BOUND}\s*")
_FLIPPED = re.compile(rf"{_BOUND}\s*{_SIGN}\s*{_UNKNOWN}\s*")
_BETWEEN = re.compile(rf"{_BOUND}\s*{_SIGN}\s*{_UNKNOWN}\s*{_SIGN}\s*{_BOUND}\s*")
_UNEQUAL = re.compile(r"([A-Za-z])\s*\\ne(?![A-Za-z])\s*([^<>=,]+?)\s*")
_RELATION = re.compile(r"[<>]|\\[lgn]e(?![A-Za-z])")
_REALS = r"\\in\s*\\(?:mathbb|mathbf|Bbb)\s*(?:\{R\}|R)"
_PROPERTY = re.compile(
    rf"\\\{{\s*([A-Za-z])\s*(?:{_REALS}\s*)?(?:\\mid(?![A-Za-z])|\\vert(?![A-Za-z])|\\colon(?![A-Za-z])|\||:)\s*(.+?)\s*"
    rf"(?:,\s*\1\s*{_REALS}\s*)?\\\}}",
    re.DOTALL,
)
_FLIP = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def is_relation(text: str) -> bool:
    """Return whether a tidy text compares two things other than by `=`."""
    return _RELATION.search(text) is not None


def is_interval(text: str) -> bool:
    return ("," in text and text[:1] in ("(", "[")) or r"\cup" in text or r"\infty" in text


def joined_words(text: str) -> str:
    r"""Write `1 \text{ or } 2` as `1 or 2`."""
    return _JOINING.sub(r" \1 ", text)


def without_property(text: str) -> str:
    r"""Return the property that defines a set of real numbers, such as `x > 2` for `\{x \mid x > 2\}`; other text
    unchanged."""
    found = _PROPERTY.fullmatch(text)
    return found[2] if found is not None and (is_relation(found[2]) or "=" in found[2]) else text


def solution_set(text: str, members: list[str]) -> str | None:
    """Return a solved inequality as an interval, and several joined by "or" (`members`, split by the caller) as their
    union. Else None."""
    text = without_text_macros(joined_words(text))
    intervals = [_interval(member) for member in (members if _OR.search(text) else [text])]
    return r" \cup ".join(interval for interval in intervals if interval) if all(intervals) else None


def _interval(relation: str) -> str | None:
    if between := _BETWEEN.fullmatch(relation):
        low, left, unknown, right, high = between.groups()
        signs = _SIGNS[left], _SIGNS[right]
        if signs[0][0] != signs[1][0]:
            return None
        if signs[0][0] == ">":
            low, high, signs = high, low, (signs[1], signs[0])
        known = unknown not in low and unknown not in high
        opening, closing = "[" if "=" in signs[0] else "(", "]" if "=" in signs[1] else ")"
        return f"{opening}{low}, {high}{closing}" if known else None
    if unequal := _UNEQUAL.fullmatch(relation):
        return rf"(-\infty, {unequal[2]}) \cup ({unequal[2]}, \infty)"
    if half_line := _HALF_LINE.fullmatch(relation):
        unknown, sign, bound = half_line.groups()
        sign = _SIGNS[sign]
    elif flipped := _FLIPPED.fullmatch(relation):
        bound, sign, unknown = flipped.groups()
        sign = _FLIP[_SIGNS[sign]]
    else:
        return None
    if re.search(rf"(?<![A-Za-z\\]){re.escape(unknown)}(?![A-Za-z])", bound):
        return None
    if sign[0] == "<":
        return rf"(-\infty, {bound}" + ("]" if sign == "<=" else ")")
    return ("[" if sign == ">=" else "(") + rf"{bound}, \infty)"
