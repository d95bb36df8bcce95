r"""Finds the \boxed{...} that holds a response's answer. Owns brace matching and which boxes count; never interprets
what is in them.

\fbox is read like \boxed. A box is empty if nothing but space, a phantom or dots is in it: "put the answer within
\boxed{}" names a box and fills none. Of nested boxes the inner ones count.
"""

import re
from dataclasses import dataclass

# An opening, an escaped character (\{, \} and \\ neither open nor close; an opening is never swallowed), or a brace.
_TOKEN = re.compile(r"(?P<boxed>\\(?:boxed|fbox)\s*\{)|\\(?!\\(?:boxed|fbox)\s*\{).|[{}]", re.DOTALL)
THINKING_BEGINS = re.compile("<think(?:ing)?>|<thought>")
# The same, and where thinking begins; neither is ever swallowed.
_TOKEN_OR_THINKING = re.compile(
    rf"{THINKING_BEGINS.pattern}|" + _TOKEN.pattern.replace("(?!", f"(?!{THINKING_BEGINS.pattern}|"), re.DOTALL
)
# \boxed 42 without braces: up to the next space or the end of the formula.
_BARE = re.compile(r"\\boxed[ \t]+([^\s{}$\\][^\s{}$\\]*)")
_EMPTY = re.compile(
    r"(?:[\s~._$?]|\\[,;:!> _$]|\\q?quad\b|\\[hv]?phantom\{[^{}]*\}|\\[lc]?dots\b|\\(?:boxed|fbox)\{\})*"
)
THINKING_ENDS = re.compile(r"</think(?:ing)?>|</thought>|<\|end_of_thought\|>")
# What may stand between boxes that are one answer: separators with a word or mark that joins, or nothing at all. A word
# may stand before "and", a name and its sign of equality behind it: \boxed{1} red and y = \boxed{2}.
_BLANK = r"[\s~*$]|\\[,;:!> ()\[\]\\]|\\q?quad\b"
_JOINT = re.compile(
    rf"(?:\s[a-z]{{1,20}}(?=\s+(?:and|or)\b))?(?:{_BLANK}"
    r"|(?P<join>[,;&]|\b(?:and|or)\b|\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]{0,60}?\b(?:and|or)\s*\}))*"
    rf"(?:(?<![A-Za-z])[A-Za-z](?:_(?:\w|\{{\w{{1,8}}\}}))?(?:{_BLANK})*=(?:{_BLANK})*)?"
)
_MAX_JOINT_CHARS = 120


@dataclass(frozen=True, slots=True)
class Box:
    """One closed box: where it stands in the text, and its content."""

    start: int
    end: int
    content: str


def final_part(text: str) -> str:
    """What follows the last closing tag of a thinking part; all of it if there is none."""
    ends = [match.end() for match in THINKING_ENDS.finditer(text)]
    return text[ends[-1] :] if ends else text


def boxes(text: str) -> list[Box]:
    """The closed boxes with something in them and no box inside, in the order in which they open. One pass."""
    return _read(text, 0, _TOKEN)[0]


def first_boxed(text: str, *, thinking: bool = False) -> str | None:
    r"""Content of the box that is closed first, in no thinking part; None if there is none.

    A response that is stopped right behind this box keeps its grade: nothing that could follow is read. So a thinking
    part is one that the response opened, or the prompt (`thinking`): a closing tag alone makes none.
    """
    start = 0
    while True:
        if thinking:
            tag = THINKING_ENDS.search(text, start)
            if tag is None:
                return None
            start = tag.end()
        found, end = _read(text, start, _TOKEN_OR_THINKING)
        if found:
            return found[0].content
        if end is None:
            return None
        start, thinking = end, True


def thinks(prompt: str) -> bool:
    """Whether a response begins within a thinking part, which the prompt has just opened."""
    return re.search(rf"(?:{THINKING_BEGINS.pattern})\s*$", prompt) is not None


def _read(text: str, start: int, tokens: re.Pattern[str]) -> tuple[list[Box], int | None]:
    """The boxes from `start` to where a thinking part begins outside all boxes, and the end of its tag. With such
    tags among `tokens` no further than to the first box."""
    open_braces: list[tuple[int, int] | None] = []  # (start, start of the content) of a box, None for a plain brace
    found: list[Box] = []
    for token in tokens.finditer(text, start):
        if token["boxed"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (opening := open_braces.pop()) is not None:
            begin, inside = opening
            content = text[inside : token.start()].strip()
            if not _EMPTY.fullmatch(content) and not (found and found[-1].start > begin):
                found.append(Box(begin, token.end(), content))
                if tokens is _TOKEN_OR_THINKING:
                    break
        elif token[0].startswith("<") and not any(open_braces):
            return found, token.end()
    return found, None


def last_boxed(text: str) -> str | None:
    r"""Content of the last box after the thinking part; None if there is none.

    Boxes beside it that a comma, "and" or "or" joins (or nothing separates) belong to it: `\boxed{2}, \boxed{3} and
    \boxed{5}` is `2, 3, 5`.
    """
    text = final_part(text)
    found = boxes(text) or [Box(m.start(), m.end(), m[1]) for m in _BARE.finditer(text)]
    if not found:
        return None
    contents = [found[-1].content]
    for left, right in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[left.end : right.start]
        if len(between) > _MAX_JOINT_CHARS or (joint := _JOINT.fullmatch(between)) is None:
            break
        if between and joint["join"] is None:
            break
        contents.append(left.content)
    return ", ".join(dict.fromkeys(reversed(contents)))
