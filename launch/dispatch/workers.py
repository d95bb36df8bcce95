"""The workers of a dispatcher, by name: how they come up, are lost, are replaced and leave.

Owns restarts and deadlines; `requests` owns what workers sample.
"""

from collections.abc import Mapping
from typing import assert_never

import ray

from actors.loop import SLICE_S
from actors.rollout_worker import SupervisorStatus
from contracts.rollout import WeightsLoaded
from launch.dispatch.drafters import DrafterMessages
from launch.dispatch.events import WorkerUp
from launch.dispatch.seat import Seat, SeatState, WorkerStarts, some_are, worker_name
from launch.dispatch.seats import Seats
from launch.dispatch.spans import WorkerSpans
from launch.dispatch.weights import Loading
from launch.errors import PacelineError

_LEAVE_TIMEOUT_S = 5.0  # for a worker that must end to return its requests
_CLOSE_TIMEOUT_S = 15.0
_START_KEY = "cluster.start_timeout_s"


class Workers:
    """Life cycle of all workers. `refused`: see RolloutDispatcher."""

    def __init__(
        self, starts: WorkerStarts, seats: Seats, *, start_timeout_s: float, refused: Mapping[str, str]
    ) -> None:
        self._starts, self._seats, self._start_timeout_s, self._refused = starts, seats, start_timeout_s, refused
        self._options, self._context, self._requests = seats.options, seats.context, seats.requests
        self._started = False
        self._look_s = 0.0  # when the deadlines are checked again
        self.drafters = DrafterMessages(seats.by_name, self._context.loop, self._options.stall_timeout_s)
        self.loading = Loading(seats, self.drafters)

    # Called from outside.

    def start(self) -> None:
        """See RolloutDispatcher.start."""
        for index in range(self._options.workers.min):
            self.join(worker_name(index))
        starting: list[Seat] = []

        def started() -> bool:
            if some_are(starting, _coming):
                return False
            starting.extend(filter(_coming, self._seats.by_name.values()))
            return not starting

        self._seats.wait(started)
        self._started = True

    def join(self, name: str) -> None:
        """See RolloutDispatcher.join."""
        known = self._seats.by_name.get(name)
        if known is not None and known.state is not SeatState.DEAD:
            raise ValueError(f"there is a worker {name!r} already: it is {known.state.value}")
        spans = WorkerSpans(name, self._context.observer.worked)
        seat = Seat(name=name, handle=self._starts.spawn(name), spans=spans, loop=self._context.loop)
        self._seats.by_name[name] = seat
        if self._seats.running:
            spans.begin(self._context.wall())
        if self._started:
            seat.down_since_wall_s = self._context.wall()
        self._start(seat)

    def retire(self, name: str, reason: str) -> None:
        """See RolloutDispatcher.leave."""
        seat = self._seats.by_name[name]
        if seat.state is SeatState.DEAD:
            del self._seats.by_name[name]
        elif not seat.retiring:
            seat.retiring = True
            seat.reason = reason
            if seat.state is SeatState.STARTING:
                self._requests.take_back(seat, reason)
                self.gone(seat)
            elif seat.state is SeatState.READY and not self._requests.running(name):
                self.lose(seat, reason, alive=True)
            else:
                self.leave(seat, reason)

    def begin_run(self) -> None:
        """Start a run: offer work to the workers that are up."""
        self._seats.running = True
        for seat in self._seats.by_name.values():
            self._seats.offer(seat)
            seat.spans.begin(self._context.wall())

    def end_run(self) -> None:
        for seat in self._seats.by_name.values():
            seat.spans.end(self._context.wall())
        self._seats.running = False

    def close(self) -> None:
        """Close the engines (bounded), then end the actors."""
        alive = [seat for seat in self._seats.by_name.values() if seat.state is not SeatState.DEAD]
        if refs := [seat.handle.shutdown.remote() for seat in alive]:
            ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S)
        for seat in alive:
            seat.kill()
        self._seats.by_name.clear()

    # Their events and their silence.

    def answered(self, seat: Seat, answer: SupervisorStatus | WeightsLoaded) -> None:
        """Its engine is up, or holds weights. Raises PacelineError: other weights."""
        if isinstance(answer, WeightsLoaded):
            self.loading.answered(seat, answer)
            return
        seat.node_id, seat.held_version = answer.node_id, answer.base_version
        if self._started and (why := self._refused.get(answer.node_id)):
            self.retire(seat.name, f"it came up where it may not: {why}")  # restarts keep their place, which Ray moves
            return
        seat.open_stream()
        self._context.loop.tell(WorkerUp(seat))
        self.drafters.started(seat)
        if not self.loading.begin(seat):
            self._seats.ready(seat)

    def overdue(self) -> bool:
        """Check the deadlines, if it is time again. Returns false if it is not."""
        now_s = self._context.clock()
        for seat in list(self._seats.leaving):
            if now_s > seat.deadline_s or self._requests.handed_back(seat):
                self.lose(seat, seat.reason, alive=False)
        if now_s < self._look_s:
            return False
        self._look_s = now_s + SLICE_S
        for seat in list(self._seats.by_name.values()):
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
                    if running := self._requests.running(seat.name):
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
        """Whether a late engine only waits for its place in the cluster while other workers keep the run going. Without
        other workers the start must time out, to end the run's wait."""
        if seat.state is not SeatState.STARTING or not self._started or self._starts.placed(seat.name):
            return False
        up = (SeatState.READY, SeatState.LOADING)
        return any(other.state in up and not other.retiring for other in self._seats.by_name.values())

    def leave(self, seat: Seat, reason: str) -> None:
        """Take the requests of a worker that ends soon, with all their tokens. It is then replaced, unless
        it retires."""
        if seat.state in (SeatState.LEAVING, SeatState.CLOSING):
            return
        seat.reason = reason
        seat.handed_back.clear()
        seat.forget_answer()
        self._requests.abort_running(seat)
        self._seats.enter(seat, SeatState.LEAVING, _LEAVE_TIMEOUT_S)

    def lose(self, seat: Seat, reason: str, *, alive: bool, faultless: bool = False) -> None:
        """Take back what the worker holds. Restarts its engine if the actor is alive, else makes a new actor.
        faultless: its node is lost, which uses up no restart. Neither does an announced end."""
        match seat.state:
            case SeatState.DEAD:
                return
            case SeatState.CLOSING:
                self.gone(seat)
                return
            case SeatState.LEAVING:
                reason, alive, faultless = seat.reason, False, True  # whatever happens to it now
        if not (self._started or faultless):
            raise PacelineError(
                f"{seat.name} did not start: {reason}",
                remedy=f"its log has more; an engine that loads for longer needs a higher {_START_KEY}",
            )
        # A replacement may be lost with the node on which it was to start, the previous worker's. That loss was already
        # reported, and Ray's first message may have sounded like the worker's own fault.
        told = faultless and seat.state is SeatState.STARTING and seat.losses > 0
        if told:
            seat.restarts -= seat.blamed
            seat.blamed = False
        finished = self._requests.take_back(seat, reason, told=told)
        if seat.retiring:
            self._seats.enter(seat, SeatState.CLOSING, _CLOSE_TIMEOUT_S)
            seat.close()
        elif not faultless and seat.restarts >= self._options.max_worker_restarts:
            seat.kill()
            self._seats.enter(seat, SeatState.DEAD)
            self._seats.changed("worker_dead", seat, f"{seat.restarts} restarts are used up, the last loss: {reason}")
        else:
            if not told:
                seat.losses += 1
                seat.blamed = not faultless
                seat.restarts += seat.blamed
            if not alive:
                seat.kill()
                seat.handle = self._starts.spawn(seat.name)
            self._start(seat)
        self._requests.complete(seat.name, finished)

    def gone(self, seat: Seat) -> None:
        """Remove a worker whose engine is closed."""
        seat.kill()
        if self._seats.running:
            seat.spans.end(self._context.wall())
        self.drafters.left(seat)
        self._seats.leaving.discard(seat)
        del self._seats.by_name[seat.name]

    # Their states.

    def _start(self, seat: Seat) -> None:
        self.loading.forget(seat)
        self._seats.enter(seat, SeatState.STARTING, self._start_timeout_s)
        seat.start_engine()


def _coming(seat: Seat) -> bool:
    return seat.state in (SeatState.STARTING, SeatState.LEAVING)
