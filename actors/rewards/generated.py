"""The `reasoning_gym` term: the score of an answer by a data set of the package reasoning-gym.

Owns where the answer is read: the last <answer>...</answer> after the thinking part, which is the package's own
convention; otherwise as `fallback` says. The scorer runs in a child process with a deadline.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from actors.rewards.boxed import final_part
from actors.rewards.child import ChildDiedError, ChildTimeoutError, DeadlineChild
from actors.rewards.maths import unmarked_answer
from config.installed import install_extra
from config.rewards import RewardTerm
from contracts.rewards import GradeItem, GradingError, RewardConfigError, Score

FIELDS = ("answer", "metadata", "reasoning_gym", "config")  # of a record, beside the prompt
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged_answer(response: str, fallback: str, right: Any = None) -> str | None:
    """Return the answer of a response; None if it has none. With `auto`, a numeric `right` answer selects the last
    number."""
    end = final_part(response)
    found: list[str] = _TAGGED.findall(end)
    if found:
        return found[-1].strip()
    if fallback != "auto":
        return unmarked_answer(response, fallback)
    return unmarked_answer(response, "last_number") if _NUMBER.fullmatch(str(right)) else end.strip() or None


class ReasoningGymTerm:
    """Grades answers to generated questions; values as the data set gives them, most from 0.0 to 1.0."""

    def __init__(self, options: RewardTerm, key: str) -> None:
        """Start the child, which imports the package. RewardConfigError if it is not installed."""
        self._fallback, self._timeout_s = options.fallback, options.timeout_s
        self._child = DeadlineChild("reasoning_gym", memory_mb=4096, forks=True)
        try:
            self._child.start()
        except GradingError as error:
            self._child.close()
            raise RewardConfigError(
                f"{key}.kind: reasoning-gym cannot be used ({error}): {install_extra('reasoning-gym')}"
            ) from error

    def score(self, item: GradeItem) -> Score:
        if missing := [name for name in FIELDS if name not in item.record]:
            raise GradingError(
                f"the record has no field {missing[0]!r} (fields: {', '.join(sorted(item.record)) or 'none'}); records "
                "of data.reasoning_gym have it"
            )
        answer = tagged_answer(item.response, self._fallback, item.record["answer"])
        if answer is None:
            return Score(0.0, "no answer in the response")
        try:
            value, note = self._child.call(_asked(item.record, answer), timeout_s=self._timeout_s)
        except ChildTimeoutError:
            return Score(0.0, f"scoring took more than {self._timeout_s:g} s")
        except ChildDiedError:
            return Score(0.0, "scoring took more memory or nesting than it may")
        if not math.isfinite(value):
            return Score(0.0, f"{item.record['reasoning_gym']} scored {value}")
        return Score(value, note or (None if value == 1.0 else f"answered {answer:.80}"))

    def close(self) -> None:
        self._child.close()


def _asked(record: Mapping[str, Any], answer: str) -> tuple[Any, ...]:
    entry = {"question": record.get("prompt"), "answer": record["answer"], "metadata": record["metadata"]}
    return record["reasoning_gym"], record["config"], answer, entry
