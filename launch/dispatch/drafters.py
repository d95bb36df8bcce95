"""What the driver tells the workers' drafters: rollouts of other workers, and the state that a checkpoint keeps.

Drafters only save time: nothing here is waited for but a save, which has a deadline, and no failure reaches the run.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from actors.engine.commands import LoadDrafters, Remember, SaveDrafters, UpdateDrafter
from actors.engine.shared_rollouts import pack
from actors.engine.types import DrafterLoaded, IntArray
from launch.dispatch.seat import FETCH_TIMEOUT_S, Seat, SeatState, Weights
from models.manifest import WeightsManifest

SAVE_TIMEOUT_S = 60.0
_MAX_UNANSWERED = 4  # a worker that does not listen is not talked to


class DrafterMessages:
    """Messages to the drafters of all workers."""

    def __init__(self) -> None:
        self._directory: str | None = None  # what an engine that starts anew begins with ...
        self._weights: dict[str, Weights] = {}  # ... and the weights of its drafters, by name
        self._sent: dict[Seat, list[ray.ObjectRef[Any]]] = {}
        self._updates: list[tuple[Seat, ray.ObjectRef[Any]]] = []  # of weights, not answered yet

    def share(self, seats: Iterable[Seat], rollouts: Sequence[tuple[IntArray, IntArray, int]]) -> None:
        """Show every worker the rollouts, as (prompt, response, worker), that it did not make."""
        listening = [seat for seat in seats if _up(seat) and self._listens(seat)]
        if not rollouts or all(made_by == seat.index for seat in listening for _, _, made_by in rollouts):
            return
        with suppress(RayError):
            shared = ray.put(pack(rollouts))
            for seat in listening:
                self._sent[seat].append(seat.tell(Remember(seat.index), shared))

    def load(self, seats: Iterable[Seat], directory: str) -> None:
        """All workers take what `save` wrote there, and engines that are restarted later do."""
        self._directory = directory
        for seat in seats:
            if _up(seat):
                self.started(seat)

    def started(self, seat: Seat) -> None:
        """The worker's engine is up."""
        if self._directory is not None and self._listens(seat):
            with suppress(RayError):
                self._sent[seat].append(seat.tell(LoadDrafters(self._directory)))
        for name, weights in self._weights.items():
            self._send_weights(seat, name, weights)

    def update(self, seats: Iterable[Seat], name: str, manifest: WeightsManifest, payload: NDArray[np.uint8]) -> None:
        """All engines draft with these weights, those that are restarted later too."""
        with suppress(RayError):
            weights = self._weights[name] = Weights(manifest, ray.put(payload))
            for seat in seats:
                if _up(seat):
                    self._send_weights(seat, name, weights)

    def _send_weights(self, seat: Seat, name: str, weights: Weights) -> None:
        with suppress(RayError):
            command = UpdateDrafter(name, weights.manifest)
            self._updates.append((seat, seat.ask(command, weights.ref)))

    def updated(self) -> list[tuple[Seat, DrafterLoaded]]:
        """What workers have answered to new weights since the last call; lost ones say nothing. Never waits."""
        if not self._updates:
            return []
        ready, _ = ray.wait([ref for _, ref in self._updates], num_returns=len(self._updates), timeout=0)
        answered = [(seat, ref) for seat, ref in self._updates if ref in ready]
        self._updates = [(seat, ref) for seat, ref in self._updates if ref not in ready]
        found = []
        for seat, ref in answered:
            with suppress(RayError):
                found.append((seat, ray.get(ref, timeout=FETCH_TIMEOUT_S)))
        return found

    def save(self, seats: Iterable[Seat], directory: str) -> str | None:
        """One worker writes its drafters' state; all have seen all rollouts. Returns why nothing was written."""
        seat = next((seat for seat in seats if seat.state is SeatState.READY), None)
        if seat is None:
            return "no worker is up"
        try:
            answer = seat.ask(SaveDrafters(directory))
            ready, _ = ray.wait([answer], timeout=SAVE_TIMEOUT_S)
            if not ready:
                return f"{seat.name} did not write them within {SAVE_TIMEOUT_S:g} s"
            failure = ray.get(answer, timeout=FETCH_TIMEOUT_S).failure
        except RayError as error:
            failure = str(error).strip().splitlines()[-1]
        return None if failure is None else f"{seat.name}: {failure}"

    def saved_as(self, directory: str) -> None:
        """The state is kept there from now on."""
        self._directory = directory

    def _listens(self, seat: Seat) -> bool:
        sent = self._sent.setdefault(seat, [])
        if sent:
            ready, waiting = ray.wait(sent, num_returns=len(sent), timeout=0)
            for answer in ready:
                with suppress(RayError):  # seen, so that Ray does not report it at the end of the run
                    ray.get(answer, timeout=1.0)
            sent[:] = waiting
        return len(sent) < _MAX_UNANSWERED


def _up(seat: Seat) -> bool:
    return seat.state in (SeatState.READY, SeatState.LOADING)
