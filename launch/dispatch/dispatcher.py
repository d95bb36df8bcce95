"""The pump between the ledger (who owns what) and the seats (the workers): one thread, one `ray.wait`, no hidden state.

Owns losses and restarts of workers, the weights they hold, and the clock of every wait. Never looks at tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

import ray
from ray.exceptions import RayError, RayTaskError

from actors.engine.commands import Abort, Submit
from actors.engine.options import RolloutOptions
from actors.engine.types import (
    DrafterFailed,
    EngineFailed,
    EngineWindow,
    Finished,
    FinishReason,
    PassEvent,
    Progress,
    Rejected,
    Request,
    Rollout,
    WeightsLoaded,
)
from actors.rollout_worker import Leaving, SupervisorStatus, WorkerEvent
from actors.spot.types import Checkpointed, MicroStep, Published, TrainFailed, TrainStopped
from actors.spot_host import DrafterEvent, RecordingReport
from launch.dispatch.drafters import DrafterMessages
from launch.dispatch.errors import NoWorkersError, StaleWeightsError, WorkerStartError
from launch.dispatch.ledger import Ledger
from launch.dispatch.seat import (
    Seat,
    SeatState,
    Waitable,
    Weights,
    WorkerHandle,
    put_to_sleep,
    reason_of,
    worker_name,
)
from launch.dispatch.spans import SpanSink, WorkerSpans
from launch.dispatch.stats import DispatchStats, Tally
from launch.dispatch.weights import Handed, Loading, Sending
from models.manifest import WeightsManifest
from policies.drafter.lineage import micro_steps

_TICK_S = 0.25  # deadlines are looked at this often when nothing arrives
_ABORT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 5.0  # for a worker that was told to end to give its requests back
_CLOSE_TIMEOUT_S = 15.0
_START_KEY = "cluster.start_timeout_s"


class RolloutDispatcher:
    """See the package docstring. Not thread-safe; every method waits with a deadline."""

    def __init__(
        self,
        spawn: Callable[[str], WorkerHandle],
        options: RolloutOptions,
        *,
        start_timeout_s: float = 600.0,
        on_event: Callable[[str, str], None] = lambda kind, message: None,
        on_span: SpanSink = lambda worker, kind, start_s, end_s: None,
        on_window: Callable[[str, EngineWindow], None] = lambda worker, window: None,
        on_passes: Callable[[str, PassEvent], None] = lambda worker, event: None,
        on_spot: Callable[[str, DrafterEvent], None] = lambda worker, event: None,
        on_weights: Callable[[str, Weights], None] = lambda worker, weights: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`spawn(name)` makes a worker. `on_event(kind, message)`: worker_joined, worker_left, worker_lost,
        worker_restarted, worker_dead, request_rejected, request_failed."""
        self._spawn, self._options, self._start_timeout_s = spawn, options, start_timeout_s
        self._on_event, self._on_window, self._on_passes = on_event, on_window, on_passes
        self._on_spot, self._on_weights = on_spot, on_weights
        self._clock, self._wall = clock, wall
        self._ledger = Ledger([], max_retries=options.max_retries)
        self._on_finished: Callable[[Rollout], None] = lambda rollout: None
        self._seats: dict[str, Seat] = {}  # by name
        self._awaited: dict[Waitable, Seat] = {}
        self._on_span = on_span
        self._started = self._running = self._aborting = False
        self._look_s = 0.0  # when the deadlines are looked at again
        self._tally = Tally()
        self.drafters = DrafterMessages(self._seats)
        self._loading = Loading(
            self._seats,
            self.drafters,
            options.weight_sync_timeout_s,
            enter=self._enter,
            ready=self._ready,
            pump=self._pump,
            wall=wall,
            on_event=on_event,
        )

    def start(self) -> None:
        """Start all workers at once. Raises WorkerStartError: a worker that fails at first would fail again."""
        for index in range(self._options.workers):
            self.join(worker_name(index))
        while any(seat.state is SeatState.STARTING for seat in self._seats.values()):
            self._pump()
        self._started = True

    def join(self, name: str) -> None:
        """Start a worker, which gets the weights and work as soon as it is up, in the middle of a `run` too. Never
        waits. The name is new, or that of a worker that has left or is dead: ValueError."""
        known = self._seats.get(name)
        if known is not None and known.state is not SeatState.DEAD:
            raise ValueError(f"there is a worker {name!r} already: it is {known.state.value}")
        spans = WorkerSpans(name, self._on_span)
        seat = Seat(name=name, handle=self._spawn(name), spans=spans, awaited=self._awaited)
        self._seats[name] = seat
        if self._running:
            spans.begin(self._wall())
        if self._started:
            seat.down_since_wall_s = self._wall()
        self._start(seat)

    def leave(self, name: str) -> None:
        """Let a worker go for good, in the middle of a `run` too: it gives its requests back with all their tokens,
        closes its engine, and is gone; no weights are awaited of it. Never waits. KeyError: there is no such worker."""
        seat = self._seats[name]
        if seat.state is SeatState.DEAD:
            del self._seats[name]
        elif not seat.retiring:
            seat.retiring = True
            self._leave(seat, "it leaves")

    def set_weights(self, manifest: WeightsManifest, ref: "ray.ObjectRef[Any]") -> int:
        """Send weights to all workers at once and check what each answers. `ref`: uint8 buffer in the object store.

        Returns when every worker that is up holds them, how many that are; one that fails or is too slow is lost, and
        gets them when it is back. Raises StaleWeightsError, NoWorkersError."""
        self._loading.set(Weights(manifest, ref))
        self._hear_of_drafters()
        return sum(seat.state is SeatState.READY for seat in self._seats.values())

    def hand_over(self, send: Callable[[int], Sending], *, to_trainers: bool = False) -> Handed:
        """As `set_weights`, piece by piece from the learner's devices; `send(receivers)` begins it. Who does not get
        them, or starts meanwhile, loads them from the object store at the end. `to_trainers`: workers train drafters.
        Raises as `set_weights`, and what the learner's end raises."""
        handed = self._loading.hand_over(send, to_trainers=to_trainers)
        self._hear_of_drafters()
        return handed

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
        self._tally = Tally(begin_s=self._clock())
        self._ledger = Ledger(requests, max_retries=self._options.max_retries)
        self._on_finished, self._running = on_finished, True
        for seat in self._seats.values():
            self._offer(seat)
            seat.spans.begin(self._wall())
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
            for seat in self._seats.values():
                seat.spans.end(self._wall())
            self._running = False
            self._on_finished = lambda rollout: None
        return self._tally.stats(self._ledger, self._clock(), interrupted=interrupted)

    def settle(self) -> None:
        """Handle what has arrived, such as the last window of the run before, and answers to new drafter weights; does
        not wait."""
        self._hear_of_drafters()
        self._pump(timeout_s=0.0)

    def sleep(self, timeout_s: float) -> dict[str, str]:
        """Have all engines release their KV cache until they get work. Why some did not, by worker."""
        return put_to_sleep(self._seats.values(), timeout_s)

    def _hear_of_drafters(self) -> None:
        for seat, weights in self.drafters.fetched():
            self._on_weights(seat.name, weights)
        for seat, loaded in self.drafters.updated():
            if loaded.reason:
                self._on_event(
                    "drafter_not_updated",
                    f"{seat.name}: version {micro_steps(loaded.version)} of {loaded.name}: {loaded.reason}",
                )
            self._on_spot(seat.name, loaded)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Called within `run`, by a callback: sample these no further. Each still comes to `on_finished` once, with
        the tokens it has, as ABORT or as it ended meanwhile: at once if nobody runs it, else when its worker says so
        or is lost."""
        ended, running = self._ledger.abort(request_ids, now_s=self._wall(), weights_version=self._version)
        for name, ids in running.items():
            if self._seats[name].state is SeatState.READY:  # else it is about to give back all that it runs
                self._seats[name].give(Abort(tuple(ids)))
        for rollout in ended:
            self._tally.finished("", rollout)
            self._on_finished(rollout)

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
        if not self._awaited:
            reasons = "; ".join(f"{s.name}: {s.reason}" for s in self._seats.values()) or "none was started"
            raise NoWorkersError(
                f"no rollout worker is left ({reasons})",
                remedy="see the workers' reasons; raise rollout.max_worker_restarts if the losses are not their fault",
            )
        waitables: list[Any] = list(self._awaited)
        ready, _ = ray.wait(waitables, num_returns=1, timeout=timeout_s)
        if ready and len(waitables) > 1:
            ready, _ = ray.wait(waitables, num_returns=len(waitables), timeout=0)
        for waitable in ready:
            if (seat := self._awaited.get(waitable)) is not None:  # else it was lost a moment ago
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
                if seat.state is SeatState.CLOSING:
                    self._gone(seat)
            else:
                seat.take_send(waitable)
        except RayError as error:
            self._lose(seat, reason_of(error), alive=isinstance(error, RayTaskError))
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
                self._tally.preempted += event.preempted
                seat.spans.window(event)
                self._on_window(seat.name, event)
            case PassEvent():
                self._on_passes(seat.name, event)
            case EngineFailed(reason):
                self._lose(seat, reason, alive=True)
            case Leaving(reason):
                self._leave(seat, reason)
            case DrafterFailed(name, reason, final):
                until = "any more" if final else "until it gets new weights"
                self._on_event("drafter_failed", f"{seat.name}: {name} is not used {until}: {reason}")
                self._on_spot(seat.name, event)
            case Published(manifest):
                self.drafters.fetch(seat, manifest.version)
            case MicroStep() | TrainStopped() | Checkpointed() | TrainFailed() | RecordingReport():
                self._on_spot(seat.name, event)
            case _:
                assert_never(event)

    @property
    def _version(self) -> int:
        """Of the weights that every worker shall hold."""
        return self._loading.version or 0

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
        expected = self._loading.version
        if expected is not None and rollout.weights_version != expected and not self._aborting:
            raise StaleWeightsError(
                f"{seat.name} sampled with weights version {rollout.weights_version}, although it answered that it "
                f"holds version {expected}",
                remedy="its rollouts must not be trained on: see its log",
            )
        self._tally.finished(seat.name, rollout)
        self._on_finished(rollout)

    # Losses and restarts.

    def _check_deadlines(self) -> None:
        now_s = self._clock()
        if now_s < self._look_s:
            return
        self._look_s = now_s + _TICK_S
        self._hear_of_drafters()
        for seat in list(self._seats.values()):
            match seat.state:
                case SeatState.LEAVING:
                    if now_s > seat.deadline_s or seat.handed_back.issuperset(self._ledger.running(seat.name)):
                        self._lose(seat, seat.reason, alive=False)
                    else:
                        self._look_s = now_s  # Somebody waits for its requests.
                case SeatState.STARTING | SeatState.LOADING | SeatState.CLOSING:
                    if now_s > seat.deadline_s:
                        key = "rollout.weight_sync_timeout_s" if seat.state is SeatState.LOADING else _START_KEY
                        self._lose(seat, f"{seat.state.value} took longer than {key}", alive=False)
                case SeatState.READY:
                    if now_s - seat.progress_s <= self._options.stall_timeout_s:
                        continue
                    if running := self._ledger.running(seat.name):
                        silence = f"no progress on {len(running)} requests for {self._options.stall_timeout_s:g} s"
                        self._lose(seat, f"{silence} (rollout.stall_timeout_s)", alive=False)
                    else:
                        seat.progress_s = now_s
                case SeatState.DEAD:
                    pass
                case _:
                    assert_never(seat.state)

    def _leave(self, seat: Seat, reason: str) -> None:
        """The worker ends soon: take its requests back with all their tokens, then replace it, unless it retires."""
        if seat.state in (SeatState.LEAVING, SeatState.CLOSING):
            return
        seat.reason = reason
        seat.handed_back.clear()
        seat.forget_answer()
        if seat.state is SeatState.READY and (running := self._ledger.running(seat.name)):
            seat.give(Abort(tuple(running)))
        self._enter(seat, SeatState.LEAVING, _LEAVE_TIMEOUT_S)
        self._look_s = 0.0

    def _lose(self, seat: Seat, reason: str, *, alive: bool) -> None:
        """Take back what the worker holds; restart its engine if the actor is alive, else make a new actor."""
        match seat.state:
            case SeatState.DEAD:
                return
            case SeatState.CLOSING:
                self._gone(seat)
                return
            case SeatState.LEAVING:
                reason, alive = seat.reason, False  # whatever happens to it now
        if not self._started:
            raise WorkerStartError(f"{seat.name} did not start: {reason}")
        finished = self._take_back(seat, reason)
        if seat.retiring:
            self._enter(seat, SeatState.CLOSING, _CLOSE_TIMEOUT_S)
            seat.close()
        elif seat.restarts >= self._options.max_worker_restarts:
            seat.kill()
            self._enter(seat, SeatState.DEAD)
            self._on_event("worker_dead", f"{seat.name}: {seat.restarts} restarts are used up, the last loss: {reason}")
        else:
            seat.restarts += 1
            if not alive:
                seat.kill()
                seat.handle = self._spawn(seat.name)
            self._start(seat)
        for rollout in finished:
            self._tally.finished(seat.name, rollout)
            self._on_finished(rollout)

    def _take_back(self, seat: Seat, reason: str) -> Sequence[Rollout]:
        """What the worker holds waits for others, and is told; those of its rollouts that turn out to be complete."""
        wall_s, handed_over = self._wall(), seat.state is SeatState.LEAVING
        loss = self._ledger.lose(
            seat.name, reason, now_s=wall_s, weights_version=self._version, handed_over=handed_over
        )
        self._tally.reissued_ids.update(loss.reissued)
        again = f"{len(loss.reissued)} requests are re-issued with {loss.prefix_tokens} tokens"
        if seat.retiring:
            self._on_event("worker_left", f"{seat.name}: {again}")
        else:
            self._tally.lost_workers += 1
            seat.reason = reason
            seat.down_since_wall_s = seat.down_since_wall_s or wall_s
            self._on_event("worker_lost", f"{seat.name}: {reason}; {again}")
        if loss.failed:
            ids = ", ".join(str(failure.request_id) for failure in loss.failed)
            self._on_event("request_failed", f"requests {ids}: {loss.failed[0].reason}")
        return loss.finished

    def _gone(self, seat: Seat) -> None:
        """The worker's engine is closed: nothing of it is left."""
        seat.kill()
        if self._running:
            seat.spans.end(self._wall())
        self.drafters.left(seat)
        del self._seats[seat.name]

    def _start(self, seat: Seat) -> None:
        self._loading.forget(seat)
        self._enter(seat, SeatState.STARTING, self._start_timeout_s)
        seat.start_engine()

    def _answered(self, seat: Seat, answer: SupervisorStatus | WeightsLoaded) -> None:
        if isinstance(answer, WeightsLoaded):
            self._loading.answered(seat, answer)
            return
        seat.open_stream()
        self.drafters.started(seat)
        if not self._loading.begin(seat):
            self._ready(seat)

    def _ready(self, seat: Seat) -> None:
        self._enter(seat, SeatState.READY)
        if seat.down_since_wall_s is not None:
            seconds = self._wall() - seat.down_since_wall_s
            if seat.restarts:
                seat.spans.other("restart", seat.down_since_wall_s, self._wall())
                self._on_event("worker_restarted", f"{seat.name}: back after {seconds:.1f} s (restart {seat.restarts})")
            else:
                self._on_event("worker_joined", f"{seat.name}: up after {seconds:.1f} s")
            seat.down_since_wall_s = None

    def _enter(self, seat: Seat, state: SeatState, timeout_s: float = 0.0) -> None:
        seat.enter(state, now_s=self._clock(), wall_s=self._wall(), timeout_s=timeout_s)
        self._offer(seat)

    def _offer(self, seat: Seat) -> None:
        if seat.state is SeatState.READY:
            self._ledger.offer(seat.name, self._options.engine.max_running)
        else:
            self._ledger.withdraw(seat.name)
