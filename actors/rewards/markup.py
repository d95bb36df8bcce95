r"""One spelling for equivalent LaTeX: spaces, delimiters, dollar signs, fractions, thousands separators.

Owns spelling only. Its changes never alter the value of an expression; it decides no equality. It never turns a list
into a number: a comma followed by a space always separates.
"""

import re

MAX_CHARS = 4096  # longer answers are not read: the longest of MATH-500 has 159 characters
_SIGNS = {
    "\u2212": "-",  # minus sign
    "\u00d7": r"\times ",
    "\u00f7": r"\div ",
    "\u00b7": r"\cdot ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2248": r"\approx ",
    "\u221e": r"\infty ",
    "\u03c0": r"\pi ",
    "\u00b1": r"\pm ",
    "\u222a": r"\cup ",
    "\u2208": r"\in ",
    "\u00b0": r"^\circ",
    "\u00bd": r"\frac{1}{2}",
    "\u27e8": r"\langle ",
    "\u27e9": r"\rangle ",
    "\u2223": r"\mid ",
    "\u2205": r"\emptyset ",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "\uff0c": ", ",
    "\u20ac": "",  # currency signs say nothing about the value
    "\u00a3": "",
    "\u00a5": "",
    "\u20b9": "",
}
_SIGN = re.compile("|".join(_SIGNS))
_RAISED = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a", "0123456789-+", strict=True)
)
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_CIRCLED = re.compile(r"\\textcircled\s*(?:\{\s*(?:\\small\s*)?(\d{1,2})\s*\}|(\d))")
_ESCAPED = re.compile(r"\\\\(?=[A-Za-z])")  # JSON's spelling; a new row occurs only within an environment
_TEXT_MACRO = r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|[mh]box|math(?:rm|bf|it|sf|tt)|operatorname\*?|emph|bf|rm)"
_TEXT = re.compile(_TEXT_MACRO + r"\s*\{([^{}]*)\}")
_SQUARE_METRES = re.compile("(?<![A-Za-z])([ckmd]?m)([\u00b2\u00b3])")  # with this sign it is a unit, never a variable
_TOKENS: list[tuple[str, str]] = [  # the first that matches at a position replaces it
    (r"\\\\", "\\\\\\\\"),
    (r"\\!\s*", ""),
    (r"\s*\{\s*,\s*\}\s*", ","),
    (r"(?<=\d)\\,(?=\d{3}(?!\d))", ""),  # 10\,000: only a number is spaced like this
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?![\d])", ""),
    (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill|boldsymbol|strut)(?![A-Za-z])\s*", ""),
    (r"\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])|\s+", " "),
    (r"\\\$|\$|\\[()\[\]]", " "),
    (r"\\%", "%"),
    (r"\\[dtc]frac(?![A-Za-z])\s*", r"\\frac"),
    (r"\\frac(?![A-Za-z])\s*", r"\\frac"),
    (r"\\leqq\s*|\\(?:leq|leqslant)(?![A-Za-z])", r"\\le "),
    (r"\\geqq\s*|\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge "),
    (r"\\neq(?![A-Za-z])", r"\\ne"),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"^\\circ"),
    (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\*\*", ""),
]
_TOKEN = re.compile("|".join(f"({pattern})" for pattern, _ in _TOKENS))
_REPLACEMENTS = [replacement.replace("\\\\", "\\") for _, replacement in _TOKENS]
_LEAD = re.compile(r"\s*(?:the\s+)?(?:final\s+|correct\s+)?answer(?:\s+is|\s*:)\s*:?\s*", re.IGNORECASE)
_DOTS = (r"\dots", r"\ldots", r"\cdots")
_BARE_FRACTION = re.compile(r"\\frac(?:(\d)(\d)|(\d)(?=\{)|(\{[^{}]*\})(\d))")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])")


def tidy(text: str) -> str:
    """Return the expression in its one spelling, without surrounding dollar signs, "the answer is" or a final stop."""
    if not text.isascii():
        text = _RAISED_RUN.sub(_power, _SQUARE_METRES.sub(r"\\text{\1}\2", text))
        text = _SIGN.sub(lambda match: _SIGNS[match[0]], text)
    if r"\textcircled" in text:
        text = _CIRCLED.sub(_circled, text)
    if "\\\\" in text and r"\begin" not in text:
        text = _ESCAPED.sub(r"\\", text)
    text = _TOKEN.sub(lambda match: _REPLACEMENTS[(match.lastindex or 1) - 1], text)
    text = _BARE_FRACTION.sub(_braced, text)
    text = _LEAD.sub("", " ".join(text.split()), count=1) if _LEAD.match(text) else " ".join(text.split())
    end = len(text.rstrip(" ."))
    if text.count(".", end) < 2 and not text.endswith(_DOTS):  # trailing dots continue a list: 1, 2, ... is not 1, 2
        text = text.rstrip(" .,;:\\")
    return text.strip()


def squeeze(text: str) -> str:
    """Remove meaningless spaces from a tidy text. A space between two digits or two words stays: 1 1/2 is not 11/2."""
    return _IDLE_SPACE.sub("", text)


def without_text_macros(text: str) -> str:
    r"""Replace \text, \mathrm and similar macros by their content: `4:30 \text{ p.m.}` becomes `4:30 p.m.`."""
    for _ in range(3):  # nested ones
        text, count = _TEXT.subn(r"\1", text)
        if not count:
            break
    return " ".join(text.split())


def _power(match: re.Match[str]) -> str:
    return "^{" + "".join(_RAISED[sign] for sign in match[0]) + "}"


def _circled(match: re.Match[str]) -> str:
    number = int(match[1] or match[2])
    return chr(0x245F + number) if 1 <= number <= 20 else str(number)


def _braced(match: re.Match[str]) -> str:
    r"""Write \frac12 and \frac{1}2 as \frac{1}{2}."""
    both_top, both_bottom, top, top_group, bottom = match.groups()
    if both_top:
        return rf"\frac{{{both_top}}}{{{both_bottom}}}"
    return rf"\frac{{{top}}}" if top else rf"\frac{top_group}{{{bottom}}}"
