"""Messages from the driver to the workers' drafters: other workers' rollouts, and the state of a checkpoint.

Drafters only save time, so no failure reaches the run. Only a save and the end of training are waited for, with
deadlines.
"""

import pickle
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import RayError

from actors.engine.shared_rollouts import pack
from actors.loop import EventLoop
from contracts.engine import Hear, LoadDrafters, RecordStates, Remember, SaveDrafters, SiblingText, UpdateDrafter
from contracts.rollout import DrafterLoaded, IntArray
from launch.dispatch.seat import FETCH_TIMEOUT_S, Seat, SeatState, Weights
from models.manifest import WeightsManifest

SAVE_TIMEOUT_S = 60.0  # for one worker, at most; rollout.stall_timeout_s if that is less
_SAVERS = 3  # workers asked in turn
_MAX_UNANSWERED = 4  # a worker with this many unanswered messages gets no more


class DrafterMessages:
    """Messages to the drafters of all workers, `seats` by name. Nothing here fails."""

    def __init__(self, seats: Mapping[str, Seat], loop: EventLoop, stall_timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """stall_timeout_s: a worker that is silent for longer is not waited for."""
        self._seats, self._loop, self._stall_timeout_s = seats, loop, stall_timeout_s
        self._directory: str | None = None  # loaded by an engine that starts ...
        self._records = True  # engines record, as they start
        self._trainers = False  # workers have trainers, as they start
        self._weights: dict[str, Weights] = {}  # ... with the weights of its drafters, by name
        self._sent: dict[Seat, list[ray.ObjectRef[Any]]] = {}
        self._updates: list[tuple[Seat, ray.ObjectRef[Any]]] = []  # weights not answered yet
        self._fetches: list[tuple[Seat, ray.ObjectRef[WeightsManifest], ray.ObjectRef[Any]]] = []  # nor are these

    def share(self, rollouts: Sequence[tuple[IntArray, IntArray, str]]) -> None:
        """Send every worker the rollouts, as (prompt, response, worker), that other workers made. Never waits."""
        listening = [seat for seat in self._up() if self._listens(seat)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(made_by for _, _, made_by in rollouts))}
        if not rollouts or all(numbers.keys() == {seat.name} for seat in listening):
            return
        with suppress(RayError):
            shared = ray.put(pack([(p, r, numbers[made_by]) for p, r, made_by in rollouts]))
            for seat in listening:
                self._sent[seat].append(seat.tell(Remember(numbers.get(seat.name, -1)), shared))

    def hear(self, worker: str, texts: Sequence[SiblingText]) -> bool:
        """Send the worker texts that others sample. Returns whether they are under way: a worker that is not up, or has
        not answered earlier messages, gets none. Never waits."""
        seat = self._seats.get(worker)
        if seat is None or seat.state is not SeatState.READY or not self._listens(seat):
            return False
        with suppress(RayError):
            self._sent[seat].append(seat.tell(pickle.dumps(Hear(tuple(texts)))))
        return True

    def load(self, directory: str) -> None:
        """Have all workers, and engines that start later, load what `save` wrote there. Never waits."""
        self._directory = directory
        for seat in self._up():
            self.started(seat)

    def record(self, on: bool) -> None:
        """Have all engines, also those that start later, record hidden states or not. Never waits."""
        if on is not self._records:
            self._records = on
            for seat in self._up():
                self._send_record(seat)

    def _send_record(self, seat: Seat) -> None:
        if self._listens(seat):
            with suppress(RayError):
                self._sent[seat].append(seat.tell(RecordStates(self._records)))

    def start_trainers(self) -> None:
        """Have all workers, also those that start later, start a drafter trainer. Idempotent. Never waits."""
        if not self._trainers:
            self._trainers = True
            for seat in self._up():
                self._start_trainer(seat)

    def _start_trainer(self, seat: Seat) -> None:
        with suppress(RayError):
            self._sent.setdefault(seat, []).append(cast(Any, seat.handle).start_trainer.remote())

    def started(self, seat: Seat) -> None:
        """Send the state and weights to a worker whose engine has come up."""
        if self._trainers:
            self._start_trainer(seat)
        if not self._records:
            self._send_record(seat)
        if self._directory is not None and self._listens(seat):
            with suppress(RayError):
                self._sent[seat].append(seat.tell(LoadDrafters(self._directory)))
        for name, weights in self._weights.items():
            self._send_weights(seat, name, weights)

    def use_buffer(self, seat: Seat, buffer: Any) -> None:
        """Have the worker record into this data buffer of its node. Never waits."""
        with suppress(RayError):
            self._sent.setdefault(seat, []).append(cast(Any, seat.handle).use_buffer.remote(buffer))

    def target_changed(self, seat: Seat, weights: Weights) -> None:
        """Report that the worker's engine has these target weights; its trainer reads them from the store.
        Never waits."""
        with suppress(RayError):
            if self._listens(seat):
                answer = cast(Any, seat.handle).target_weights.remote(weights.manifest, weights.ref)
                self._sent[seat].append(answer)

    def left(self, seat: Seat) -> None:
        """Forget a worker that has left for good."""
        self._sent.pop(seat, None)
        self._updates = [(known, ref) for known, ref in self._updates if known is not seat]

    def fetch(self, seat: Seat, version: int) -> None:
        """Store the weights that the worker's trainer has published where they outlive the worker.

        The objects are return values of a call by the driver, so the driver owns them. It holds references only: the
        bytes are in the store of the worker's node, and of every node whose engines have loaded them."""
        with suppress(RayError):
            manifest, weights = cast(Any, seat.handle).drafter_weights.remote(version)
            self._fetches.append((seat, manifest, weights))

    def fetched(self) -> list[tuple[Seat, Weights]]:
        """Return the weights that have arrived since the last call. If their worker was lost first, they never arrive;
        no one has been told of them. Never waits."""
        if not self._fetches:
            return []
        refs = [manifest for _, manifest, _ in self._fetches]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        found = []
        for seat, manifest, weights in self._fetches:
            if manifest in ready:
                with suppress(RayError):  # both objects are made at once, so one implies the other
                    found.append((seat, Weights(ray.get(manifest, timeout=FETCH_TIMEOUT_S), weights)))
        self._fetches = [fetch for fetch in self._fetches if fetch[1] not in ready]
        return found

    def update(self, name: str, weights: Weights) -> None:
        """Have all engines, also those that start later, draft with these weights. Never waits."""
        self._weights[name] = weights
        for seat in self._up():
            self._send_weights(seat, name, weights)

    def _send_weights(self, seat: Seat, name: str, weights: Weights) -> None:
        with suppress(RayError):
            command = UpdateDrafter(name, weights.manifest)
            self._updates.append((seat, seat.ask(command, weights.ref)))

    def updated(self) -> list[tuple[Seat, DrafterLoaded]]:
        """Return the workers' answers to new weights since the last call, without lost workers. Never waits."""
        if not self._updates:
            return []
        ready = set(ray.wait([ref for _, ref in self._updates], num_returns=len(self._updates), timeout=0)[0])
        answered = [(seat, ref) for seat, ref in self._updates if ref in ready]
        self._updates = [(seat, ref) for seat, ref in self._updates if ref not in ready]
        found = []
        for seat, ref in answered:
            with suppress(RayError):
                found.append((seat, ray.get(ref, timeout=FETCH_TIMEOUT_S)))
        return found

    def save(self, directory: str) -> str | None:
        """Have one worker write its drafters' state into `directory`, which it and this process can reach. One
        suffices, since all have seen all rollouts. If it does not answer in time, or is lost, the next one is asked.
        Returns why nothing was written, if so. Bounded by a deadline."""
        failures = list[str]()
        asked = set[str]()
        while len(asked) < _SAVERS:
            ready = (seat for seat in self._seats.values() if seat.state is SeatState.READY and seat.name not in asked)
            if (seat := next(ready, None)) is None:
                break
            asked.add(seat.name)
            own = Path(f"{directory}.{seat.name}")  # a worker that wakes up later writes there, not into the checkpoint
            try:
                own.mkdir(parents=True, exist_ok=True)
                failure, late = self._saved_by(seat, own)
                if failure is None:
                    own.rename(directory)
                    return None
            except OSError as error:
                failure, late = str(error), False
            shutil.rmtree(own, ignore_errors=True)
            failures.append(f"{seat.name} {failure}" if late else f"{seat.name}: {failure}")
            if not late:
                break
        return "; ".join(failures) or "no worker is up"

    def _saved_by(self, seat: Seat, directory: Path) -> tuple[str | None, bool]:
        """Return (the failure, whether another worker may do better)."""
        timeout_s = min(SAVE_TIMEOUT_S, self._stall_timeout_s)
        try:
            answer = seat.ask(SaveDrafters(str(directory)))
            there, _ = self._loop.answers([answer], timeout_s)
            if not there:
                return f"did not write them within {timeout_s:g} s", True
            return ray.get(answer, timeout=FETCH_TIMEOUT_S).failure, False
        except RayError as error:
            return f"was lost: {str(error).strip().splitlines()[-1]}", True

    def saved_as(self, directory: str) -> None:
        """Have engines that start from now on load the state there."""
        self._directory = directory

    def stop_training(self, timeout_s: float) -> list[str]:
        """Take all trainers off their devices. Returns the workers that did not confirm in time."""
        up = [seat for seat in self._seats.values() if seat.state is SeatState.READY]
        asked = {seat.handle.stop_training.remote(): seat.name for seat in up}
        ready, late = self._loop.answers(list(asked), timeout_s)
        for answer in ready:
            with suppress(RayError):  # of a lost worker, whose trainer is lost with it
                ray.get(answer, timeout=timeout_s)
        return [asked[answer] for answer in late]

    def _listens(self, seat: Seat) -> bool:
        sent = self._sent.setdefault(seat, [])
        if sent:
            ready, waiting = ray.wait(sent, num_returns=len(sent), timeout=0)
            for answer in ready:
                with suppress(RayError):  # fetched, so that Ray does not report it at the end of the run
                    ray.get(answer, timeout=1.0)
            sent[:] = waiting
        return len(sent) < _MAX_UNANSWERED

    def _up(self) -> list[Seat]:
        return [seat for seat in self._seats.values() if seat.state in (SeatState.READY, SeatState.LOADING)]
