r"""The `math` term: does the response's answer equal the gold answer?

Owns where an answer is read, and a fast exact path for plain numbers; everything else goes to `math-verify`, in a child
process with a deadline. Never reads an answer from the prompt, and never judges the reasoning.

The answer is the content of the first closed \boxed{...}. Without one there is no answer, unless `fallback` says
otherwise: `gsm8k` reads the last `#### ...` line, `last_number` the last number of the response.
The gold answer (record["answer"]) is what follows its last `####` (GSM8K), else its first \boxed{...}, else all of it.
"""

import re
from typing import Any

from actors.rewards.boxed import first_boxed
from actors.rewards.child import ChildTimeoutError, DeadlineChild
from actors.rewards.numerals import plain_number, strip_markup
from actors.rewards.options import RewardTerm
from actors.rewards.types import GradeItem, GradingError, Score

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?\\?%)?")


def gold_answer(answer: Any) -> str:
    """The gold text of a record's answer; a GradingError names the field if there is none."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise GradingError(f"record['answer'] must be text or a number, not {type(answer).__name__}: {answer!r:.80}")
    text = str(answer).strip()
    gold = _last_hashes(text) or first_boxed(text) or text
    if not gold:
        raise GradingError("record['answer'] is empty")
    return gold


def read_answer(response: str, fallback: str) -> str | None:
    """The answer of a response, None if it gives none."""
    answer = first_boxed(response)
    if answer is None and fallback == "gsm8k":
        answer = _last_hashes(response)
    elif answer is None and fallback == "last_number":
        numbers = _LAST_NUMBER.findall(response)
        answer = numbers[-1] if numbers else None
    return answer or None


def equal_fast(gold: str, answer: str) -> bool | None:
    """Equality where it is certain without algebra; None where it is not."""
    if strip_markup(gold) == strip_markup(answer):
        return True
    left, right = plain_number(gold), plain_number(answer)
    if left is None or right is None or left[1] != right[1]:
        return None
    if left[0] == right[0]:
        return True
    # Two different integers differ; a decimal may still be the rounded form of a fraction, which math-verify decides.
    return False if left[0].denominator == right[0].denominator == 1 else None


class MathTerm:
    """Grades mathematics; value 1.0 or 0.0."""

    def __init__(self, options: RewardTerm) -> None:
        self._fallback = options.fallback
        self._timeout_s = options.timeout_s
        self._child = DeadlineChild("symbolic", memory_mb=4096)

    def score(self, item: GradeItem) -> Score:
        if "answer" not in item.record:
            raise GradingError(
                f"the record has no field 'answer' (fields: {', '.join(sorted(item.record)) or 'none'}); "
                "set data.answer_field"
            )
        gold = gold_answer(item.record["answer"])
        answer = read_answer(item.response, self._fallback)
        if answer is None:
            return Score(0.0, "no answer in the response")
        same = equal_fast(gold, answer)
        if same is None:
            try:
                same = bool(self._child.call((gold, answer), timeout_s=self._timeout_s))
            except ChildTimeoutError:
                return Score(0.0, f"comparing took more than {self._timeout_s:g} s")
        return Score(float(same), None if same else f"answered {answer:.80}")

    def close(self) -> None:
        self._child.close()


def _last_hashes(text: str) -> str | None:
    lines = _HASHES.findall(text)
    return lines[-1].strip() if lines else None
