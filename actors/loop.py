"""The driver's one event queue, and the only place where it waits.

Events are Ray's answers (`expect`), messages from other threads (`post`), and messages between parts of the driver
(`tell`). Every wait is in `turn`, `wait` or `answers`. There, the reactions (launch.run.reactions) handle every event
in order, and the clock is checked after each turn. So no wait delays the handling of other events.

`ray.wait` examines every pending reference at each arrival. Here an arrival has constant cost, however many references
are pending, and contains its value.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import ray
from ray import ObjectRef, ObjectRefGenerator

Waitable: TypeAlias = "ObjectRef[Any] | ObjectRefGenerator"
Refs = list["ObjectRef[Any]"]
SLICE_S = 0.25  # the clock is checked this often without an arrival


@dataclass(frozen=True, slots=True)
class Look:
    """Event after all pending ones: time to check deadlines."""


LOOK = Look()
_WOKEN = (None, None)  # a wake-up without an event


class EventLoop:
    """Event queue of one thread; only `post` and Ray's callbacks may run on others. Events are kept until
    `react_with`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._react: Callable[[Any], None] | None = None
        self._queue: SimpleQueue[tuple[Waitable | None, Any]] = SimpleQueue()  # from any thread
        self._arrived: deque[tuple[Waitable | None, Any]] = deque()  # taken from the queue, not handled yet
        self._held: deque[tuple[Waitable | None, Any]] = deque()  # postponed to the next turn
        # By waitable: the event made of its value, and the reference, which keeps Ray's object alive.
        self._awaited: dict[Waitable, tuple[Callable[[Any], Any], ObjectRef[Any]]] = {}

    def react_with(self, reactions: Callable[[Any], None]) -> None:
        """Handle all further events with these reactions."""
        self._react = reactions

    # Events.

    def post(self, event: Any) -> None:
        """Add an event from any thread."""
        self._queue.put((None, event))

    def tell(self, event: Any) -> None:
        """Add an event that is handled before any wait continues."""
        self._arrived.append((None, event))

    def hold(self, event: Any) -> None:
        """Postpone an event during its handling. It returns first in the next turn."""
        self._held.append((None, event))

    def expect(self, waitable: Waitable, event: Callable[[Any], Any]) -> None:
        """Register a pending answer, or a stream's next object or end once the one before was consumed (`next`).

        `event` makes an event from the value, or from the exception in its place, unless `forget` comes first."""
        ref = waitable
        if isinstance(ref, ObjectRefGenerator):  # it knows the next object's name, but Ray has no public call for it
            [ref] = ref._get_next_ref_n(1)
        self._awaited[waitable] = event, ref
        ref._on_completed(partial(self._put, waitable))  # the same way as ObjectRef.future

    def forget(self, waitable: Waitable) -> None:
        """Ignore the answer."""
        self._awaited.pop(waitable, None)

    # Waiting.

    def turn(self, timeout_s: float = 0.0) -> None:
        """Handle all pending events, waiting at most `timeout_s` for the first; then check the clock."""
        self._take(timeout_s)
        if self._react is None:
            self._held.extend(arrived for arrived in self._arrived if arrived != _WOKEN)
            self._arrived.clear()
            return
        self._arrived.extendleft(reversed(self._held))
        self._held.clear()
        self._handle()
        self._react(LOOK)
        self._handle()

    @property
    def told(self) -> bool:
        """Whether events must be handled before a wait continues."""
        return bool(self._arrived)

    def wait(self, until: Callable[[], bool], deadline_s: float = inf) -> bool:
        """Wait for the condition, and return whether it held before the deadline."""
        if self._held:
            self.turn()
        while self.told or not until():
            if (left_s := deadline_s - self.clock()) <= 0:
                return False
            self.turn(min(left_s, SLICE_S))
        return True

    def answers(self, refs: "Sequence[ObjectRef[Any]]", timeout_s: float) -> tuple[Refs, Refs]:
        """Return the references that are ready within the timeout, and the others."""
        deadline_s = self.clock() + timeout_s
        there, late = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        self.wake_for(late)
        while late and (left_s := deadline_s - self.clock()) > 0:
            self.turn(min(left_s, SLICE_S))
            ready, late = ray.wait(late, num_returns=len(late), timeout=0)
            there += ready
        return there, late

    def wake_for(self, refs: "Sequence[ObjectRef[Any]]") -> None:
        """Wake a waiting turn when one of these is ready."""
        for ref in refs:
            ref._on_completed(partial(self._wake, ref))

    def _handle(self) -> None:
        assert self._react is not None
        while self._arrived:  # also when called within a reaction; an exception keeps the rest
            waitable, value = self._arrived.popleft()
            if waitable is None and value is not None:
                self._react(value)
            elif waitable is not None and (awaited := self._awaited.pop(waitable, None)) is not None:
                self._react(awaited[0](value))

    def _take(self, timeout_s: float) -> None:
        try:
            if not self._arrived:
                self._arrived.append(self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait())
            while True:
                self._arrived.append(self._queue.get_nowait())
        except Empty:
            pass

    def _put(self, waitable: Waitable, value: Any) -> None:
        self._queue.put((waitable, value))

    def _wake(self, _ref: "ObjectRef[Any]", _value: Any) -> None:
        self._queue.put(_WOKEN)
