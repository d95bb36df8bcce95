"""The `format` and `python` terms of a reward worker: a pattern and a user's function. Owns their errors and deadlines.
Both run in a child process, because a regular expression or a function may never return.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from actors.rewards.calling import Member
from actors.rewards.child import ChildTimeoutError, DeadlineChild
from actors.rewards.lanes import described, unusable
from config.rewards import RewardTerm
from contracts.rewards import GradeItem, GradingError, RewardConfigError, Score, Scored


class FormatTerm:
    """Value 1.0 if the pattern (re.search, `.` matches newlines) occurs in the response, else 0.0."""

    def __init__(self, options: RewardTerm, key: str) -> None:
        if options.pattern is None:
            raise RewardConfigError(f"{key}.pattern is missing: kind=format needs a regular expression")
        try:
            re.compile(options.pattern)
        except re.error as error:
            raise RewardConfigError(f"{key}.pattern is not a regular expression: {error}") from error
        self._timeout_s = options.timeout_s
        self._child = DeadlineChild("pattern", options.pattern)

    def score(self, item: GradeItem) -> Score:
        try:
            found = self._child.call(item.response, timeout_s=self._timeout_s)
        except ChildTimeoutError as error:
            raise GradingError(f"the pattern took more than {self._timeout_s:g} s; make it simpler") from error
        return Score(float(found))

    def close(self) -> None:
        self._child.close()


class PythonTerm:
    """A user's function that returns a finite number for a response, or a list of them for a batch."""

    def __init__(self, options: RewardTerm, key: str) -> None:
        """Raises RewardConfigError if the function cannot be imported or called."""
        self._name, self._timeout_s = str(options.function), options.timeout_s
        self._batched = options.batch_size is not None
        self._child = DeadlineChild("function", json.dumps(described(options)))
        try:
            self._child.start()
        except GradingError as error:
            self._child.close()
            raise unusable(options, key, error) from error

    def score(self, item: GradeItem) -> Score:
        (scored,) = self.scores([item])
        if not isinstance(scored, Score):
            raise scored
        return scored

    def scores(self, items: Sequence[GradeItem]) -> list[Scored]:
        """Return the scores of a batch or of a whole group. If the function takes one response per call and a call
        hangs or dies, call each by itself: the others keep their values."""
        members, each = [member(item) for item in items], 1 if self._batched else len(items)
        try:
            return self._asked(members, None, self._timeout_s * each)
        except GradingError as error:
            if each == 1:
                return [error] * len(items)
        made: list[Scored] = []
        for which in range(len(items)):
            try:
                made += self._asked(members, which, self._timeout_s)
            except GradingError as error:
                made.append(error)
        return made

    def _asked(self, members: list[Member], which: int | None, timeout_s: float) -> list[Scored]:
        """Score all members, or only number `which`. GradingError if the call hangs or dies."""
        try:
            answers = self._child.call((members, which), timeout_s=timeout_s)
        except ChildTimeoutError as error:
            raise GradingError(f"{self._name} took more than {timeout_s:g} s and was killed") from error
        return [scored_of(*answer) for answer in answers]

    def close(self) -> None:
        self._child.close()


def member(item: GradeItem) -> Member:
    """Return a response in the form that a user's function gets."""
    return {
        "prompt": item.prompt,
        "response": item.response,
        "record": dict(item.record),
        "tokens": None if item.tokens is None else item.tokens.tolist(),
        "finish_reason": item.finish_reason,
        "sample": item.sample,
        "step": item.step,
        "turns": [asdict(part) for part in item.turns],
    }


def scored_of(value: float | None, error: str | None, trace: str | None) -> Scored:
    """Convert an outcome of `actors.rewards.calling`."""
    return GradingError(error, trace) if error is not None else Score(float(value or 0.0))
