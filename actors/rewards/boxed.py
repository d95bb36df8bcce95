r"""Finds \boxed{...} in a response. Owns brace matching only; never interprets the content."""

import re

# An opening, an escaped character (\{, \} and \\ neither open nor close; an opening is never swallowed), or a brace.
_TOKEN = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\(?!\\f?boxed\s*\{).|[{}]", re.DOTALL)


def first_boxed(text: str) -> str | None:
    r"""Content of the first closed \boxed{...} (or \fboxed{...}), stripped; None if there is none.

    "First" is the one whose brace closes first, so that stopping a response right after its first closed answer
    changes no grade, and an unclosed \boxed{ does not hide a later closed one. One pass, linear in the text.
    """
    open_braces: list[int | None] = []  # start of the content for \boxed{, None for a plain brace
    for token in _TOKEN.finditer(text):
        if token["boxed"]:
            open_braces.append(token.end())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                return text[start : token.start()].strip()
    return None
