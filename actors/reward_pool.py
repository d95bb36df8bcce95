"""The driver's side of grading: assigns calls to workers, enforces deadlines, and replaces workers that hang or die.

Grading is a function of its input, so a lost worker's calls are graded again by another; only a response that loses
three workers has failed. A reward worker has one call at a time: otherwise Ray may lose answers from before a crash,
and the wrong rollout would be blamed. The actor of a term of its own has as many calls as the term allows; a call that
was lost twice runs alone. `actors.rewards` determines what a response is worth. One bad item never stops a step.

    with RewardPool(options, context) as pool:
        pool.begin([batch.ids(index) for index in range(len(batch.picks))])
        pool.submit(request_id, GradeItem(...))    # at once; the loop brings what is graded (`receive`)
        grades = pool.drain()  # {request_id: Grade}; grade.error says why a rollout could not be graded
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayTaskError

from actors.context import Context
from actors.identity import unique_name
from actors.reward_worker import RewardHost, RewardWorker, TimedGrades
from actors.rewards import Grade, GradeItem
from actors.rewards.assembly import Assembly, RewardCall
from actors.rewards.grader import LaneGrader, secret_of
from actors.rewards.lanes import Lane, lanes_of
from actors.spans import Joiner
from config.rewards import RewardOptions
from contracts.rewards import RewardConfigError

_GRACE_S = 10.0  # per term and for the call, so that a grader with its own deadlines is never killed because of them
_CLOSE_TIMEOUT_S = 5.0
_MAX_LOSSES = 3  # workers that one call may lose, and consecutive deaths of one worker before it is ready
_SPAN_GAP_S = 0.3  # gradings of one worker closer than this (a tick of the driver) form one span of the timeline

Handle = ActorProxy[Any]  # of a RewardWorker or a RewardHost


class RewardFailuresError(RuntimeError):
    """More rollouts of one RL step could not be graded than reward.max_failures_per_step allows."""

    remedy = "mend the reward function or the records, or raise reward.max_failures_per_step"


class RewardWorkerStartError(RuntimeError):
    """A reward worker does not start: an invalid `reward:` section, or a missing module."""


@dataclass(slots=True, eq=False)
class _Task:
    call: RewardCall
    step: int  # counts calls of begin; answers of another step are dropped
    losses: int = 0  # workers lost while they had it
    since_s: float = 0.0  # when it was sent to its worker

    @property
    def name(self) -> str:
        first, *others = self.call.keys
        return f"rollouts {first} to {others[-1]}" if others else f"rollout {first}"


@dataclass(slots=True, eq=False, kw_only=True)
class _Worker:
    handle: Handle
    ready: "ray.ObjectRef[str] | None"  # None: it is ready
    since_s: float  # when it was started
    sent: "dict[ray.ObjectRef[TimedGrades], _Task]" = field(default_factory=dict)
    busy_s: float = 0.0  # start of its present calls, by the wall clock
    deaths: int = 0  # of its predecessors, each before it was ready
    node_id: str = ""  # "": not ready yet

    def awaited(self) -> "list[ray.ObjectRef[Any]]":
        return [self.ready] if self.ready is not None else list(self.sent)


@dataclass(frozen=True, slots=True)
class GradesArrived:
    """Result of a pending call to a reward worker: a value, or an exception instead."""

    worker: _Worker
    ref: "ray.ObjectRef[Any]"
    value: Any


@dataclass(slots=True, eq=False, kw_only=True)
class _Crew:
    """Workers of one kind, and their queue."""

    title: str  # "reward worker"
    names: list[str]
    make: Callable[[str], tuple[Handle, "ray.ObjectRef[str]"]]  # starts one: its handle, and its answer once it is up
    in_flight: int
    needs: str = ""  # resources that it may wait for
    workers: list[_Worker] = field(default_factory=list)
    pending: deque[_Task] = field(default_factory=deque)

    def label(self, index: int) -> str:
        return f"{self.title} {index}" if len(self.names) > 1 or self.title == "reward worker" else self.title


class RewardPool:
    """`reward.workers` actors, and one for each term that has its own. Keys are request ids. Not thread-safe."""

    def __init__(
        self,
        options: RewardOptions,
        context: Context,
        *,
        grader: type[LaneGrader] = LaneGrader,
        actor_options: Callable[[], Mapping[str, Any]] = dict,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start the workers without waiting for them. `actor_options`: Ray's, evaluated at each worker's start.
        `grader`: of reward workers.

        The observer receives reward_failed, reward_error (once per place in a function), bad_record,
        reward_worker_replaced, and spans of grading, lost ones included; `drain` writes the open ones. Raises
        RewardWorkerStartError for an unusable function."""
        try:
            self._lanes = lanes_of(options)
        except RewardConfigError as error:
            raise RewardWorkerStartError(str(error)) from error
        self._options = options
        self._actor_options = actor_options
        self._start_timeout_s = start_timeout_s
        self._context = context
        self._spans: Joiner[str, str] = Joiner(_SPAN_GAP_S)
        self._step = 0
        self._assembly = Assembly(options.terms, self._lanes)
        self._grades: dict[int, Grade] = {}
        self._failures: list[str] = []
        self._bad_records: set[str] = set()  # those reported in this run
        self._traces: set[str] = set()  # of reward functions, reported in this run
        self._crew_of: list[_Crew] = []  # by lane
        self._crews: list[_Crew] = []
        self._grader = grader
        shared = self._shared()
        for lane in self._lanes:
            crew = self._hosted(lane) if lane.hosted else shared
            self._crew_of.append(crew)
            if crew not in self._crews:
                self._crews.append(crew)
        for crew in self._crews:
            crew.workers += [self._start(crew, index) for index in range(len(crew.names))]

    def begin(self, groups: Sequence[Sequence[int]] = (), *, same_step: bool = False) -> None:
        """Start a step: drop grades, failures and ungraded items of the step before.

        `groups`: the expected keys, by prompt; a key in none is its own group and batch. `same_step`: another round of
        the same RL step, whose failures still count towards reward.max_failures_per_step."""
        self._step += 1
        self._end_spans()
        self._assembly.begin(groups)
        for crew in self._crews:
            crew.pending.clear()
        self._grades.clear()
        if not same_step:
            self._failures.clear()

    def submit(self, key: int, item: GradeItem) -> None:
        """Queue one item; returns at once."""
        self._queue(self._assembly.submit(key, item))
        self._send()

    def drain(self) -> dict[int, Grade]:
        """Wait until everything submitted is graded or has failed; return all grades of the step.

        Bounded: every call has a deadline and at most three workers. Raises as `receive`."""
        self._queue(self._assembly.flush())
        self._send()
        self._context.loop.wait(lambda: self.idle)
        self._end_spans()
        grades, self._grades = self._grades, {}
        return grades

    @property
    def idle(self) -> bool:
        """Whether no item is to be graded."""
        return not any(crew.pending or any(worker.sent for worker in crew.workers) for crew in self._crews)

    @property
    def nodes(self) -> set[str]:
        """Node ids of the workers; includes "" while one is not ready."""
        return {worker.node_id for crew in self._crews for worker in crew.workers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and their graders' child processes. Idempotent."""
        self._end_spans()
        workers = [worker for crew in self._crews for worker in crew.workers]
        for worker in workers:
            for ref in worker.awaited():
                self._context.loop.forget(ref)
        if closing := [worker.handle.close.remote() for worker in workers]:
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_TIMEOUT_S)
        for worker in workers:
            _kill(worker)
        for crew in self._crews:
            crew.workers.clear()

    def _queue(self, calls: Sequence[RewardCall]) -> None:
        for call in calls:
            self._crew_of[call.lane].pending.append(_Task(call, self._step))

    # Reactions.

    def look(self) -> None:
        """Check the deadlines. Raises RewardFailuresError, RewardWorkerStartError."""
        for crew in self._crews:
            for index, worker in enumerate(crew.workers):
                for ref in worker.awaited():
                    since_s, limit_s = worker.since_s, self._start_timeout_s
                    if worker.ready is None:
                        since_s, limit_s = worker.sent[ref].since_s, self._limit_s(worker.sent[ref].call)
                    if self._context.clock() - since_s > limit_s:
                        waits = f", and may wait for {crew.needs}" if worker.ready is not None and crew.needs else ""
                        self._give_up(crew, index, f"it took longer than {limit_s:g} s{waits}")
                        break
        self._send()

    def receive(self, arrived: GradesArrived) -> None:
        """Take the grades of a call, and send more calls. Raises RewardFailuresError, RewardWorkerStartError."""
        worker, value = arrived.worker, arrived.value
        found = [(crew, crew.workers.index(worker)) for crew in self._crews if worker in crew.workers]
        if not found or arrived.ref not in worker.awaited():
            return  # the worker was replaced
        crew, index = found[0]
        if isinstance(value, Exception):
            raised = isinstance(value, RayTaskError)
            cause = value.cause if isinstance(value, RayTaskError) else value
            lines = str(cause).strip().splitlines() or ["no message"]
            said = lines if isinstance(cause, RewardConfigError) else lines[:1]
            self._give_up(crew, index, f"{type(cause).__name__}: " + "\n".join(said), died=not raised)
        elif worker.ready is not None:
            worker.ready, worker.node_id = None, cast(str, value)
        else:
            self._answered(crew, index, worker.sent.pop(arrived.ref), cast(TimedGrades, value))
        self._send()

    def _await(self, worker: _Worker, ref: "ray.ObjectRef[Any]") -> None:
        self._context.loop.expect(ref, partial(GradesArrived, worker, ref))

    def _answered(self, crew: _Crew, index: int, task: _Task, timed: TimedGrades) -> None:
        worker = crew.workers[index]
        if crew.in_flight == 1:
            self._span(crew.names[index], timed.start_s, timed.end_s)
        elif not worker.sent:
            self._span(crew.names[index], worker.busy_s, self._context.wall())
        self._record(task, timed.grades)

    def _give_up(self, crew: _Crew, index: int, reason: str, *, died: bool = False) -> None:
        """Replace the worker; its calls go to the next free one, or have failed for good."""
        worker, who = crew.workers[index], crew.label(index)
        sent = list(worker.sent.values())
        deaths = 0 if sent else worker.deaths + 1
        if not sent and not (died and deaths < _MAX_LOSSES):
            raise RewardWorkerStartError(f"{who} does not start: {reason}")
        _kill(worker)
        crew.workers[index] = self._start(crew, index, deaths)
        if not sent:
            self._context.observer.event("reward_worker_replaced", f"{who} died while it started: {reason}")
            return
        self._span(crew.names[index], worker.busy_s, self._context.wall())
        for one in sent:
            one.losses += 1
        again = [task for task in sent if task.step == self._step and task.losses < _MAX_LOSSES]
        names = again[0].name if len(again) == 1 else f"what it had of {len(again)} calls"
        fate = f"; {names} {'is' if len(again) != 1 or len(again[0].call.keys) == 1 else 'are'} graded again"
        self._context.observer.event("reward_worker_replaced", f"{who}: {reason}{fate if again else ''}")
        crew.pending.extendleft(reversed(again))
        for one in sent:
            if one not in again:
                lost = f"{one.losses} reward workers were lost while grading it, the last: {reason}"
                self._record(one, [Grade(value=0.0, error=lost)] * len(one.call.keys))

    def _limit_s(self, call: RewardCall) -> float:
        lane = self._lanes[call.lane]
        return lane.limit_s(len(call.keys)) + _GRACE_S * (len(lane.terms) + 1)

    def _span(self, name: str, start_s: float, end_s: float) -> None:
        """Record a grading span, joined with the worker's preceding ones, so that a step has few spans instead of one
        per item."""
        over = self._spans.add(name, "grade", start_s, end_s)
        if over is not None:
            self._context.observer.worked(name, over.label, over.start_s, over.end_s)

    def _end_spans(self) -> None:
        for worker, over in self._spans.flush():
            self._context.observer.worked(worker, over.label, over.start_s, over.end_s)

    def _record(self, task: _Task, grades: Sequence[Grade]) -> None:
        if task.step != self._step:
            return
        where = {key: item.where for key, item in zip(task.call.keys, task.call.items, strict=True)}
        for key, grade in self._assembly.answered(task.call, grades):
            self._grades[key] = grade
            if grade.error is not None:
                self._failed(f"rollout {key} ({where[key]})" if where[key] else f"rollout {key}", grade)

    def _failed(self, which: str, grade: Grade) -> None:
        assert grade.error is not None
        if grade.bad_record:  # the same for every rollout of the record, in every epoch
            if grade.error not in self._bad_records:
                self._bad_records.add(grade.error)
                self._context.observer.event("bad_record", f"{grade.error}; its rollouts are left out")
            return
        self._failures.append(f"{which}: {grade.error}")
        if grade.trace is not None:
            place = "\n".join(line for line in grade.trace.splitlines() if line.startswith("  "))
            if place not in self._traces:  # once per place; reward_failed has the details of each response
                self._traces.add(place)
                self._context.observer.event("reward_error", f"the reward function raised\n{grade.trace}")
        self._context.observer.event("reward_failed", self._failures[-1])
        if len(self._failures) > self._options.max_failures_per_step:
            shown = "; ".join(self._failures[:3])
            raise RewardFailuresError(
                f"{len(self._failures)} rollouts of this step could not be graded, reward.max_failures_per_step is "
                f"{self._options.max_failures_per_step}: {shown}"
            )

    def _send(self) -> None:
        """Send queued calls to workers that have room."""
        for crew in self._crews:
            for worker in crew.workers:
                while crew.pending and self._has_room(crew, worker, crew.pending[0]):
                    task = crew.pending.popleft()
                    if not worker.sent:
                        worker.busy_s = self._context.wall()
                    ref = worker.handle.grade.remote(task.call.lane, task.call.items)
                    task.since_s = self._context.clock()
                    worker.sent[ref] = task
                    self._await(worker, ref)

    def _has_room(self, crew: _Crew, worker: _Worker, task: _Task) -> bool:
        """Return whether the worker may take the call. A call on its last allowed worker runs alone, so that no other
        is blamed."""
        if worker.ready is not None or len(worker.sent) >= crew.in_flight:
            return False
        suspect = task.losses == _MAX_LOSSES - 1
        return not worker.sent or not (suspect or any(sent.losses == _MAX_LOSSES - 1 for sent in worker.sent.values()))

    def _start(self, crew: _Crew, index: int, deaths: int = 0) -> _Worker:
        handle, ready = crew.make(crew.names[index])
        worker = _Worker(handle=handle, ready=ready, since_s=self._context.clock(), deaths=deaths)
        self._await(worker, ready)
        return worker

    def _shared(self) -> _Crew:
        def make(name: str) -> tuple[Handle, "ray.ObjectRef[str]"]:
            options = {"num_cpus": 0, **self._actor_options(), "name": unique_name(name)}
            actor = ray.remote(RewardWorker).options(**options)
            handle = actor.remote(self._grader, self._options, self._lanes, name, self._context.log(name))
            return handle, handle.ready.remote()

        names = [f"reward-{index}" for index in range(self._options.workers)]
        return _Crew(title="reward worker", names=names, make=make, in_flight=1)

    def _hosted(self, lane: Lane) -> _Crew:
        """Return the crew of a term that has its own actor."""
        (index,) = lane.terms
        term = self._options.terms[index]
        resources = {"num_cpus": term.cpus, "num_gpus": term.gpus}

        def make(name: str) -> tuple[Handle, "ray.ObjectRef[str]"]:
            options = {**self._actor_options(), **resources, "name": unique_name(name)}
            at_once = lane.in_flight + 2  # plus `ready` and `close`
            actor = ray.remote(RewardHost).options(**options, max_concurrency=at_once)
            handle = actor.remote(term, f"reward.terms[{index}]", name, self._context.log(name))
            return handle, handle.ready.remote(secret_of(term))

        needs = " and ".join(
            f"{amount:g} {kind}" for kind, amount in (("GPUs", term.gpus), ("CPUs", term.cpus)) if amount
        )
        return _Crew(
            title=f"the actor of the reward term {term.label}",
            names=[f"reward-{term.label}"],
            make=make,
            in_flight=lane.in_flight,
            needs=needs,
        )


def _kill(worker: _Worker) -> None:
    ray.kill(cast("ActorHandle[Any]", worker.handle), no_restart=True)
