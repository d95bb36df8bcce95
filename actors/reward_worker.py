"""Grading outside the driver: a Ray actor around a grader, and the pool through which the driver uses several.

Owns deadlines and the replacement of workers that hang or die. Grading is a function of its item, so what a lost worker
had is graded again by another; only an item that loses three workers has failed. A worker has one item at a time: with
more, Ray may lose the answers of those before the one that killed it, and the wrong rollout would be blamed. Never
decides what a response is worth (`actors.rewards`), and never stops a step for one bad item.

    with RewardPool(config.reward, on_event=observer.event) as pool:
        pool.begin()
        dispatcher.run(requests, lambda r: pool.submit(r.request_id, GradeItem(...)), tick=pool.poll)
        grades = pool.drain()  # {request_id: Grade}; grade.error says why a rollout could not be graded
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError

from actors.identity import log_to, unique_name
from actors.rewards import Grade, GradeItem, build
from actors.rewards.options import RewardOptions
from actors.spans import Joiner

_log = logging.getLogger(__name__)
_GRACE_S = 10.0  # per term and for the call: a grader that keeps its own deadlines is never killed for them
_CLOSE_TIMEOUT_S = 5.0
_MAX_LOSSES = 3  # workers that one item may lose, and deaths in a row of one worker before it is ready
_SPAN_GAP_S = 0.3  # gradings of one worker closer than this (a tick of the driver) are one span of the timeline

SpanSink = Callable[[str, str, float, float], None]  # (actor, kind, start_s, end_s), seconds since the epoch


class RewardFailuresError(RuntimeError):
    """More rollouts of one RL step could not be graded than reward.max_failures_per_step allows."""

    remedy = "mend the reward function or the records, or raise reward.max_failures_per_step"


class RewardWorkerStartError(RuntimeError):
    """A reward worker does not start: a wrong `reward:` section, or a missing module."""


class SupportsGrade(Protocol):
    def grade(self, item: GradeItem) -> Grade: ...

    def close(self) -> None: ...


class RewardWorker:
    """Make it an actor with `ray.remote(RewardWorker)`. Grades one item at a time, in the order of the calls."""

    def __init__(self, factory: Callable[[], SupportsGrade], name: str = "reward", log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, name)
        self._name = name
        self._factory = factory
        self._grader: SupportsGrade | None = None

    def __repr__(self) -> str:
        return self._name

    @ray.method
    def ready(self) -> str:
        """Build the grader; raises what that raises. Call it first. The id of the worker's node."""
        self._grader = self._factory()
        return str(ray.get_runtime_context().get_node_id())

    @ray.method
    def grade(self, item: GradeItem) -> "TimedGrade":
        """What the grader says; an exception becomes `Grade.error`, worth 0."""
        assert self._grader is not None, "call ready() first"
        start_s = time.time()
        try:
            grade = self._grader.grade(item)
        except Exception as error:
            grade = Grade(value=0.0, error=f"{type(error).__name__}: {error}")
        if grade.error is not None:
            _log.warning("a response could not be graded: %s", grade.error)
        return TimedGrade(grade, start_s, time.time())

    @ray.method
    def close(self) -> None:
        if self._grader is not None:
            self._grader.close()


@dataclass(frozen=True, slots=True)
class TimedGrade:
    """A grade and when it was made, by the worker's time.time()."""

    grade: Grade
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class _Task:
    key: int
    item: GradeItem
    step: int  # which begin it belongs to; answers of another step are dropped
    losses: int = 0  # workers lost while grading it


@dataclass(slots=True, eq=False)
class _Sent:
    task: _Task
    answer: "ray.ObjectRef[TimedGrade]"


@dataclass(slots=True, eq=False, kw_only=True)
class _Grader:
    handle: ActorProxy[RewardWorker]
    ready: "ray.ObjectRef[str] | None"  # None: it is
    since_s: float  # when what is awaited was asked
    sent: _Sent | None = None
    deaths: int = 0  # of its predecessors, each before it was ready
    node_id: str = ""  # "": it is not ready

    def awaited(self) -> "ray.ObjectRef[Any] | None":
        return self.ready if self.ready is not None else self.sent.answer if self.sent is not None else None


class RewardPool:
    """`reward.workers` actors that grade items as they arrive. Keys are request ids. Not thread-safe."""

    def __init__(
        self,
        options: RewardOptions,
        *,
        factory: Callable[[], SupportsGrade] | None = None,
        actor_options: Callable[[], Mapping[str, Any]] = dict,
        start_timeout_s: float = 120.0,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        on_span: SpanSink = lambda worker, kind, start_s, end_s: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        log: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        """Starts the workers without waiting for them. `actor_options`: Ray's, for each worker whenever it starts.
        `factory`: another grader than `actors.rewards.build`'s. `on_event(kind, message)`: reward_failed, reward_error
        (once per place in a function), bad_record, reward_worker_replaced. `on_span("reward-0", "grade", ...)`: one
        call per stretch of gradings, lost ones included; what is open is written by `drain`. `log(name)`: the log file
        of an actor."""
        self._options = options
        self._factory = factory or partial(build, options)
        self._actor_options = actor_options
        self._start_timeout_s = start_timeout_s
        self._deadline_s = sum(term.timeout_s for term in options.terms) + _GRACE_S * (len(options.terms) + 1)
        self._on_event = on_event
        self._on_span = on_span
        self._clock = clock
        self._wall = wall
        self._spans: Joiner[str, str] = Joiner(_SPAN_GAP_S)
        self._step = 0
        self._pending: deque[_Task] = deque()
        self._grades: dict[int, Grade] = {}
        self._failures: list[str] = []
        self._bad_records: set[str] = set()  # reported ones, for the whole run
        self._traces: set[str] = set()  # of reward functions, told in this run
        self._log_of = log
        self.meanwhile: Callable[[], object] = lambda: None  # called often while `drain` keeps the driver waiting
        self._workers: list[_Grader] = [self._start(index) for index in range(options.workers)]

    def begin(self, *, same_step: bool = False) -> None:
        """Forget grades and failures, and what is not graded yet: it belongs to a step that was given up. `same_step`:
        another round of the RL step before, towards whose reward.max_failures_per_step its failures still count."""
        self._step += 1
        self._end_spans()
        self._pending.clear()
        self._grades.clear()
        if not same_step:
            self._failures.clear()

    def submit(self, key: int, item: GradeItem) -> None:
        """Queue one item; returns at once."""
        self._pending.append(_Task(key, item, self._step))
        self._send()

    def poll(self) -> None:
        """Collect what is graded, look at the deadlines, send more. Never waits. Raises RewardFailuresError,
        RewardWorkerStartError."""
        self._collect(0.0)

    def drain(self) -> dict[int, Grade]:
        """Wait until everything submitted is graded or has failed; all grades of the step. Bounded: every item has its
        deadline, and is given to three workers at most. Raises as `poll`."""
        while self._pending or any(worker.sent for worker in self._workers):
            self._collect(0.25)
            self.meanwhile()
        self._end_spans()
        grades, self._grades = self._grades, {}
        return grades

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes that the workers run on; "" among them: one has not said it yet."""
        return {worker.node_id for worker in self._workers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and their graders' child processes. Twice is fine."""
        self._end_spans()
        if closing := [worker.handle.close.remote() for worker in self._workers]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for worker in self._workers:
            _kill(worker)
        self._workers.clear()

    def _collect(self, timeout_s: float) -> None:
        waiting = [ref for worker in self._workers if (ref := worker.awaited()) is not None]
        if waiting:
            if timeout_s:
                ray.wait(waiting, num_returns=1, timeout=timeout_s)
            ready = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0])
            for index in range(len(self._workers)):
                self._collect_from(index, ready)
        self._send()

    def _collect_from(self, index: int, ready: "Set[ray.ObjectRef[Any]]") -> None:
        worker = self._workers[index]
        if (awaited := worker.awaited()) is None:
            return
        if awaited not in ready:
            limit_s = self._deadline_s if worker.ready is None else self._start_timeout_s
            if self._clock() - worker.since_s > limit_s:
                self._give_up(index, f"it took longer than {limit_s:g} s")
            return
        try:
            answer = ray.get(awaited, timeout=self._deadline_s)
        except RayError as error:
            raised = isinstance(error, RayTaskError)
            cause = error.cause if isinstance(error, RayTaskError) else error
            first_line = (str(cause).strip().splitlines() or ["no message"])[0]
            self._give_up(index, f"{type(cause).__name__}: {first_line}", died=not raised)
            return
        if worker.ready is not None:
            worker.ready, worker.node_id = None, cast(str, answer)
        else:
            assert worker.sent is not None
            sent, worker.sent = worker.sent, None
            timed = cast(TimedGrade, answer)
            self._span(index, timed.start_s, timed.end_s)
            self._record(sent.task, timed.grade)

    def _give_up(self, index: int, reason: str, *, died: bool = False) -> None:
        """Replace the worker; what it was grading goes to the next free one, or has failed for good."""
        worker = self._workers[index]
        deaths = worker.deaths + 1 if worker.sent is None else 0
        if worker.sent is None and not (died and deaths < _MAX_LOSSES):
            raise RewardWorkerStartError(f"reward worker {index} does not start: {reason}")
        _kill(worker)
        self._workers[index] = self._start(index, deaths)
        if worker.sent is None:
            self._on_event("reward_worker_replaced", f"reward worker {index} died while it started: {reason}")
            return
        now_s = self._wall()
        self._span(index, now_s - (self._clock() - worker.since_s), now_s)
        task = worker.sent.task
        task.losses += 1
        again = task.step == self._step and task.losses < _MAX_LOSSES
        fate = f"; rollout {task.key} is graded again" if again else ""
        self._on_event("reward_worker_replaced", f"reward worker {index}: {reason}{fate}")
        if again:
            self._pending.appendleft(task)
        else:
            lost = f"{task.losses} reward workers were lost while grading it, the last: {reason}"
            self._record(task, Grade(value=0.0, error=lost))

    def _span(self, index: int, start_s: float, end_s: float) -> None:
        """A worker graded; joined with what it did just before, so that a step has few spans and not one per item."""
        over = self._spans.add(f"reward-{index}", "grade", start_s, end_s)
        if over is not None:
            self._on_span(f"reward-{index}", over.label, over.start_s, over.end_s)

    def _end_spans(self) -> None:
        for worker, over in self._spans.flush():
            self._on_span(worker, over.label, over.start_s, over.end_s)

    def _record(self, task: _Task, grade: Grade) -> None:
        if task.step != self._step:
            return
        self._grades[task.key] = grade
        if grade.error is None:
            return
        if grade.bad_record:  # every rollout of the record says the same, in every epoch
            if grade.error not in self._bad_records:
                self._bad_records.add(grade.error)
                self._on_event("bad_record", f"{grade.error}; its rollouts are left out")
            return
        self._failures.append(f"rollout {task.key}: {grade.error}")
        if grade.trace is not None:
            place = "\n".join(line for line in grade.trace.splitlines() if line.startswith("  "))
            if place not in self._traces:  # once per place: what differs between responses is in reward_failed
                self._traces.add(place)
                self._on_event("reward_error", f"the reward function raised\n{grade.trace}")
        self._on_event("reward_failed", self._failures[-1])
        if len(self._failures) > self._options.max_failures_per_step:
            shown = "; ".join(self._failures[:3])
            raise RewardFailuresError(
                f"{len(self._failures)} rollouts of this step could not be graded, reward.max_failures_per_step is "
                f"{self._options.max_failures_per_step}: {shown}"
            )

    def _send(self) -> None:
        """Give pending items to the free workers."""
        for worker in self._workers:
            if not self._pending:
                return
            if worker.ready is None and worker.sent is None:
                task = self._pending.popleft()
                worker.since_s = self._clock()
                worker.sent = _Sent(task, worker.handle.grade.remote(task.item))

    def _start(self, index: int, deaths: int = 0) -> _Grader:
        name = f"reward-{index}"
        options = {"num_cpus": 0, **self._actor_options(), "name": unique_name(name)}
        actor = ray.remote(RewardWorker).options(**options)
        handle = actor.remote(self._factory, name, self._log_of(name))
        return _Grader(handle=handle, ready=handle.ready.remote(), since_s=self._clock(), deaths=deaths)


def _kill(worker: _Grader) -> None:
    ray.kill(cast("ActorHandle[RewardWorker]", worker.handle), no_restart=True)
