"""The pump between the requests (who has which) and the workers: one thread that decides, no hidden state.

Owns the waiting and what each event leads to; which worker is in which state, and why, is `workers`'. Never looks at
tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, assert_never

from ray import ObjectRef
from ray.exceptions import RayError, RayTaskError

from actors.rollout_worker import Leaving, SupervisorStatus, WorkerEvent
from actors.spot_host import DrafterEvent, RecordingReport
from config.rollout import RolloutOptions
from contracts.rollout import (
    DrafterFailed,
    EngineFailed,
    EngineWindow,
    Finished,
    PassEvent,
    Progress,
    Rejected,
    Request,
    Rollout,
    WeightsLoaded,
)
from contracts.spot import Checkpointed, MicroStep, Published, TrainFailed, TrainStopped
from launch.dispatch.arrivals import Waitable
from launch.dispatch.seat import (
    Seat,
    SeatState,
    Weights,
    WorkerHandle,
    WorkerNow,
    node_lost,
    put_to_sleep,
    reason_of,
    some_are,
)
from launch.dispatch.spans import SpanSink
from launch.dispatch.stats import DispatchStats
from launch.dispatch.weights import Handed, Sending
from launch.dispatch.workers import TICK_S, Workers
from models.manifest import WeightsManifest
from policies.drafter.lineage import micro_steps

_ABORT_TIMEOUT_S = 10.0


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
        on_weights_gone: Callable[[], bool] = lambda: False,
        placed: Callable[[str], bool] = lambda name: True,
        refused: Callable[[str], str] = lambda node_id: "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`spawn(name)` makes a worker. `on_event(kind, message)`: worker_joined, worker_left, worker_lost,
        worker_restarted, worker_dead, request_rejected, request_failed. `on_weights_gone`: the buffer that was set went
        with its maker, and a worker needs it: `renew_weights` with another one. True: that was done, or newer ones
        are on their way; else the worker is lost. `placed(name)`: the worker's place is there; one that waits for it
        uses up no restart while others are up. `refused(node_id)`: why no worker may be there; "": it may."""
        self._on_event, self._on_window, self._on_passes = on_event, on_window, on_passes
        self._on_spot, self._on_weights = on_spot, on_weights
        self._clock = clock
        self.meanwhile: Callable[[], object] = lambda: None  # called about every 0.25 s, and after events, in all waits
        self._workers = Workers(
            spawn,
            options,
            start_timeout_s=start_timeout_s,
            pump=self._wait,
            meanwhile=lambda: self.meanwhile(),
            on_event=on_event,
            on_span=on_span,
            on_weights_gone=on_weights_gone,
            placed=placed,
            refused=refused,
            clock=clock,
            wall=wall,
        )
        self._requests = self._workers.requests
        self.drafters = self._workers.drafters

    def start(self) -> None:
        """Start all workers at once. Raises WorkerStartError: a worker that fails at first would fail again, unless its
        node was lost, or it was told to end: then another one is started."""
        self._workers.start()

    def join(self, name: str) -> None:
        """Start a worker, which gets the weights and work as soon as it is up, in the middle of a `run` too. Never
        waits. The name is new, or that of a worker that has left or is dead: ValueError."""
        self._workers.join(name)

    def leave(self, name: str, reason: str = "") -> None:
        """Let a worker go for good, in the middle of a `run` too: it gives its requests back with all their tokens,
        closes its engine, and is gone; no weights are awaited of it. Never waits. `reason`: of the event worker_left.
        KeyError: there is no such worker."""
        self._workers.retire(name, reason)

    def workers(self) -> dict[str, WorkerNow]:
        """All there are, by name."""
        return {
            name: WorkerNow(seat.state, len(self._requests.running(name)), seat.node_id, seat.retiring)
            for name, seat in self._workers.seats.items()
        }

    @property
    def handing_back(self) -> bool:
        """Workers that leave are giving back what they have; bounded by 5 s, of those in which somebody listens."""
        return self._workers.handing_back

    def unheard(self) -> AbstractContextManager[None]:
        """Around what keeps the driver for long: workers' silence and lateness meanwhile are not theirs."""
        return self._workers.unheard()

    @property
    def waiting(self) -> tuple[int, float]:
        """Requests of the present `run` that no worker has, and the tokens that are expected of them."""
        return self._requests.waiting

    def set_weights(self, manifest: WeightsManifest, ref: "ObjectRef[Any]") -> int:
        """Send weights to all workers at once and check what each answers. `ref`: uint8 buffer in the object store.

        Returns when every worker that is up holds them, how many that are; one that fails or is too slow is lost, and
        gets them when it is back. Raises StaleWeightsError, NoWorkersError."""
        self._workers.loading.set(Weights(manifest, ref))
        self._hear_of_drafters()
        return sum(seat.state is SeatState.READY for seat in self._workers.seats.values())

    def renew_weights(self, manifest: WeightsManifest, ref: "ObjectRef[Any]") -> None:
        """Another buffer with the weights that workers hold, for those who come later: its maker is another one."""
        self._workers.loading.renew(Weights(manifest, ref))

    def hand_over(self, send: Callable[[int], Sending], *, to_trainers: bool = False) -> Handed:
        """As `set_weights`, piece by piece from the learner's devices; `send(receivers)` begins it. Who does not get
        them, or starts meanwhile, loads them from the object store at the end. `to_trainers`: workers train drafters.
        Raises as `set_weights`, and what the learner's end raises."""
        handed = self._workers.loading.hand_over(send, to_trainers=to_trainers)
        self._hear_of_drafters()
        return handed

    def run(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Rollout], None],
        *,
        tick: Callable[[], object] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
        more: Callable[[], bool] = lambda: False,
    ) -> DispatchStats:
        """Sample all requests; `on_finished` is called once per rollout, in order of arrival, on this thread.

        `tick` is called as `meanwhile` is, and after `wake`. `more`: requests are still to come (`submit`), so the run
        does not end yet. `should_stop` (a flag set by a signal
        handler) aborts what runs and returns with `interrupted`. On any exception, KeyboardInterrupt included, what
        runs is aborted before it propagates, so that the next `run` starts clean. Raises NoWorkersError,
        StaleWeightsError, ValueError (two requests with one id), and what the callbacks raise.
        """
        self._requests.begin(requests, on_finished)
        self._workers.begin_run()
        interrupted = False
        try:
            while (more() or not self._requests.done) and not (interrupted := should_stop()):
                self._requests.assign(self._workers.seats)
                self._wait()
                tick()
        except BaseException:
            self.abort_all()
            raise
        else:
            if interrupted:
                self.abort_all()
        finally:
            self._workers.end_run()
            self._requests.end()
        return self._requests.stats(interrupted=interrupted)

    def submit(self, request: Request) -> None:
        """Called within `run`, by a callback: sample this too. One whose id has finished is its next turn: it goes on
        with the worker that has its K/V, if that is up. Raises ValueError: the id has not finished."""
        self._requests.add(request)

    def wake(self) -> None:
        """From any thread: `run` is to call `tick` now, without waiting for a worker."""
        self._workers.arrivals.wake()

    def settle(self) -> None:
        """Handle what has arrived, such as the last window of the run before, and answers to new drafter weights; does
        not wait. Within callbacks of the dispatcher's own waits too: a `run` goes on meanwhile."""
        self._hear_of_drafters()
        self._pump(timeout_s=0.0)
        self._requests.assign(self._workers.seats)

    def sleep(self, timeout_s: float) -> dict[str, str]:
        """Have all engines release their KV cache until they get work. Why some did not, by worker."""
        return put_to_sleep(self._workers.seats.values(), timeout_s, self.meanwhile)

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
        self._requests.abort(request_ids, self._workers.seats)

    def abort_all(self) -> None:
        """Abort what runs and wait until the engines have said so; a worker that does not is lost. Bounded by 10 s."""
        self._requests.abort_all()
        busy = []
        for seat in self._workers.seats.values():
            self._handle_inbox(seat)
            if self._requests.abort_running(seat):
                busy.append(seat)
        deadline_s = self._clock() + _ABORT_TIMEOUT_S

        def runs(seat: Seat) -> bool:
            return seat.state is SeatState.READY and bool(self._requests.running(seat.name))

        while some_are(busy, runs):
            if self._clock() > deadline_s:
                for seat in filter(runs, busy):
                    self._workers.lose(seat, f"did not abort its requests within {_ABORT_TIMEOUT_S:g} s", alive=False)
                break
            self._pump()
        self._requests.aborted_all()

    def close(self) -> None:
        """Close the engines (bounded), then end the actors."""
        self._workers.close()

    # The pump.

    def _wait(self) -> None:
        self._pump()
        self.meanwhile()

    def _pump(self, timeout_s: float = TICK_S) -> None:
        """Wait for anything, at most `timeout_s`, and handle all that is there; then look at the deadlines."""
        self._workers.check_any()
        for seat, waitable, value in self._workers.arrivals.take(timeout_s):
            self._receive(seat, waitable, value)
        if self._workers.overdue():
            self._hear_of_drafters()

    def _receive(self, seat: Seat, waitable: Waitable, value: Any) -> None:
        events: list[WorkerEvent] | None = []
        answer: SupervisorStatus | WeightsLoaded | None = None
        try:  # only what the worker says: a RayError of a callback is not its fault
            if waitable is seat.stream:
                events = seat.take_events(value)
            elif waitable is seat.pending:
                answer = seat.take_answer(value)
                if seat.state is SeatState.CLOSING:
                    self._workers.gone(seat)
            else:
                seat.take_send(waitable, value)
        except RayError as error:
            if not self._workers.loading.load_again(seat, error):
                alive = isinstance(error, RayTaskError)
                faultless = not alive and node_lost(error, seat.node_id)
                self._workers.lose(seat, reason_of(error), alive=alive, faultless=faultless)
            return
        if events is None:
            self._workers.lose(seat, "its engine's event stream ended", alive=True)
        elif answer is not None:
            self._workers.answered(seat, answer)
        else:
            seat.inbox.extend(events)
            self._handle_inbox(seat)

    def _handle_inbox(self, seat: Seat) -> None:
        while seat.inbox:  # emptied by a loss; kept by an exception of a callback, for abort_all
            self._handle(seat, seat.inbox.popleft())

    def _handle(self, seat: Seat, event: WorkerEvent) -> None:
        match event:
            case Finished(rollout):
                self._workers.progressed(seat)
                self._requests.finish(seat, rollout)
            case Progress(request_id, delta):
                self._workers.progressed(seat)
                self._requests.progress(seat, request_id, delta)
            case Rejected(request_id, reason):
                self._requests.reject(seat, request_id, reason)
            case EngineWindow():
                if event.decode_tokens or event.prefill_tokens:
                    self._workers.progressed(seat)
                self._requests.preempted(event.preempted)
                seat.spans.window(event)
                self._on_window(seat.name, event)
            case PassEvent():
                self._on_passes(seat.name, event)
            case EngineFailed(reason):
                self._workers.lose(seat, reason, alive=True)
            case Leaving(reason):
                self._workers.leave(seat, reason)
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
