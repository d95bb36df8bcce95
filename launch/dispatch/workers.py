"""The workers of a dispatcher, by name: how they come up, are lost, are replaced and leave. Owns their seats, the
restarts and the deadlines of what they owe; what they sample is `requests`', and the waiting is the dispatcher's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

import ray

from actors.rollout_worker import SupervisorStatus
from config.rollout import RolloutOptions
from contracts.rollout import WeightsLoaded
from launch.dispatch.arrivals import Arrivals
from launch.dispatch.drafters import DrafterMessages
from launch.dispatch.errors import NoWorkersError, WorkerStartError
from launch.dispatch.requests import Requests
from launch.dispatch.seat import Seat, SeatState, WorkerHandle, some_are, worker_name
from launch.dispatch.spans import SpanSink, WorkerSpans
from launch.dispatch.weights import Loading

TICK_S = 0.25  # deadlines are looked at this often when nothing arrives
_LEAVE_TIMEOUT_S = 5.0  # for a worker that was told to end to give its requests back
_CLOSE_TIMEOUT_S = 15.0
_START_KEY = "cluster.start_timeout_s"


class Workers:
    """`spawn(name)` makes one. `pump`: wait for anything, and handle it. `meanwhile`: called often in other waits."""

    def __init__(
        self,
        spawn: Callable[[str], WorkerHandle],
        options: RolloutOptions,
        *,
        start_timeout_s: float,
        pump: Callable[[], None],
        meanwhile: Callable[[], object],
        on_event: Callable[[str, str], None],
        on_span: SpanSink,
        on_weights_gone: Callable[[], bool],
        placed: Callable[[str], bool],
        refused: Callable[[str], str],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._spawn, self._options, self._start_timeout_s = spawn, options, start_timeout_s
        self._pump, self._on_event, self._on_span = pump, on_event, on_span
        self._placed, self._refused = placed, refused
        self._clock, self._wall = clock, wall
        self.seats: dict[str, Seat] = {}  # by name
        self.arrivals: Arrivals[Seat] = Arrivals()
        self._started = self._running = False
        self._look_s = 0.0  # when the deadlines are looked at again
        self._leaving: set[Seat] = set()  # somebody waits for their requests: these are looked at every time
        self.drafters = DrafterMessages(self.seats, meanwhile, options.stall_timeout_s)
        self.loading = Loading(
            self.seats,
            self.drafters,
            options.weight_sync_timeout_s,
            enter=self._enter,
            ready=self._ready,
            pump=pump,
            wall=wall,
            on_event=on_event,
            on_gone=self._weights_gone,
        )
        self._on_weights_gone = on_weights_gone
        self.requests = Requests(
            max_retries=options.max_retries,
            version=lambda: self.loading.version,
            on_event=on_event,
            clock=clock,
            wall=wall,
        )

    # From outside.

    def start(self) -> None:
        """See RolloutDispatcher.start."""
        for index in range(self._options.workers.min):
            self.join(worker_name(index))
        coming = (SeatState.STARTING, SeatState.LEAVING)
        while starting := [seat for seat in self.seats.values() if seat.state in coming]:
            while some_are(starting, lambda seat: seat.state in coming):
                self._pump()
        self._started = True

    def join(self, name: str) -> None:
        """See RolloutDispatcher.join."""
        known = self.seats.get(name)
        if known is not None and known.state is not SeatState.DEAD:
            raise ValueError(f"there is a worker {name!r} already: it is {known.state.value}")
        spans = WorkerSpans(name, self._on_span)
        seat = Seat(name=name, handle=self._spawn(name), spans=spans, arrivals=self.arrivals)
        self.seats[name] = seat
        if self._running:
            spans.begin(self._wall())
        if self._started:
            seat.down_since_wall_s = self._wall()
        self._start(seat)

    def retire(self, name: str, reason: str) -> None:
        """See RolloutDispatcher.leave."""
        seat = self.seats[name]
        if seat.state is SeatState.DEAD:
            del self.seats[name]
        elif not seat.retiring:
            seat.retiring = True
            seat.reason = reason
            if seat.state is SeatState.STARTING:
                self.requests.take_back(seat, reason)
                self.gone(seat)
            elif seat.state is SeatState.READY and not self.requests.running(name):
                self.lose(seat, reason, alive=True)
            else:
                self.leave(seat, reason)

    def begin_run(self) -> None:
        """Requests are there: who is up gets some."""
        self._running = True
        for seat in self.seats.values():
            self._offer(seat)
            seat.spans.begin(self._wall())

    def end_run(self) -> None:
        for seat in self.seats.values():
            seat.spans.end(self._wall())
        self._running = False

    @property
    def handing_back(self) -> bool:
        return bool(self._leaving)

    def check_any(self) -> None:
        """Raises NoWorkersError: nothing is awaited of anybody."""
        if not self.arrivals:
            reasons = "; ".join(f"{s.name}: {s.reason}" for s in self.seats.values()) or "none was started"
            raise NoWorkersError(
                f"no rollout worker is left ({reasons})",
                remedy="see the workers' reasons; raise rollout.max_worker_restarts if the losses are not their fault",
            )

    def close(self) -> None:
        """Close the engines (bounded), then end the actors."""
        refs = [seat.handle.shutdown.remote() for seat in self.seats.values() if seat.state is not SeatState.DEAD]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
        for seat in self.seats.values():
            if seat.state is not SeatState.DEAD:
                seat.kill()
        self.seats.clear()

    # What they say, or do not say.

    def progressed(self, seat: Seat) -> None:
        """It is alive and works."""
        seat.progress_s = self._clock()

    def answered(self, seat: Seat, answer: SupervisorStatus | WeightsLoaded) -> None:
        """Its engine is up, or holds weights. Raises StaleWeightsError."""
        if isinstance(answer, WeightsLoaded):
            self.loading.answered(seat, answer)
            return
        seat.node_id = answer.node_id
        if self._started and (why := self._refused(answer.node_id)):
            self.retire(seat.name, f"it came up where it may not: {why}")  # restarts keep their place, which Ray moves
            return
        seat.open_stream()
        self.drafters.started(seat)
        if not self.loading.begin(seat):
            self._ready(seat)

    def overdue(self) -> bool:
        """Look at the deadlines, if it is time again; False: it is not."""
        now_s = self._clock()
        for seat in list(self._leaving):
            if now_s > seat.deadline_s or self.requests.handed_back(seat):
                self.lose(seat, seat.reason, alive=False)
        if now_s < self._look_s:
            return False
        self._look_s = now_s + TICK_S
        for seat in list(self.seats.values()):
            match seat.state:
                case SeatState.STARTING | SeatState.LOADING | SeatState.CLOSING:
                    if now_s > seat.deadline_s:
                        if self._waits_for_room(seat):
                            seat.deadline_s = now_s + self._start_timeout_s
                            continue
                        key = "rollout.weight_sync_timeout_s" if seat.state is SeatState.LOADING else _START_KEY
                        self.lose(seat, f"{seat.state.value} took longer than {key}", alive=False)
                case SeatState.READY:
                    if now_s - seat.progress_s <= self._options.stall_timeout_s:
                        continue
                    if running := self.requests.running(seat.name):
                        silence = f"no progress on {len(running)} requests for {self._options.stall_timeout_s:g} s"
                        self.lose(seat, f"{silence} (rollout.stall_timeout_s)", alive=False)
                    else:
                        seat.progress_s = now_s
                case SeatState.DEAD | SeatState.LEAVING:
                    pass
                case _:
                    assert_never(seat.state)
        self.loading.look()
        return True

    def _waits_for_room(self, seat: Seat) -> bool:
        """That its engine is late is its cluster's doing, and the run goes on with others: it starts when its place is
        there. Where there are no others, somebody must end the run's waiting."""
        if seat.state is not SeatState.STARTING or not self._started or self._placed(seat.name):
            return False
        up = (SeatState.READY, SeatState.LOADING)
        return any(other.state in up and not other.retiring for other in self.seats.values())

    def leave(self, seat: Seat, reason: str) -> None:
        """The worker ends soon: take its requests back with all their tokens, then replace it, unless it retires."""
        if seat.state in (SeatState.LEAVING, SeatState.CLOSING):
            return
        seat.reason = reason
        seat.handed_back.clear()
        seat.forget_answer()
        self.requests.abort_running(seat)
        self._enter(seat, SeatState.LEAVING, _LEAVE_TIMEOUT_S)

    def lose(self, seat: Seat, reason: str, *, alive: bool, faultless: bool = False) -> None:
        """Take back what the worker holds; restart its engine if the actor is alive, else make a new actor. faultless:
        its node is lost, which uses up no restart, and neither does an end that it was told of."""
        match seat.state:
            case SeatState.DEAD:
                return
            case SeatState.CLOSING:
                self.gone(seat)
                return
            case SeatState.LEAVING:
                reason, alive, faultless = seat.reason, False, True  # whatever happens to it now
        if not (self._started or faultless):
            raise WorkerStartError(
                f"{seat.name} did not start: {reason}",
                remedy=f"its log has more; an engine that loads for longer needs a higher {_START_KEY}",
            )
        # A replacement that goes with the node of the one before it, on which it was to start: that loss was told.
        # What Ray first said of it may have sounded like its own fault.
        told = faultless and seat.state is SeatState.STARTING and seat.losses > 0
        if told:
            seat.restarts -= seat.blamed
            seat.blamed = False
        finished = self.requests.take_back(seat, reason, told=told)
        if seat.retiring:
            self._enter(seat, SeatState.CLOSING, _CLOSE_TIMEOUT_S)
            seat.close()
        elif not faultless and seat.restarts >= self._options.max_worker_restarts:
            seat.kill()
            self._enter(seat, SeatState.DEAD)
            self._on_event("worker_dead", f"{seat.name}: {seat.restarts} restarts are used up, the last loss: {reason}")
        else:
            if not told:
                seat.losses += 1
                seat.blamed = not faultless
                seat.restarts += seat.blamed
            if not alive:
                seat.kill()
                seat.handle = self._spawn(seat.name)
            self._start(seat)
        self.requests.complete(seat.name, finished)

    def gone(self, seat: Seat) -> None:
        """The worker's engine is closed: nothing of it is left."""
        seat.kill()
        if self._running:
            seat.spans.end(self._wall())
        self.drafters.left(seat)
        self._leaving.discard(seat)
        del self.seats[seat.name]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """See RolloutDispatcher.unheard."""
        begin_s = self._clock()
        try:
            yield
        finally:
            waited_s = self._clock() - begin_s
            for seat in self.seats.values():
                seat.progress_s += waited_s
                seat.deadline_s += waited_s

    def _weights_gone(self) -> bool:
        with self.unheard():
            return self._on_weights_gone()

    # Their states.

    def _start(self, seat: Seat) -> None:
        self.loading.forget(seat)
        self._enter(seat, SeatState.STARTING, self._start_timeout_s)
        seat.start_engine()

    def _ready(self, seat: Seat) -> None:
        self._enter(seat, SeatState.READY)
        if seat.down_since_wall_s is not None:
            seconds = self._wall() - seat.down_since_wall_s
            if seat.losses:
                seat.spans.other("restart", seat.down_since_wall_s, self._wall())
                self._on_event("worker_restarted", f"{seat.name}: back after {seconds:.1f} s (restart {seat.losses})")
            else:
                self._on_event("worker_joined", f"{seat.name}: up after {seconds:.1f} s")
            seat.down_since_wall_s = None

    def _enter(self, seat: Seat, state: SeatState, timeout_s: float = 0.0) -> None:
        if state is SeatState.LEAVING:
            self._leaving.add(seat)
        else:
            self._leaving.discard(seat)
        seat.enter(state, now_s=self._clock(), wall_s=self._wall(), timeout_s=timeout_s)
        self._offer(seat)

    def _offer(self, seat: Seat) -> None:
        ready = seat.state is SeatState.READY
        self.requests.offer(seat.name, self._options.engine.max_running if ready else 0)
