"""Inputs and results of a grader. Plain data; no Ray, no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.environments import Said


class RewardConfigError(ValueError):
    """An invalid `reward:` section; the message names the key."""


class GradingError(Exception):
    """Grading itself failed (a broken record or reward function); the response is not at fault."""

    def __init__(self, message: str, trace: str | None = None) -> None:
        """trace: the stack frames of the user's code, outermost first, if it raised."""
        super().__init__(message)
        self.trace = trace


class BadRecordError(Exception):
    """The record cannot grade any response (an unreadable gold answer), but grading has not failed. The message names
    the record's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeItem:
    """One response to grade."""

    prompt: str  # as the model saw it, template included
    response: str  # decoded, without the end-of-text token
    record: Mapping[str, Any]  # the data record; the gold answer is record["answer"]
    finish_reason: str | None = None  # "stop", "length", ...
    where: str = ""  # the record's place, as text: "train.jsonl, line 3"
    tokens: NDArray[np.int32] | None = field(default=None, compare=False)  # [T], with the end-of-text token
    sample: int = 0  # index among the responses to its prompt
    step: int = 0  # the RL step that sampled it; in an evaluation, the number of RL steps before it
    turns: tuple[Said, ...] = ()  # episodes: `response` is the model's text of all turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Result of grading one response. A wrong, endless or crashing response gets 0 without an error."""

    value: float  # weighted sum of the parts; 0.0 if error is set
    parts: dict[str, float] = field(
        default_factory=dict
    )  # per term, before weighting, by its name: "math", "code", ...
    error: str | None = None  # why there is no grade: counts against reward.max_failures_per_step, unless bad_record
    bad_record: bool = False  # `error` is the record's fault: no failure, but its whole group is left out
    notes: tuple[str, ...] = ()  # readable notes: "code: timed out after 10 s"
    trace: str | None = None  # where the user's function raised: file, line, function and source of each frame


@dataclass(frozen=True, slots=True)
class Score:
    """One term's result for one response."""

    value: float
    note: str | None = None


Scored = Score | GradingError | BadRecordError


class Term(Protocol):
    """One summand of the reward. `score` returns within its own deadline. It raises GradingError if grading itself
    fails, and BadRecordError if the record cannot grade any response."""

    def score(self, item: GradeItem) -> Score: ...

    def close(self) -> None: ...
