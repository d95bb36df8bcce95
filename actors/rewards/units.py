r"""Units behind a number: which words and signs are units, and their factors. Never converts between units: graders of
mathematics compare the number, whatever it counts.
"""

import re
from fractions import Fraction

_FACTORS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PERCENT = {"%", "percent", "percents", "percentage", "percentage points", "pct"}
_JOINING = re.compile(r"(?:^|\W)(?:and|or|to|if|mod|remainder|where|when|for)(?:\W|$)|[\d=<>]")
_EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\s*\d\s*\}|-?\d))"
_MACRO = r"\\(?:text(?:bf|it|rm|sf|normal)?|[mh]box|mathrm|operatorname)\s*"
_WRITTEN = re.compile(rf"\s*{_MACRO}\{{((?:[^{{}}]|\^\{{\s*-?\d\s*\}})*)\}}{_EXPONENT}?$")
_WRITTEN_UNITS = rf"\{{(?:\s*(?:{_MACRO}\{{[^{{}}0-9]*\}}{_EXPONENT}?|\\cdot(?![A-Za-z])|1))+\s*\}}"
_FRACTION = re.compile(rf"\s*\\frac{_WRITTEN_UNITS}{_WRITTEN_UNITS}$")  # \frac{\text{m}}{\text{s}^2}
_POWERS = re.compile(rf"(?<=[a-z]){_EXPONENT}|(?<=[a-z])[23](?![0-9a-z])")
_SYMBOL = r"(?:[kcdmMGun]?(?:m|g|s|Pa|N|J|W|V|A|Hz|mol|eV|cal|L|l)|K|min|h|hr|sec|yr|rad|ft|mi|lb|atm|erg)"
_POWERED = rf"{_SYMBOL}(?![A-Za-z]){_EXPONENT}?"
_COMPOUND = re.compile(  # bare ones: kg m/s^2; only known ones, and one of two letters, or m/s
    rf"(?<=[\d}}])\s+(?=m/s|[^/]{{0,40}}[A-Za-z]{{2}}){_POWERED}(?:(?:\s*(?:/|\\cdot)\s*|\s+){_POWERED}){{1,4}}$"
)
_COUNTED = re.compile(r"(?<=\d)\s*\(\s*[A-Za-z]{3,24}(?:\s+[A-Za-z]{1,24}){0,3}\s*\)$")  # 9 (apples)
_HANGING = re.compile(r"\s*(?:/|\\cdot|\\times|\*)\s*$")  # between two units, once the second is cut off
_NO_UNIT = re.compile(r"[^a-z%]*|[^msghlcfknjwvad%]")  # no letter at all, or a single one: 2\text{i}, 3\mathrm{e}
_ORDINAL = re.compile(r"\^\s*\{\s*\\(?:text(?:rm)?|mathrm|mbox)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}$")
_DEGREES = re.compile(r"\s*\^\\circ\s*[CF]?$")
_SHORT = (
    r"mm|cm|dm|km|in|ft|yd|mi|mg|kg|lbs?|oz|ml|cl|hrs?|mins?|secs?|mph|kph|km/h|m/s|gm|usd|eur|rs|kwh|[km]?hz|sq|cu|"
    r"c?m[23]|ft2|deg|rad"
)
# A bare word: a known short unit, or a word of at least four letters that is no function and no name of a number.
_MATHEMATICAL = (
    r"(?:sin|cos|tan|cot|sec|csc|arc|log|exp|sqrt|root|frac|theta|alpha|beta|gamma|delta|lambda|omega|sigma|infinity|"
    r"modulo|choose|over|times|plus|minus|equals|remainder)"
)
_BARE = re.compile(
    rf"\s*(?<![A-Za-z\\])(?:(?:square|sq\.?|cubic|cu\.?|per)\s+)?"
    rf"((?:{_SHORT})(?![A-Za-z])|(?<=\s)(?!{_MATHEMATICAL})[A-Za-z]{{4,24}})\.?\s*(?:\^\s*(?:\{{\s*[23]\s*\}}|[23]))?$",
    re.IGNORECASE,
)
_LETTER = re.compile(r"(?<=\d)\s+[hmsgLl]$")  # 3 h, but not 3h or R^2 h
_PLAIN = re.compile(r"[-+]?[\d.,]+\s+[A-Za-z]")
_WORDS = 6  # most words in a unit: "kg" "m" "/" "s^2", "miles per hour each"


def split_unit(text: str) -> tuple[str | None, Fraction, bool]:
    """Return (text without its unit, factor, percent) of a tidy text; (None, 1, False) without a unit."""
    factor, percent, rest = Fraction(1), False, text
    for pattern in (_COUNTED, _COMPOUND):
        if (match := pattern.search(text)) is not None:
            return text[: match.start()].rstrip(), factor, False
    for _ in range(_WORDS):
        shorter, unit = _cut(rest)
        if shorter is None or not shorter:
            break
        factor *= _FACTORS.get(unit, 1)
        percent = percent or unit in _PERCENT
        rest = _HANGING.sub("", shorter)
    return (None, Fraction(1), False) if rest == text else (rest, factor, percent)


def _cut(text: str) -> tuple[str | None, str]:
    """Return (text without its last unit, that unit); (None, "") if there is none."""
    if (match := _FRACTION.search(text)) is not None:
        return text[: match.start()].rstrip(), ""
    for pattern in (_WRITTEN, _BARE):
        if (match := pattern.search(text)) is not None:
            unit = _POWERS.sub("", " ".join(match[1].casefold().split())).strip(". ")
            if _JOINING.search(unit) or _NO_UNIT.fullmatch(unit):
                return None, ""
            return text[: match.start()].rstrip(), unit
    for pattern in (_ORDINAL, _DEGREES, *([_LETTER] if _PLAIN.fullmatch(text) else [])):
        if (match := pattern.search(text)) is not None:
            return text[: match.start()].rstrip(), ""
    return None, ""
