r"""Finds the \boxed{...} with a response's answer. Owns brace matching and which boxes count; never interprets their
content.

\fbox is read like \boxed. A box with only spaces, a phantom or dots is empty: "put the answer within \boxed{}" mentions
a box without an answer. Of nested boxes the inner ones count.
"""

import re
from dataclasses import dataclass

# An opening, an escaped character, or a brace. \{, \} and \\ neither open nor close; an opening is never swallowed.
_TOKEN = re.compile(r"(?P<boxed>\\(?:boxed|fbox)\s*\{)|\\(?!\\(?:boxed|fbox)\s*\{).|[{}]", re.DOTALL)
THINKING_BEGINS = re.compile("<think(?:ing)?>|<thought>")
# The same plus the start of a thinking part; neither is ever swallowed.
_TOKEN_OR_THINKING = re.compile(
    rf"{THINKING_BEGINS.pattern}|" + _TOKEN.pattern.replace("(?!", f"(?!{THINKING_BEGINS.pattern}|"), re.DOTALL
)
# \boxed 42 without braces: up to the next space or the end of the formula.
_BARE = re.compile(r"\\boxed[ \t]+([^\s{}$\\][^\s{}$\\]*)")
_EMPTY = re.compile(
    r"(?:[\s~._$?]|\\[,;:!> _$]|\\q?quad\b|\\[hv]?phantom\{[^{}]*\}|\\[lc]?dots\b|\\(?:boxed|fbox)\{\})*"
)
THINKING_ENDS = re.compile(r"</think(?:ing)?>|</thought>|<\|end_of_thought\|>")
# Text allowed between boxes that form one answer: separators with a joining word or mark, or nothing at all. A word may
# precede "and", and a name with its equals sign may follow: \boxed{1} red and y = \boxed{2}.
_BLANK = r"[\s~*$]|\\[,;:!> ()\[\]\\]|\\q?quad\b"
_JOINT = re.compile(
    rf"(?:\s[a-z]{{1,20}}(?=\s+(?:and|or)\b))?(?:{_BLANK}"
    r"|(?P<join>[,;&]|\b(?:and|or)\b|\\(?:text|mbox|textrm|mathrm)\s*\{[^{}]{0,60}?\b(?:and|or)\s*\}))*"
    rf"(?:(?<![A-Za-z])[A-Za-z](?:_(?:\w|\{{\w{{1,8}}\}}))?(?:{_BLANK})*=(?:{_BLANK})*)?"
)
_MAX_JOINT_CHARS = 120


@dataclass(frozen=True, slots=True)
class Box:
    """A closed box: its place in the text and its content."""

    start: int
    end: int
    content: str


def final_part(text: str) -> str:
    """Return the text after the last closing tag of a thinking part; the whole text if there is none."""
    ends = [match.end() for match in THINKING_ENDS.finditer(text)]
    return text[ends[-1] :] if ends else text


def boxes(text: str) -> list[Box]:
    """Return the closed boxes with content and no inner box, in the order of their openings. One pass."""
    return _read(text, 0, _TOKEN)[0]


def first_boxed(text: str, *, thinking: bool = False) -> str | None:
    r"""Return the content of the first closed box outside thinking parts; None without one.

    A response that is stopped right behind this box keeps its grade, as no later text is read. So only the response or
    the prompt (`thinking`) can open a thinking part: a closing tag alone does not make one.
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
    """Return whether the prompt ends with an opened thinking part, so that the response begins within it."""
    return re.search(rf"(?:{THINKING_BEGINS.pattern})\s*$", prompt) is not None


def _read(text: str, start: int, tokens: re.Pattern[str]) -> tuple[list[Box], int | None]:
    """Return the boxes from `start` to the first thinking part outside all boxes, and the end of its tag. If `tokens`
    include such tags, stop at the first box."""
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
    r"""Return the content of the last box after the thinking part; None without one.

    Adjacent boxes that a comma, "and" or "or" joins (or nothing separates) belong to it: `\boxed{2}, \boxed{3} and
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
