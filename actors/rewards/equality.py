r"""Equality of a gold answer and an answer where algebra is not needed: the same text, numbers, lists, times, words,
letters of choices, numbers in a base. Otherwise None, and algebra must decide. Never calls anything that could take
long.
"""

import re
from collections.abc import Hashable

from actors.rewards.markup import MAX_CHARS, squeeze, tidy, without_text_macros
from actors.rewards.numerals import amount, decimal_comma, plain_number, same_number

_CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*(?:([ap])\.?\s*m\.?)?(?:\s*[a-z]{2,4})?", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-J])\)?|\(([A-J])\)\s*\S.*|([A-J])[.:)]\s+\S.*", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z'-]+(?: [A-Za-z'-]+)*\.?")
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*", re.IGNORECASE)
_NO_THOUSANDS = re.compile(r"\d,(?!\d{3}(?!\d))|\d{4},|,\d{3}\d")
_LETTERS = re.compile(r"[A-Za-z]{3,}")
_BETWEEN_LETTERS = re.compile(r"\\(?:cdot|times)(?![A-Za-z])|[\s()*,-]")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
}
_BASED = re.compile(rf"(?=[A-F]*\d)([\dA-F]+)_\{{?(\d{{1,2}}|{'|'.join(_BASES)})\}}?")
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?no solutions?(?: exists?)?\.?|(?:the )?empty set|\\emptyset", re.IGNORECASE
)
_FORMULA = re.compile(r"[_^{}=<>+*/|\\]")
_GROUPED = re.compile(r"([_^])\{([0-9A-Za-z])\}")
_PRIMES = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|\\prime(?![A-Za-z]))")
_LONE_LETTERS = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z] )+(?=[A-Za-z](?![A-Za-z]))")
_OPEN, _CLOSE = "([{", ")]}"


def equal_fast(gold: str, answer: str) -> bool | None:
    """Return whether the answers are equal if that is certain without algebra, else None."""
    if gold.strip() == answer.strip():
        return True
    if len(gold) > MAX_CHARS or len(answer) > MAX_CHARS:
        return False
    gold, answer = tidy(gold), tidy(answer)
    plain = [without_text_macros(text) for text in (gold, answer)]
    if squeeze(plain[0]) == squeeze(plain[1]) or _canonical(gold) == _canonical(answer):
        return True
    for compare in (_clock_times, _choices, _based, _no_solution):
        if (same := compare(*plain)) is not None:
            return same
    numbers = amount(gold), amount(answer)
    if numbers[0] is not None and numbers[1] is not None:
        return True if _with_decimal_comma(gold, answer) else same_number(numbers[0], numbers[1])
    if (same := _lists(gold, answer)) is not None:
        return same
    if _with_decimal_comma(gold, answer):
        return True
    return _words(gold, answer)


def is_text(gold: str) -> bool:
    """Return whether a gold answer is words, with or without numbers, and no formula: only the same text equals it."""
    plain = without_text_macros(tidy(gold))
    return _FORMULA.search(plain) is None and any(sign.isalnum() for sign in plain)


def is_certain(gold: str) -> bool:
    """Return whether a gold answer needs no algebra: a number, a time, a choice, words or a list of them."""
    plain = without_text_macros(tidy(gold))
    return (
        amount(gold) is not None
        or any(form.fullmatch(plain) for form in (_CLOCK, _CHOICE, _WORDS, _BASED, _NO_SOLUTION))
        or all(amount(member) is not None or _WORDS.fullmatch(member) for member in listed(plain))
    )


def listed(text: str) -> list[str]:
    r"""Return the members of `1, 2 and 3` or `\{1, 2, 3\}`; commas in brackets do not count. One member if it is no
    list.

    Commas without a space separate only if no comma has one, and one of them cannot separate thousands: `1,234, 567`
    and `1,22` are two numbers, `1,234` is one.
    """
    text = squeeze_set(text)
    members = _split(text, tight=False)
    return _split(text, tight=True) if len(members) == 1 and _NO_THOUSANDS.search(text) else members


def squeeze_set(text: str) -> str:
    r"""Remove the braces of `\{1, 2\}` and `{1, 2}`."""
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing) and opening not in text[len(opening) :]:
            return text[len(opening) : -len(closing)].strip()
    return text


def _split(text: str, *, tight: bool) -> list[str]:
    """Split at separators outside brackets; `tight`: at commas between digits too."""
    members, depth, start, i = [], 0, 0, 0
    while i < len(text):
        separator = _SEPARATOR.match(text, i) if depth == 0 and not text[i - 1 : i].isalpha() else None
        if separator is None or not separator[0] or (not tight and _in_number(text, separator)):
            depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
            i += 1
            continue
        members.append(text[start : separator.start()])
        start = i = separator.end()
    members.append(text[start:])
    return [member.strip() for member in members if member.strip()]


def _in_number(text: str, separator: re.Match[str]) -> bool:
    return (
        separator[0] == ","
        and text[separator.start() - 1 : separator.start()].isdigit()
        and text[separator.end() :][:1].isdigit()
    )


def _clock_times(gold: str, answer: str) -> bool | None:
    """Compare clock times: `4:30 p.m.` is `4:30 PM`; a side without a.m. or p.m. agrees with either."""
    times = [_CLOCK.fullmatch(text) for text in (gold, answer)]
    if times[0] is None or times[1] is None or not all(time[2] or time[3] for time in times if time):
        return None
    (hour, minute, half), (other_hour, other_minute, other_half) = times[0].groups(), times[1].groups()
    halves = {text.casefold() for text in (half, other_half) if text}
    return (int(hour), minute or "00") == (int(other_hour), other_minute or "00") and len(halves) < 2


def _choices(gold: str, answer: str) -> bool | None:
    """Compare the letters of choices if one side is a single letter: `C` is `(C)`, `C. 42`, `(C) 42`."""
    letters = [_CHOICE.fullmatch(text) for text in (gold, answer)]
    if letters[0] is None or letters[1] is None or not any(letter[1] for letter in letters if letter):
        return None
    left, right = (next(group for group in letter.groups() if group) for letter in letters if letter)
    return left == right


def _based(gold: str, answer: str) -> bool | None:
    """Compare `1011_2` as digits and base; only the digits if one side has no base."""
    sides = [_BASED.fullmatch(squeeze(text)) for text in (gold, answer)]
    if sides[0] is not None and sides[1] is not None:
        digits, bases = zip(*(side.groups() for side in sides if side), strict=True)
        same_base = len({_BASES.get(base) or int(base) for base in bases}) == 1
        return same_base and len({text.lstrip("0") for text in digits}) == 1
    based = sides[0] or sides[1]
    other = amount(gold if sides[0] is None else answer)
    if based is None or other is None or not based[1].isdigit():
        return None
    return other.value == int(based[1][:MAX_CHARS])


def _no_solution(gold: str, answer: str) -> bool | None:
    r"""Recognise `no solution`, `No solutions`, `\emptyset`. None unless both sides are one: a set may be empty."""
    sides = [_NO_SOLUTION.fullmatch(text) is not None for text in (gold, answer)]
    return True if all(sides) else None


def _canonical(text: str) -> str:
    r"""A formula without spaces and braces that say nothing: `E_{0}^{2}` as `E_0^2`, `e^{2 i t}` as `e^{2it}`, and with
    `y'` for `y^{\prime}`."""
    text = _PRIMES.sub(lambda match: "'" * max(1, (match[1] or "").count("p")), text)
    if any(sign in text for sign in "^_'"):
        text = _LONE_LETTERS.sub(lambda match: match[0].replace(" ", ""), text)
    return _GROUPED.sub(r"\1\2", squeeze(text))


def _key(member: str) -> Hashable:
    if (number := amount(member)) is not None:
        return number.value, number.percent
    text = squeeze(without_text_macros(member))
    return text.casefold() if len(text) > 1 and _WORDS.fullmatch(text) else text


def _lists(gold: str, answer: str) -> bool | None:
    """Compare lists as sets. Certain if all members are the same, or if all are whole numbers."""
    members = [listed(without_text_macros(text)) for text in (gold, answer)]
    if max(map(len, members)) < 2:
        return None
    if min(map(len, members)) < 2:  # the other may be a list that looks like a number with thousands: 81,256
        short = 0 if len(members[0]) < 2 else 1
        members[short] = _split(squeeze_set(without_text_macros((gold, answer)[short])), tight=True)
    sets = [{_key(member) for member in side} for side in members]
    if sets[0] == sets[1]:
        return True
    whole = all(
        (number := plain_number(member)) is not None and number.decimal_places == 0
        for side in members
        for member in side
    )
    return False if whole else None


def _with_decimal_comma(gold: str, answer: str) -> bool:
    """Return whether one side is a decimal and the other the same digits with a comma: `2.74` and `2,74`."""
    for left, right in ((gold, answer), (answer, gold)):
        comma, number = decimal_comma(left), amount(right)
        if comma is not None and number is not None and "." in right and number.value == comma:
            return True
    return False


def _words(gold: str, answer: str) -> bool | None:
    r"""Compare words regardless of case, and letters in their order (`EDACB`): algebra would multiply them. Two letters
    may be a product."""
    sides = [_BETWEEN_LETTERS.sub("", without_text_macros(text)) for text in (gold, answer)]
    words = [_WORDS.fullmatch(without_text_macros(text)) is not None for text in (gold, answer)]
    if not all(map(_LETTERS.fullmatch, sides)) or not any(words):
        return None
    return sides[0].casefold() == sides[1].casefold()
