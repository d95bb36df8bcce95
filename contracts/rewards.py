"""What goes into a grader and what comes out. Plain data; no Ray, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.environments import Said


class RewardConfigError(ValueError):
    """A `reward:` section that cannot be built; the message names the key."""


class GradingError(Exception):
    """Grading itself failed (a broken record or reward function), which is not the response's fault."""

    def __init__(self, message: str, trace: str | None = None) -> None:
        """trace: the frames of the user's code, outermost first, if it was that which raised."""
        super().__init__(message)
        self.trace = trace


class BadRecordError(Exception):
    """The record says nothing about any response (an unreadable gold answer): none is right or wrong, and grading
    has not failed. The message names the record's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeItem:
    """One response to grade."""

    prompt: str  # as the model saw it, template included
    response: str  # decoded, without the end-of-text token
    record: Mapping[str, Any]  # the data record; the gold answer is record["answer"]
    finish_reason: str | None = None  # "stop", "length", ...
    where: str = ""  # the record's place, for people: "train.jsonl, line 3"
    tokens: NDArray[np.int32] | None = field(default=None, compare=False)  # [T], the end-of-text token included
    sample: int = 0  # which of the responses to its prompt
    step: int = 0  # the RL step that sampled it; in an evaluation, those before it
    turns: tuple[Said, ...] = ()  # of an episode: `response` is what the model said in all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome. A wrong, endless or crashing response is worth 0 and is no error."""

    value: float  # weighted sum of the parts; 0.0 if error is set
    parts: dict[str, float] = field(
        default_factory=dict
    )  # per term, before weighting, by its name: "math", "code", ...
    error: str | None = None  # why there is no grade: counts against reward.max_failures_per_step, bad_record aside
    bad_record: bool = False  # `error` is the record's fault: no failure, but its whole group is left out
    notes: tuple[str, ...] = ()  # for people: "code: timed out after 10 s"
    trace: str | None = None  # where the user's function raised: file, line, function and source of each frame


@dataclass(frozen=True, slots=True)
class Score:
    """What one term says about one response."""

    value: float
    note: str | None = None


Scored = Score | GradingError | BadRecordError


class Term(Protocol):
    """One summand. `score` answers within its own deadline; it raises GradingError where grading itself fails, and
    BadRecordError where the record says nothing."""

    def score(self, item: GradeItem) -> Score: ...

    def close(self) -> None: ...


class AsyncTerm(Protocol):
    """One summand that waits for others more than it computes, or has an actor of its own."""

    async def scores(self, items: Sequence[GradeItem]) -> Sequence[Scored]:
        """One for each item, in order; several at a time where the term is graded by batch or by group."""
        ...

    async def close(self) -> None: ...
