r"""The gold answer of a record: its place in the field, and whether it can be read at all.

A record with an unreadable gold answer says nothing about a response; grading with it would mark every response wrong.
"""

import math
import re
from decimal import Decimal
from typing import Any

from actors.rewards.boxed import last_boxed
from actors.rewards.markup import MAX_CHARS, tidy

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_NOTHING = {"nan", "null", "n/a", "na", "tbd", "todo"}
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class UnreadableGoldError(Exception):
    """The record's gold answer cannot be read; the message says why."""


def gold_answer(answer: Any) -> str:
    """Return the gold text of a record's answer: the text after its last `####`, else its last box, else all of it."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UnreadableGoldError(f"it must be text or a number, not {type(answer).__name__}: {answer!r:.80}")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise UnreadableGoldError(f"it is {answer}")
        text = format(Decimal(repr(answer)), "f")
    else:
        text = str(answer).strip()
    gold = last_hashes(text)
    if gold == "":
        raise UnreadableGoldError("nothing follows its last ####")
    gold = gold or last_boxed(text)
    if gold is None and _OPEN_BOX.search(text):
        raise UnreadableGoldError(f"its box is empty or never closed: {text:.80}")
    gold = gold or text
    bare = tidy(gold[:MAX_CHARS])
    if not bare:
        raise UnreadableGoldError("it is empty")
    if bare.casefold() in _NOTHING or not re.search(r"\w|\\[A-Za-z]", bare):
        raise UnreadableGoldError(f"it has no content: {gold:.80}")
    if not _balanced(gold):
        raise UnreadableGoldError(f"its braces do not match: {gold:.80}")
    return gold


def last_hashes(text: str) -> str | None:
    """Return the text after the last `####` on its line (GSM8K); None without one."""
    lines = _HASHES.findall(text)
    return lines[-1].strip() if lines else None


def _balanced(text: str) -> bool:
    depth = 0
    for brace in _BRACE.findall(text):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0
