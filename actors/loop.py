"""The driver's one queue of events, and the one place where it waits.

Whatever happens is an event: an answer of Ray's (`expect`), what another thread heard (`post`), what a part of the
driver has to say to another (`tell`). Who waits, for whatever it is, waits in `turn`, `wait` or `answers`: there every
event is handled by the reactions (launch.run.reactions), in order, and the clock is looked at after each turn. So
nothing that must not wait does, whatever the driver waits for.

`ray.wait` goes through everything that is awaited whenever anything arrives. Here an arrival costs the same whatever
else is awaited, and brings its value, which nobody has to ask for.
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
SLICE_S = 0.25  # the clock is looked at this often when nothing arrives


@dataclass(frozen=True, slots=True)
class Look:
    """What there was is handled: time to look at the clock."""


LOOK = Look()
_WOKEN = (None, None)  # nothing but a reason to look again


class EventLoop:
    """Everything but `post`, and what Ray calls, is for the thread that decides. Until somebody reacts all is kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._react: Callable[[Any], None] | None = None
        self._queue: SimpleQueue[tuple[Waitable | None, Any]] = SimpleQueue()  # from any thread
        self._arrived: deque[tuple[Waitable | None, Any]] = deque()  # taken, not handled yet
        self._held: deque[tuple[Waitable | None, Any]] = deque()  # not to be handled now
        # By waitable: the event that its value makes, and the reference, which Ray would forget if nobody held it.
        self._awaited: dict[Waitable, tuple[Callable[[Any], Any], ObjectRef[Any]]] = {}

    def react_with(self, reactions: Callable[[Any], None]) -> None:
        """From now on events are handled by these."""
        self._react = reactions

    # Events.

    def post(self, event: Any) -> None:
        """From any thread."""
        self._queue.put((None, event))

    def tell(self, event: Any) -> None:
        """It is handled before anybody goes on waiting."""
        self._arrived.append((None, event))

    def hold(self, event: Any) -> None:
        """Within its handling: not now. It comes again, before others, in the next turn."""
        self._held.append((None, event))

    def expect(self, waitable: Waitable, event: Callable[[Any], Any]) -> None:
        """An answer; of a stream its next object, or its end: the one before has been consumed (`next`). What `event`
        makes of its value, or of the exception in place of it, is handled, unless it is forgotten before."""
        ref = waitable
        if isinstance(ref, ObjectRefGenerator):  # it knows its next object's name; Ray has no public call for that
            [ref] = ref._get_next_ref_n(1)
        self._awaited[waitable] = event, ref
        ref._on_completed(partial(self._put, waitable))  # as ObjectRef.future does it

    def forget(self, waitable: Waitable) -> None:
        """Whatever comes of it is of no interest any more."""
        self._awaited.pop(waitable, None)

    # Waiting.

    def turn(self, timeout_s: float = 0.0) -> None:
        """Handle all that is there, at most `timeout_s` later; then look at the clock."""
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
        """Something is to be handled before anybody goes on waiting."""
        return bool(self._arrived)

    def wait(self, until: Callable[[], bool], deadline_s: float = inf) -> bool:
        """Whether that held before the deadline."""
        if self._held:
            self.turn()
        while self.told or not until():
            if (left_s := deadline_s - self.clock()) <= 0:
                return False
            self.turn(min(left_s, SLICE_S))
        return True

    def answers(self, refs: "Sequence[ObjectRef[Any]]", timeout_s: float) -> tuple[Refs, Refs]:
        """Those that are there within so long, and those that are not."""
        deadline_s = self.clock() + timeout_s
        there, late = ray.wait(list(refs), num_returns=len(refs), timeout=0) if refs else ([], [])
        self.wake_for(late)
        while late and (left_s := deadline_s - self.clock()) > 0:
            self.turn(min(left_s, SLICE_S))
            ready, late = ray.wait(late, num_returns=len(late), timeout=0)
            there += ready
        return there, late

    def wake_for(self, refs: "Sequence[ObjectRef[Any]]") -> None:
        """Whoever waits looks again when one of these is there."""
        for ref in refs:
            ref._on_completed(partial(self._wake, ref))

    def _handle(self) -> None:
        assert self._react is not None
        while self._arrived:  # by whoever waits within, too; an exception leaves the rest
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
