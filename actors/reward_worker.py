"""Ray actors that grade outside the driver, thin wrappers of the graders in `actors.rewards`. The pool
(`actors.reward_pool`) assigns their calls and replaces those that hang or die.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from actors.identity import log_to
from actors.rewards import Grade, GradeItem
from actors.rewards.grader import HostGrader, LaneGrader
from actors.rewards.lanes import Lane
from config.rewards import RewardOptions, RewardTerm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimedGrades:
    """The grades of one call, in the order of its responses, with start and end by the worker's time.time()."""

    grades: list[Grade]
    start_s: float
    end_s: float


class RewardWorker:
    """A Ray actor by `ray.remote(RewardWorker)`. Runs one call at a time, in order."""

    def __init__(
        self,
        grader: type[LaneGrader],
        options: RewardOptions,
        lanes: Sequence[Lane],
        name: str = "reward",
        log: str | None = None,
    ) -> None:
        """log: see log_to."""
        log_to(log, name)
        self._name = name
        self._kind, self._options, self._lanes = grader, options, lanes
        self._grader: LaneGrader | None = None

    def __repr__(self) -> str:
        return self._name

    @ray.method
    def ready(self) -> str:
        """Build the grader and return the id of the worker's node. Call it first; raises the grader's errors."""
        self._grader = self._kind(self._options, self._lanes)
        return str(ray.get_runtime_context().get_node_id())

    @ray.method
    def grade(self, lane: int, items: Sequence[GradeItem]) -> TimedGrades:
        """Return the grader's grades; an exception becomes the `Grade.error` of each, worth 0."""
        assert self._grader is not None, "call ready() first"
        start_s = time.time()
        try:
            grades = self._grader.grade(lane, items)
        except Exception as error:
            grades = [Grade(value=0.0, error=f"{type(error).__name__}: {error}")] * len(items)
        return _timed(grades, start_s)

    @ray.method
    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()


class RewardHost:
    """The actor of a term that has its own: many concurrent calls on one event loop."""

    def __init__(self, term: RewardTerm, key: str, name: str, log: str | None = None) -> None:
        """key: of the term in the configuration. log: see log_to."""
        log_to(log, name)
        sys.stdout = sys.stderr  # user code's prints go to the log as well
        self._name, self._term, self._key = name, term, key
        self._grader: HostGrader | None = None

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def ready(self, secret: str | None) -> str:
        """Same as RewardWorker.ready. secret: the key of a judge's endpoint. It is a call's argument because Ray stores
        constructor arguments and shows environments."""
        self._grader = HostGrader(self._term, self._key, secret)
        return str(ray.get_runtime_context().get_node_id())

    @ray.method
    async def grade(self, lane: int, items: Sequence[GradeItem]) -> TimedGrades:
        """Same as RewardWorker.grade, for asynchronous terms."""
        assert self._grader is not None, "call ready() first"
        start_s = time.time()
        try:
            grades = await self._grader.grade(items)
        except Exception as error:
            grades = [Grade(value=0.0, error=f"{type(error).__name__}: {error}")] * len(items)
        return _timed(grades, start_s)

    @ray.method
    async def close(self) -> None:
        if self._grader is not None:
            await self._grader.close()


def _timed(grades: list[Grade], start_s: float) -> TimedGrades:
    for grade in grades:
        if grade.error is not None:
            _log.warning("a response could not be graded: %s", grade.error)
    return TimedGrades(grades, start_s, time.time())
