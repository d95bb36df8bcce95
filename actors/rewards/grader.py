"""Graders, which call the terms of a reward. Owns how a failing term affects a grade; never raises for a response.

`LaneGrader` computes lanes in a reward worker, and `HostGrader` is one lane in its own actor. `Grader` is the whole
reward in this process, for callers with few responses or without Ray.
"""

import asyncio
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from actors.rewards.assembly import Assembly, RewardCall, weighed
from actors.rewards.callables import FormatTerm, PythonTerm
from actors.rewards.generated import ReasoningGymTerm
from actors.rewards.hosted import HostedTerm
from actors.rewards.lanes import Lane, lanes_of
from actors.rewards.maths import MathTerm
from actors.rewards.programs import CodeTerm
from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import (
    BadRecordError,
    Grade,
    GradeItem,
    GradingError,
    RewardConfigError,
    Score,
    Scored,
    Term,
)

if TYPE_CHECKING:
    from actors.rewards.judge import JudgeTerm


class LaneGrader:
    """The lanes without an actor of their own. Thread-safe; `close` ends its child processes."""

    def __init__(self, options: RewardOptions, lanes: Sequence[Lane]) -> None:
        """RewardConfigError names the key of a term that cannot work."""
        self._lanes, self._options = lanes, options.terms
        self._terms: dict[int, Term] = {}
        try:
            for lane in lanes:
                for index in () if lane.hosted else lane.terms:
                    self._terms[index] = _build_term(options.terms[index], f"reward.terms[{index}]")
        except BaseException:
            self.close()
            raise

    def grade(self, lane: int, items: Sequence[GradeItem]) -> list[Grade]:
        """Return a lane's grades of one call."""
        terms = self._lanes[lane].terms
        if self._lanes[lane].size == 1:
            return [self._one(terms, item) for item in items]
        term = self._terms[terms[0]]
        assert isinstance(term, PythonTerm)
        return [grade_of(self._options[terms[0]], scored) for scored in term.scores(items)]

    def _one(self, terms: Sequence[int], item: GradeItem) -> Grade:
        """Grade one response. A failing term gives value 0.0 and `error`, with the parts graded so far."""
        parts: dict[str, float] = {}
        notes: tuple[str, ...] = ()
        for index in terms:
            try:
                scored: Scored = self._terms[index].score(item)
            except (BadRecordError, GradingError) as error:
                scored = error
            except Exception as error:  # a fault of the grading costs one rollout, not the run
                scored = GradingError(f"{type(error).__name__}: {error}")
            said = grade_of(self._options[index], scored)
            parts, notes = parts | said.parts, notes + said.notes
            if said.error is not None:
                return replace(said, parts=parts, notes=notes)
        return weighed([self._options[index] for index in terms], parts, notes)

    def close(self) -> None:
        for term in self._terms.values():
            term.close()


class HostGrader:
    """The lane of a term that has its own actor."""

    def __init__(self, options: RewardTerm, key: str, secret: str | None = None) -> None:
        """`secret`: the key of the judge's endpoint. Raises RewardConfigError."""
        self._options = options
        self._term: HostedTerm | JudgeTerm
        if options.kind == "judge":
            from actors.rewards import judge  # aiohttp takes longer to import than the configuration

            self._term = judge.JudgeTerm(options, secret)
        else:
            self._term = HostedTerm(options, key)

    async def grade(self, items: Sequence[GradeItem]) -> list[Grade]:
        return [grade_of(self._options, scored) for scored in await self._term.scores(items)]

    async def close(self) -> None:
        await self._term.close()


class Grader:
    """The whole reward in this process. Same interface as RewardPool, but `submit` and `drain` block during their
    calls. Threads may share it for `grade` and `grade_group`; where a term has its own lane they take turns."""

    def __init__(self, options: RewardOptions) -> None:
        self._lanes = lanes_of(options)
        self._assembly = Assembly(options.terms, self._lanes)
        self._grades: dict[int, Grade] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.Runner()
        self._waiting: list[RewardCall] = []  # calls of hosted lanes, which run together
        self._local = LaneGrader(options, self._lanes)
        self._hosts: dict[int, HostGrader] = {}
        try:
            for index, lane in enumerate(self._lanes):
                if lane.hosted:
                    self._hosts[index] = self._host(options.terms[lane.terms[0]], f"reward.terms[{lane.terms[0]}]")
        except BaseException:
            self.close()
            raise

    def grade(self, item: GradeItem) -> Grade:
        """Grade a single response."""
        if len(self._lanes) == 1 and not self._lanes[0].hosted:
            return self._local.grade(0, [item])[0]
        return self.grade_group([item])[0]

    def grade_group(self, items: Sequence[GradeItem]) -> list[Grade]:
        """Grade all responses to one prompt."""
        with self._lock:
            self.begin([range(len(items))])
            for key, item in enumerate(items):
                self.submit(key, item)
            grades = self.drain()
            return [grades[key] for key in range(len(items))]

    def begin(self, groups: Sequence[Sequence[int]] = (), *, same_step: bool = False) -> None:
        self._assembly.begin(groups)
        self._grades = {}

    def submit(self, key: int, item: GradeItem) -> None:
        self._call(self._assembly.submit(key, item))

    def poll(self) -> None:
        """Do nothing: no call runs in the background."""

    def drain(self) -> dict[int, Grade]:
        self._call(self._assembly.flush())
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._loop.run(self._answer(waiting))
        return self._grades

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._local.close()
        for host in self._hosts.values():
            self._loop.run(host.close())
        self._loop.close()

    def _host(self, term: RewardTerm, key: str) -> HostGrader:
        async def make() -> HostGrader:  # a class may need the event loop of its calls
            return HostGrader(term, key, secret_of(term))

        return self._loop.run(make())

    def _call(self, calls: Sequence[RewardCall]) -> None:
        for call in calls:
            if self._lanes[call.lane].hosted:
                self._waiting.append(call)
            else:
                self._grades.update(self._assembly.answered(call, self._local.grade(call.lane, call.items)))

    async def _answer(self, calls: Sequence[RewardCall]) -> None:
        room = {lane: asyncio.Semaphore(self._lanes[lane].in_flight) for lane in self._hosts}

        async def one(call: RewardCall) -> None:
            async with room[call.lane]:
                grades = await self._hosts[call.lane].grade(call.items)
            self._grades.update(self._assembly.answered(call, grades))

        await asyncio.gather(*map(one, calls))


def grade_of(term: RewardTerm, scored: Scored) -> Grade:
    """Return the grade of a response by one term."""
    name = term.label
    match scored:
        case Score(value=value, note=note):
            return weighed([term], {name: value}, (f"{name}: {note}",) if note else ())
        case BadRecordError():
            return Grade(value=0.0, error=f"{name}: {scored}", bad_record=True)
        case GradingError():
            return Grade(value=0.0, error=f"{name}: {scored}", trace=scored.trace)


def secret_of(term: RewardTerm) -> str | None:
    """Return the key of a judge's endpoint, from this process's environment."""
    return os.environ.get(term.key_env) if term.key_env else None


class EnvironmentTerm:
    """The sum of the environment's rewards for the turns of an episode."""

    def score(self, item: GradeItem) -> Score:
        return Score(math.fsum(part.reward for part in item.turns if part.reward is not None))

    def close(self) -> None:
        """Do nothing: nothing is open."""


def build(options: RewardOptions) -> Grader:
    """Return the grader of a `reward:` section. RewardConfigError names the key of a term that cannot work."""
    for index, term in enumerate(options.terms):
        if term.label in [other.label for other in options.terms[:index]]:
            key = f"reward.terms[{index}].name"
            raise RewardConfigError(f"{key}: two terms are called {term.label!r}; set {key}")
    return Grader(options)


def _build_term(options: RewardTerm, key: str) -> Term:
    match options.kind:
        case "math":
            return MathTerm(options)
        case "code":
            return CodeTerm(options)
        case "format":
            return FormatTerm(options, key)
        case "python":
            return PythonTerm(options, key)
        case "environment":
            return EnvironmentTerm()
        case "reasoning_gym":
            return ReasoningGymTerm(options, key)
        case "judge" as other:
            raise AssertionError(f"a {other} is graded by an actor of its own")
