"""The pump between the ledger (who owns what) and the seats (the workers): one thread, one `ray.wait`, no hidden state.

Owns losses and restarts of workers, the weights they hold, and the clock of every wait. Never looks at tokens.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from actors.engine.commands import Abort, Submit
from actors.engine.options import RolloutOptions
from actors.engine.process import EngineStartError
from actors.engine.types import (
    DrafterFailed,
    EngineFailed,
    EngineWindow,
    Finished,
    FinishReason,
    IntArray,
    Progress,
    Rejected,
    Request,
    Rollout,
    WeightsLoaded,
)
from actors.rollout_worker import Leaving, SupervisorStatus, WorkerEvent
from actors.spot.types import Checkpointed, MicroStep, TrainFailed, TrainStopped
from actors.spot_host import DrafterEvent, DrafterReady, RecordingReport
from launch.dispatch.drafters import DrafterMessages
from launch.dispatch.errors import NoWorkersError, StaleWeightsError, WorkerStartError
from launch.dispatch.ledger import FailedRequest, Ledger
from launch.dispatch.seat import Seat, SeatState, Waitable, Weights, WorkerHandle, worker_name
from launch.dispatch.spans import SpanSink, WorkerSpans
from models.manifest import WeightsManifest
from policies.drafter.lineage import micro_steps

_TICK_S = 0.25  # deadlines are looked at this often when nothing arrives
_ABORT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 5.0  # for a worker that was told to end to give its requests back
_CLOSE_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStats:
    """One `run`. finished + len(failed) == requests, unless interrupted."""

    requests: int
    finished: int
    failed: tuple[FailedRequest, ...]
    reissued: int  # re-issues after lost workers
    lost_workers: int
    duplicates: int  # events ignored because their sender no longer held the request
    tokens: int  # response tokens of the finished rollouts
    preempted: int  # recomputed by engines that ran out of cache
    seconds: float
    sampled_by: Mapping[int, int]  # request id -> index of the worker that finished it
    interrupted: bool = False
    reissued_ids: frozenset[int] = frozenset()  # requests that more than one worker sampled


class RolloutDispatcher:
    """See the package docstring. Not thread-safe; every method waits with a deadline."""

    def __init__(
        self,
        spawn: Callable[[int], WorkerHandle],
        options: RolloutOptions,
        *,
        start_timeout_s: float = 600.0,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        on_span: SpanSink = lambda worker, kind, start_s, end_s: None,
        on_window: Callable[[str, EngineWindow], None] = lambda worker, window: None,
        on_spot: Callable[[str, DrafterEvent], None] = lambda worker, event: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`on_event(kind, message)`: worker_lost, worker_restarted, worker_dead, request_rejected, request_failed."""
        self._spawn = spawn
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._on_event = on_event
        self._on_window = on_window
        self._on_spot = on_spot
        self._clock = clock
        self._wall = wall
        self._weights: Weights | None = None
        self._ledger = Ledger([], max_retries=options.max_retries)
        self._on_finished: Callable[[Rollout], None] = lambda rollout: None
        self._seats: dict[str, Seat] = {}  # by name
        self._spans = [WorkerSpans(worker_name(i), on_span) for i in range(options.workers)]
        self._started = self._aborting = False
        self._lost = self._tokens = self._preempted = 0
        self._sampled_by: dict[int, int] = {}
        self._reissued_ids: set[int] = set()
        self._drafters = DrafterMessages()

    def start(self) -> None:
        """Start all workers at once. Raises WorkerStartError: a worker that fails at first would fail again."""
        for index in range(self._options.workers):
            seat = Seat(index=index, name=worker_name(index), handle=self._spawn(index))
            self._seats[seat.name] = seat
            self._enter(seat, SeatState.STARTING, self._start_timeout_s)
            seat.start_engine()
        while any(seat.state is SeatState.STARTING for seat in self._seats.values()):
            self._pump()
        self._started = True

    def set_weights(self, manifest: WeightsManifest, ref: "ray.ObjectRef[Any]") -> None:
        """Send weights to all workers at once and check what each answers. `ref`: uint8 buffer in the object store.

        Returns when every worker that is up holds them; one that fails or is too slow is lost, and gets them when it
        is back. Raises StaleWeightsError, NoWorkersError.
        """
        self._weights = Weights(manifest, ref)
        for seat in self._seats.values():
            if seat.state in (SeatState.READY, SeatState.LOADING):
                self._load(seat)
        while True:
            states = {seat.state for seat in self._seats.values()}
            if SeatState.LOADING not in states and SeatState.READY in states:
                return
            self._pump()

    def run(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Rollout], None],
        *,
        tick: Callable[[], object] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> DispatchStats:
        """Sample all requests; `on_finished` is called once per rollout, in order of arrival, on this thread.

        `tick` is called about every 0.25 s and after every batch of events. `should_stop` (a flag set by a signal
        handler) aborts what runs and returns with `interrupted`. On any exception, KeyboardInterrupt included, what
        runs is aborted before it propagates, so that the next `run` starts clean. Raises NoWorkersError,
        StaleWeightsError, ValueError (two requests with one id), and what the callbacks raise.
        """
        begin_s = self._clock()
        self._ledger = Ledger(requests, max_retries=self._options.max_retries)
        for seat in self._seats.values():
            self._offer(seat)
        self._on_finished = on_finished
        self._sampled_by = {}
        self._reissued_ids = set()
        self._lost = self._tokens = self._preempted = 0
        for spans in self._spans:
            spans.begin(self._wall())
        interrupted = False
        try:
            while not self._ledger.done and not (interrupted := should_stop()):
                self._assign()
                self._pump()
                tick()
        except BaseException:
            self.abort_all()
            raise
        else:
            if interrupted:
                self.abort_all()
        finally:
            for spans in self._spans:
                spans.end(self._wall())
            self._on_finished = lambda rollout: None
        ledger = self._ledger
        return DispatchStats(
            requests=ledger.total,
            finished=ledger.finished,
            failed=tuple(ledger.failed),
            reissued=ledger.reissued,
            lost_workers=self._lost,
            duplicates=ledger.duplicates,
            tokens=self._tokens,
            preempted=self._preempted,
            seconds=self._clock() - begin_s,
            sampled_by=self._sampled_by,
            interrupted=interrupted,
            reissued_ids=frozenset(self._reissued_ids),
        )

    def settle(self) -> None:
        """Handle what has arrived, such as the last window of the run before, and answers to new drafter weights; does
        not wait."""
        for seat, loaded in self._drafters.updated():
            if loaded.reason:
                self._on_event(
                    "drafter_not_updated",
                    f"{seat.name}: version {micro_steps(loaded.version)} of {loaded.name}: {loaded.reason}",
                )
            self._on_spot(seat.name, loaded)
        self._pump(timeout_s=0.0)

    def share(self, rollouts: Sequence[tuple[IntArray, IntArray, int]]) -> None:
        """Show each worker's drafters the rollouts, as (prompt, response, worker), that others made. Never waits,
        never fails."""
        self._drafters.share(self._seats.values(), rollouts)

    def save_drafters(self, directory: str) -> str | None:
        """The drafters' state into `directory`, which the workers can write. Returns why it was not written, if so:
        within a deadline, whatever happens."""
        return self._drafters.save(self._seats.values(), directory)

    def drafters_are_in(self, directory: str) -> None:
        """Where engines that start from now on find the drafters' state."""
        self._drafters.saved_as(directory)

    def load_drafters(self, directory: str) -> None:
        """All drafters take the saved state, those of engines restarted later too. Never waits, never fails."""
        self._drafters.load(self._seats.values(), directory)

    def set_drafter(self, name: str, manifest: WeightsManifest, payload: NDArray[np.uint8]) -> None:
        """All engines draft with these weights from now on, those restarted later too. Never waits, never fails."""
        self._drafters.update(self._seats.values(), name, manifest, payload)

    def stop_training(self, timeout_s: float) -> list[str]:
        """When this returns no worker's trainer is on its device, but for those named: they did not say so in time."""
        asked = {s.handle.stop_training.remote(): s.name for s in self._seats.values() if s.state is SeatState.READY}
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        for answer in ready:
            with suppress(RayError):  # of a worker that is lost, and its trainer with it
                ray.get(answer, timeout=timeout_s)
        return [asked[answer] for answer in late]

    def abort_all(self) -> None:
        """Abort what runs and wait until the engines have said so; a worker that does not is lost. Bounded by 10 s."""
        self._on_finished, self._aborting = (lambda rollout: None), True
        for seat in self._seats.values():
            self._handle_inbox(seat)
            if seat.state is SeatState.READY and (running := self._ledger.running(seat.name)):
                seat.give(Abort(tuple(running)))
        deadline_s = self._clock() + _ABORT_TIMEOUT_S
        while True:
            busy = [s for s in self._seats.values() if s.state is SeatState.READY and self._ledger.running(s.name)]
            if not busy:
                break
            if self._clock() > deadline_s:
                for seat in busy:
                    self._lose(seat, f"did not abort its requests within {_ABORT_TIMEOUT_S:g} s", alive=False)
                break
            self._pump()
        self._ledger, self._aborting = Ledger([], max_retries=0), False

    def status(self, timeout_s: float = 5.0) -> dict[str, SupervisorStatus | str]:
        """What each worker says about itself, or why it says nothing."""
        asked = {s.name: s.handle.status.remote() for s in self._seats.values() if s.state is not SeatState.DEAD}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        answers: dict[str, SupervisorStatus | str] = {s.name: s.state.value for s in self._seats.values()}
        for name, ref in asked.items():
            if ref not in ready:
                answers[name] = f"no answer within {timeout_s:g} s"
                continue
            try:
                answers[name] = ray.get(ref, timeout=timeout_s)
            except RayError as error:
                answers[name] = _reason(error)
        return answers

    def close(self) -> None:
        """Close the engines (bounded), then end the actors."""
        refs = [seat.handle.shutdown.remote() for seat in self._seats.values() if seat.state is not SeatState.DEAD]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
        for seat in self._seats.values():
            if seat.state is not SeatState.DEAD:
                seat.kill()
        self._seats.clear()

    # The pump.

    def _assign(self) -> None:
        for name, requests in self._ledger.assign().items():
            seat = self._seats[name]
            if len(self._ledger.running(name)) == len(requests):
                seat.progress_s = self._clock()  # it was idle: its silence counts from now
            seat.give(Submit(tuple(requests)))

    def _pump(self, timeout_s: float = _TICK_S) -> None:
        """Wait for anything, at most `timeout_s`, and handle all that is there; then look at the deadlines."""
        owner: dict[Waitable, Seat] = {w: seat for seat in self._seats.values() for w in seat.waitables()}
        if not owner:
            reasons = "; ".join(f"{s.name}: {s.reason}" for s in self._seats.values()) or "none was started"
            raise NoWorkersError(
                f"no rollout worker is left ({reasons})",
                remedy="see the workers' reasons; raise rollout.max_worker_restarts if the losses are not their fault",
            )
        waitables: list[Any] = list(owner)
        ready, _ = ray.wait(waitables, num_returns=1, timeout=timeout_s)
        if ready and len(waitables) > 1:
            ready, _ = ray.wait(waitables, num_returns=len(waitables), timeout=0)
        for waitable in ready:
            seat = owner[waitable]
            if any(w is waitable for w in seat.waitables()):  # else the seat was lost a moment ago
                self._receive(seat, waitable)
        self._check_deadlines()

    def _receive(self, seat: Seat, waitable: Waitable) -> None:
        events: list[WorkerEvent] | None = []
        answer: SupervisorStatus | WeightsLoaded | None = None
        try:  # only what the worker says: a RayError of a callback is not its fault
            if waitable is seat.stream:
                events = seat.take_events()
            elif waitable is seat.pending:
                answer = seat.take_answer()
            else:
                seat.take_send(waitable)
        except RayError as error:
            self._lose(seat, _reason(error), alive=isinstance(error, RayTaskError))
            return
        if events is None:
            self._lose(seat, "its engine's event stream ended", alive=True)
        elif answer is not None:
            self._answered(seat, answer)
        else:
            seat.inbox.extend(events)
            self._handle_inbox(seat)

    def _handle_inbox(self, seat: Seat) -> None:
        while seat.inbox:  # emptied by a loss; kept by an exception of a callback, for abort_all
            self._handle(seat, seat.inbox.popleft())

    def _handle(self, seat: Seat, event: WorkerEvent) -> None:
        match event:
            case Finished(rollout):
                self._finished(seat, rollout)
            case Progress(request_id, delta):
                self._progressed(seat)
                self._ledger.progress(seat.name, request_id, delta)
            case Rejected(request_id, reason):
                if (failure := self._ledger.reject(seat.name, request_id, reason)) is not None:
                    self._on_event("request_rejected", f"request {failure.request_id}: {failure.reason}")
            case EngineWindow():
                if event.decode_tokens or event.prefill_tokens:
                    self._progressed(seat)
                self._preempted += event.preempted
                self._spans[seat.index].window(event)
                self._on_window(seat.name, event)
            case EngineFailed(reason):
                self._lose(seat, reason, alive=True)
            case Leaving(reason):
                self._leave(seat, reason)
            case DrafterFailed(name, reason, final):
                until = "any more" if final else "until it gets new weights"
                self._on_event("drafter_failed", f"{seat.name}: {name} is not used {until}: {reason}")
                self._on_spot(seat.name, event)
            case MicroStep() | TrainStopped() | Checkpointed() | TrainFailed() | DrafterReady() | RecordingReport():
                self._on_spot(seat.name, event)
            case _:
                assert_never(event)

    def _progressed(self, seat: Seat) -> None:
        seat.progress_s = self._clock()

    def _finished(self, seat: Seat, rollout: Rollout) -> None:
        self._progressed(seat)
        if seat.state is SeatState.LEAVING and rollout.finish_reason is FinishReason.ABORT:
            self._ledger.hand_back(seat.name, rollout)
            seat.handed_back.add(rollout.request_id)
            return
        if not self._ledger.finish(seat.name, rollout):
            return
        expected = self._weights.manifest.version if self._weights else rollout.weights_version
        if rollout.weights_version != expected and not self._aborting:
            raise StaleWeightsError(
                f"{seat.name} sampled with weights version {rollout.weights_version}, although it answered that it "
                f"holds version {expected}",
                remedy="its rollouts must not be trained on: see its log",
            )
        self._tokens += len(rollout.tokens)
        self._sampled_by[rollout.request_id] = seat.index
        self._on_finished(rollout)

    # Losses and restarts.

    def _check_deadlines(self) -> None:
        now_s = self._clock()
        for seat in self._seats.values():
            if seat.state is SeatState.LEAVING:
                if now_s > seat.deadline_s or seat.handed_back.issuperset(self._ledger.running(seat.name)):
                    self._lose(seat, seat.reason, alive=False)
            elif seat.state in (SeatState.STARTING, SeatState.LOADING) and now_s > seat.deadline_s:
                key = "rollout.weight_sync_timeout_s" if seat.state is SeatState.LOADING else "cluster.start_timeout_s"
                self._lose(seat, f"{seat.state.value} took longer than {key}", alive=False)
            elif seat.state is SeatState.READY and now_s - seat.progress_s > self._options.stall_timeout_s:
                if running := self._ledger.running(seat.name):
                    silence = f"no progress on {len(running)} requests for {self._options.stall_timeout_s:g} s"
                    self._lose(seat, f"{silence} (rollout.stall_timeout_s)", alive=False)
                else:
                    seat.progress_s = now_s

    def _leave(self, seat: Seat, reason: str) -> None:
        """The worker will end soon, whatever we do: take its requests back with all their tokens, then replace it."""
        seat.reason = reason
        seat.handed_back.clear()
        seat.pending = None
        if seat.state is SeatState.READY and (running := self._ledger.running(seat.name)):
            seat.give(Abort(tuple(running)))
        self._enter(seat, SeatState.LEAVING, _LEAVE_TIMEOUT_S)

    def _lose(self, seat: Seat, reason: str, *, alive: bool) -> None:
        """Take back what the worker holds; restart its engine if the actor is alive, else make a new actor."""
        if seat.state is SeatState.DEAD:
            return
        if seat.state is SeatState.LEAVING:
            reason, alive = seat.reason, False  # whatever happens to it now
        if not self._started:
            raise WorkerStartError(f"{seat.name} did not start: {reason}")
        self._lost += 1
        wall_s = self._wall()
        seat.reason = reason
        seat.down_since_wall_s = seat.down_since_wall_s or wall_s
        version = self._weights.manifest.version if self._weights else 0
        loss = self._ledger.lose(seat.name, reason, now_s=wall_s, weights_version=version)
        self._reissued_ids.update(loss.reissued)
        self._on_event(
            "worker_lost",
            f"{seat.name}: {reason}; {len(loss.reissued)} requests are re-issued with {loss.prefix_tokens} tokens",
        )
        if loss.failed:
            ids = ", ".join(str(failure.request_id) for failure in loss.failed)
            self._on_event("request_failed", f"requests {ids}: {loss.failed[0].reason}")
        if seat.restarts >= self._options.max_worker_restarts:
            seat.kill()
            self._enter(seat, SeatState.DEAD)
            self._on_event("worker_dead", f"{seat.name}: {seat.restarts} restarts are used up, the last loss: {reason}")
        else:
            seat.restarts += 1
            if not alive:
                seat.kill()
                seat.handle = self._spawn(seat.index)
            self._enter(seat, SeatState.STARTING, self._start_timeout_s)
            seat.start_engine()
        for rollout in loss.finished:
            self._sampled_by[rollout.request_id] = seat.index
            self._tokens += len(rollout.tokens)
            self._on_finished(rollout)

    def _answered(self, seat: Seat, answer: SupervisorStatus | WeightsLoaded) -> None:
        if isinstance(answer, WeightsLoaded):
            self._loaded(seat, answer)
            return
        seat.open_stream()
        self._drafters.started(seat)
        if self._weights is not None:
            self._load(seat)
        else:
            self._ready(seat)

    def _load(self, seat: Seat) -> None:
        assert self._weights is not None
        self._enter(seat, SeatState.LOADING, self._options.weight_sync_timeout_s)
        seat.load(self._weights)

    def _loaded(self, seat: Seat, loaded: WeightsLoaded) -> None:
        assert self._weights is not None
        wanted = self._weights.manifest
        if (loaded.version, loaded.checksum) != (wanted.version, wanted.checksum):
            raise StaleWeightsError(
                f"{seat.name} holds weights version {loaded.version} with checksum {loaded.checksum:08x}, "
                f"sent were version {wanted.version} with checksum {wanted.checksum:08x}",
                remedy="a worker that cannot hold the weights it was sent must not sample: see its log",
            )
        if seat.down_since_wall_s is None:
            self._spans[seat.index].other("load_weights", seat.since_wall_s, self._wall())
        self._ready(seat)

    def _ready(self, seat: Seat) -> None:
        self._enter(seat, SeatState.READY)
        if seat.down_since_wall_s is not None:
            seconds = self._wall() - seat.down_since_wall_s
            self._spans[seat.index].other("restart", seat.down_since_wall_s, self._wall())
            self._on_event("worker_restarted", f"{seat.name}: back after {seconds:.1f} s (restart {seat.restarts})")
            seat.down_since_wall_s = None

    def _enter(self, seat: Seat, state: SeatState, timeout_s: float = 0.0) -> None:
        seat.enter(state, now_s=self._clock(), wall_s=self._wall(), timeout_s=timeout_s)
        self._offer(seat)

    def _offer(self, seat: Seat) -> None:
        if seat.state is SeatState.READY:
            self._ledger.offer(seat.name, self._options.engine.max_running)
        else:
            self._ledger.withdraw(seat.name)


def _reason(error: RayError) -> str:
    """One line for people: the worker's own exception, or what Ray says first."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    first = str(cause).strip().splitlines()
    if isinstance(cause, EngineStartError) and first:
        return first[0]  # the engine's own reason: whoever asked for the start says that it failed
    preempted = " (its node was preempted)" if getattr(error, "preempted", False) else ""
    return f"{type(cause).__name__}: {first[0] if first else 'no message'}{preempted}"
