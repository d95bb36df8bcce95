"""Extracts the code of a response. Owns which part of a response is code; knows no test, runs nothing.

The last fence counts, since a model's sketches come before its answer: after the thinking part, and among those marked
as Python if there are any. A fence that is never closed ends with the response; an indented one is moved to the left.
Without a fence, the response is the code.
"""

import ast
import re
from itertools import dropwhile

from actors.rewards.boxed import final_part
from actors.rewards.fences import first_fence

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^\s`]*)[^\n`]*$")
_INLINE = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*$", re.IGNORECASE)
_STATEMENT = re.compile(r"(?:async[ \t]+def|def|class|import|from)[ \t]|@\w")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def extract_code(response: str, which: str = "last", *, thinking: bool = False) -> tuple[str, bool]:
    """Return (code, whether it came from a fence). `which`: the "last" fence, or the "first" closed one if any
    (actors.rewards.fences)."""
    if which == "first" and (first := first_fence(response, thinking=thinking)) is not None:
        return first, True
    text = final_part(response.replace("\r\n", "\n"))
    fences = list(_fences(text))
    if not fences:
        return text, False
    marked = [code for language, code in fences if language.startswith(("py", "ipython"))]
    plain = [code for language, code in fences if not language]
    return (marked or plain or [code for _, code in fences])[-1], True


def _fences(text: str) -> list[tuple[str, str]]:
    """Return (language, code) of every fence, in order."""
    found: list[tuple[str, str]] = []
    lines: list[str] | None = None
    opened, indent, language = "", "", ""
    for line in text.split("\n"):
        if lines is None:
            if match := _FENCE.match(line):
                opened, indent, language = match["fence"], match["indent"], match["language"].lower()
                lines = []
            elif _INLINE.search(line):  # behind words: "Solution: ```python"
                opened, indent, language, lines = "```", "", "python", []
            continue
        stripped = line.strip()
        if stripped.startswith(opened):
            found.append((language, _joined(lines, indent)))
            lines = None
        elif stripped.endswith(opened):  # behind the last statement
            found.append((language, _joined([*lines, line.rstrip().removesuffix(opened)], indent)))
            lines = None
        else:
            lines.append(line)
    if lines is not None:
        found.append((language, _joined(lines, indent)))
    return found


def _joined(lines: list[str], indent: str) -> str:
    """Remove the fence's indentation from every line, as Markdown does."""
    return "".join(f"{line.removeprefix(indent) if indent else line}\n" for line in lines)


def without_prose(text: str) -> str:
    """Return unfenced code among sentences: from its first statement to the last line that parses."""
    if _parsed(text) is not None:
        return text
    lines = list(dropwhile(lambda line: not _STATEMENT.match(line), text.split("\n")))
    for end in range(len(lines), max(0, len(lines) - 50), -1):
        code = "\n".join(lines[:end]) + "\n"
        if _parsed(code) is not None:
            return code
    return text


def without_demonstration(code: str) -> str:
    """Remove code that shows or checks a model's own functions: asserts at the top level, and calls below the last
    definition. They are not tests, and a wrong one would fail a right function."""
    tree = _parsed(code)
    if tree is None or not any(isinstance(statement, _DEFINITIONS) for statement in tree.body):
        return code
    last = max(i for i, statement in enumerate(tree.body) if not isinstance(statement, ast.Expr | ast.Assert))
    shown = [
        statement
        for i, statement in enumerate(tree.body)
        if isinstance(statement, ast.Assert) or (i > last and isinstance(statement, ast.Expr))
    ]
    lines = code.split("\n")
    for statement in shown:
        assert statement.end_lineno is not None
        shares = any(
            other is not statement
            and other.lineno <= statement.end_lineno
            and (other.end_lineno or other.lineno) >= statement.lineno
            for other in tree.body
        )
        if not shares:  # a line with another statement stays, and so do all line numbers
            lines[statement.lineno - 1 : statement.end_lineno] = [""] * (statement.end_lineno - statement.lineno + 1)
    return "\n".join(lines)


def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
