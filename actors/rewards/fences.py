"""The first closed fence of a response: what the `code` term reads if responses are stopped behind it. Owns this
grammar, which is stricter than that of actors.rewards.extraction: no later text changes which closed fence is first.

A fence opens with a line of three backticks (no more, and no tildes) and a language, or with ```python behind words. It
closes with the next line that begins with three backticks, or at the end of a line that ends with them. It counts if
its language is Python or none, and if it is in no thinking part that the response or the prompt has opened. Indented
code, as in an item of a list, is moved to the left.
"""

import re
import textwrap

from actors.rewards.boxed import THINKING_BEGINS, THINKING_ENDS

_OPENING = re.compile(r"(?P<indent>[ \t\r]*)```(?!`)[ \t\r]*(?P<language>[^ \t\r`\n]*)[^`\n]*")
_INLINE = re.compile(r"(?<!`)```[ \t\r]*(?:python3?|py)[ \t\r]*$", re.IGNORECASE)
_CLOSES = re.compile(r"[ \t\r]*```")
_CLOSES_BEHIND = re.compile(r"```[ \t\r]*$")
_LANGUAGES = ("py", "ipython")


def first_fence(text: str, *, thinking: bool = False) -> str | None:
    """Return its code; None if no fence that counts is closed yet. `thinking`: the prompt has opened a thinking
    part."""
    place = 0
    if thinking:
        tag = THINKING_ENDS.search(text)
        if tag is None:
            return None
        place = tag.end()
    lines: list[str] | None = None  # of the open fence
    counts, indent = False, ""
    while place < len(text):
        end = text.find("\n", place)
        complete, end = end >= 0, end if end >= 0 else len(text)
        line, opening = text[place:end], _OPENING.match(text, place, end)
        if lines is None:
            language = opening["language"].lower() if opening else ""
            tag = THINKING_BEGINS.search(text, opening.end() if opening else place, end)
            if opening and opening.end() == end:
                if complete:
                    lines, indent = [], opening["indent"]
                    counts = not language or language.startswith(_LANGUAGES)
            elif tag:
                over = THINKING_ENDS.search(text, tag.end())
                if over is None:
                    return None
                place = over.end()
                continue
            elif complete and _INLINE.search(line):
                lines, counts, indent = [], True, ""
        elif _CLOSES.match(line) or (complete and _CLOSES_BEHIND.search(line)):
            if counts:
                last = [] if _CLOSES.match(line) else [line.rstrip(" \t\r").rstrip("`")]
                code = "".join(line.removeprefix(indent).removesuffix("\r") + "\n" for line in [*lines, *last])
                # Unindented code stays as it is: dedent empties blank lines, also within strings.
                return textwrap.dedent(code) if code.lstrip("\n").startswith((" ", "\t")) else code
            lines = None
        else:
            lines.append(line)
        place = end + 1
    return None
