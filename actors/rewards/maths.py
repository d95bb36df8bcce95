r"""The `math` term: does the response's answer equal the gold answer?

Owns where an answer is read, and when algebra is asked: everything that `equal_fast` cannot decide goes to
`math-verify`, in a child process with a deadline. Reads no answer from the prompt, and never judges the reasoning.

The answer is the content of the last \boxed{...} with something in it, after the end of the thinking part if there is
one; boxes joined by commas or "and" are one answer. `answer: first` reads the first instead. Without a box there is no
answer, unless `fallback` says otherwise: `gsm8k` reads the last `#### ...` line, `answer_line` the last `Answer: ...`
line, `last_number` the last number of the response. The gold answer is read in actors.rewards.gold.
"""

import re

from actors.rewards.algebra import question
from actors.rewards.boxed import final_part, first_boxed, last_boxed, thinks
from actors.rewards.child import ChildDiedError, ChildTimeoutError, DeadlineChild
from actors.rewards.equality import equal_fast
from actors.rewards.gold import UnreadableGoldError, gold_answer, last_hashes
from actors.rewards.markup import MAX_CHARS
from actors.rewards.options import RewardTerm
from actors.rewards.types import BadRecordError, GradeItem, GradingError, Score

_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?\\?%)?")
_ANSWER_LINE = re.compile(r"answer[*\s]*(?:is\s*)?:[ \t*]*([^\n]*)", re.IGNORECASE)


def read_answer(response: str, fallback: str, which: str = "last", *, thinking: bool = False) -> str | None:
    """The answer of a response, None if it gives none. `which`: the "last" box or the "first". `thinking`: see
    first_boxed."""
    answer = last_boxed(response) if which == "last" else first_boxed(response, thinking=thinking)
    if answer is None and fallback != "none":
        end = final_part(response)
        if fallback == "gsm8k":
            answer = last_hashes(end)
        else:
            found = (_LAST_NUMBER if fallback == "last_number" else _ANSWER_LINE).findall(end)
            answer = next((text.strip(" *") for text in reversed(found) if text.strip(" *$")), None)
    return answer or None


class MathTerm:
    """Grades mathematics; value 1.0 or 0.0."""

    def __init__(self, options: RewardTerm) -> None:
        self._fallback = options.fallback
        self._which = options.answer
        self._timeout_s = options.timeout_s
        self._child = DeadlineChild("symbolic", memory_mb=4096, forks=True)

    def score(self, item: GradeItem) -> Score:
        if "answer" not in item.record:
            raise GradingError(
                f"the record has no field 'answer' (fields: {', '.join(sorted(item.record)) or 'none'}); "
                "set data.answer_field"
            )
        try:
            gold = gold_answer(item.record["answer"])
        except UnreadableGoldError as error:
            raise BadRecordError(_unreadable(item, str(error))) from error
        answer = read_answer(item.response, self._fallback, self._which, thinking=thinks(item.prompt))
        if answer is None:
            return Score(0.0, "no answer in the response")
        if len(answer) > MAX_CHARS and answer != gold:
            return Score(0.0, f"an answer of {len(answer)} characters is not read")
        same = equal_fast(gold, answer)
        asked = question(gold, answer) if same is None else None
        if asked is None:
            same = bool(same)
        else:
            try:
                same = self._child.call((asked.gold, asked.answer, asked.places), timeout_s=self._timeout_s)
            except ChildTimeoutError:
                return Score(0.0, f"comparing took more than {self._timeout_s:g} s")
            except ChildDiedError:
                return Score(0.0, "comparing took more memory or nesting than it may")
            if same is None:
                raise BadRecordError(_unreadable(item, f"it is no expression: {gold:.80}"))
        return Score(float(same), None if same else f"answered {answer:.80}")

    def close(self) -> None:
        self._child.close()


def _unreadable(item: GradeItem, why: str) -> str:
    where = f"{item.where}: " if item.where else ""
    return f"{where}record['answer'], the gold answer, cannot be read: {why}"
