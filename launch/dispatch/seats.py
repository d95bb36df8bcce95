"""The table of a dispatcher's workers and their states, and the wait for them.

Owns what follows from a state alone: its deadline, the offer of work, the reports. Other modules decide state changes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.context import Context
from actors.loop import SLICE_S
from config.rollout import RolloutOptions
from launch.dispatch.events import WorkerChanged
from launch.dispatch.requests import Requests
from launch.dispatch.seat import Seat, SeatState
from launch.errors import PacelineError


class Seats:
    """All workers, in `by_name`."""

    def __init__(self, options: RolloutOptions, context: Context, requests: Requests) -> None:
        self.options, self.context, self.requests = options, context, requests
        self.by_name: dict[str, Seat] = {}
        self.leaving: set[Seat] = set()  # their requests are awaited, so these are checked every time
        self.running = False  # requests are there
        self.listening = 0  # nested waits for workers

    def wait(self, until: Callable[[], bool]) -> None:
        """For workers. Raises PacelineError: nothing is awaited of anybody."""
        self.listening += 1
        try:
            while self.context.loop.told or not until():
                self.require_one()
                self.context.loop.turn(SLICE_S)
        finally:
            self.listening -= 1

    def require_one(self) -> None:
        """Raises PacelineError: nothing is awaited of anybody."""
        if all(seat.state is SeatState.DEAD for seat in self.by_name.values()):
            reasons = "; ".join(f"{s.name}: {s.reason}" for s in self.by_name.values()) or "none was started"
            raise PacelineError(
                f"no rollout worker is left ({reasons})",
                remedy="see the workers' reasons; raise rollout.max_worker_restarts if the losses are not their fault",
            )

    def enter(self, seat: Seat, state: SeatState, timeout_s: float = 0.0) -> None:
        if state is SeatState.LEAVING:
            self.leaving.add(seat)
        else:
            self.leaving.discard(seat)
        seat.enter(state, now_s=self.context.clock(), wall_s=self.context.wall(), timeout_s=timeout_s)
        self.offer(seat)

    def waits_for_weights(self, seat: Seat) -> None:
        """Mark it as up, while its weights are on the way to the store."""
        self.enter(seat, SeatState.LOADING, math.inf)

    def ready(self, seat: Seat) -> None:
        """Mark it as up with the weights that it must hold."""
        self.enter(seat, SeatState.READY)
        if seat.down_since_wall_s is None:
            return
        wall_s = self.context.wall()
        seconds = wall_s - seat.down_since_wall_s
        if seat.losses:
            seat.spans.other("restart", seat.down_since_wall_s, wall_s)
            self.changed("worker_restarted", seat, f"back after {seconds:.1f} s (restart {seat.losses})")
        else:
            self.changed("worker_joined", seat, f"up after {seconds:.1f} s")
        seat.down_since_wall_s = None

    def changed(self, kind: str, seat: Seat, message: str) -> None:
        self.context.loop.tell(WorkerChanged(kind, seat.name, message))

    def offer(self, seat: Seat) -> None:
        """Offer its slots to the ledger, if it is up."""
        ready = seat.state is SeatState.READY
        self.requests.offer(seat.name, self.options.engine.max_running if ready else 0)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """See RolloutDispatcher.unheard."""
        begin_s = self.context.clock()
        try:
            yield
        finally:
            waited_s = self.context.clock() - begin_s
            for seat in self.by_name.values():
                seat.progress_s += waited_s
                seat.deadline_s += waited_s
