"""What Ray brings of all that is awaited: answers of calls, and the next objects of streams. Owns the queue between
Ray's thread, which puts into it and does nothing else, and the thread that decides, which takes all that is there.

`ray.wait` goes through everything that is awaited whenever anything arrives. Here an arrival costs the same whatever
else is awaited, and brings its value, which nobody has to ask for.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from ray import ObjectRef, ObjectRefGenerator

T = TypeVar("T")
Waitable: TypeAlias = "ObjectRef[Any] | ObjectRefGenerator"


class Arrivals(Generic[T]):
    """Of what owners of one kind await. Everything but `_put` is called on one thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Waitable | None, Any]] = SimpleQueue()
        self._arrived: deque[tuple[Waitable | None, Any]] = deque()
        # By waitable: the owner, and the reference of what is to come, which Ray would forget if nobody held it.
        self._awaited: dict[Waitable, tuple[T, ObjectRef[Any]]] = {}

    def __bool__(self) -> bool:
        """Whether anything is awaited."""
        return bool(self._awaited)

    def expect(self, owner: T, waitable: Waitable) -> None:
        """An answer; of a stream its next object, or its end: the one before has been consumed (`next`)."""
        ref = waitable
        if isinstance(ref, ObjectRefGenerator):  # it knows its next object's name; Ray has no public call for that
            [ref] = ref._get_next_ref_n(1)
        self._awaited[waitable] = owner, ref
        ref._on_completed(partial(self._put, waitable))  # as ObjectRef.future does it

    def forget(self, waitable: Waitable) -> None:
        """Whatever comes of it is of no interest any more."""
        self._awaited.pop(waitable, None)

    def wake(self) -> None:
        """From any thread: whoever waits in `take` goes on."""
        self._queue.put((None, None))

    def take(self, timeout_s: float) -> Iterator[tuple[T, Waitable, Any]]:
        """All that is there, at most `timeout_s` later: whose it is, what was expected and its value, or the exception
        in place of it. Each is awaited until it is taken, so one that is forgotten meanwhile does not come."""
        try:
            if not self._arrived:
                self._arrived.append(self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait())
            while True:
                self._arrived.append(self._queue.get_nowait())
        except Empty:
            pass
        while self._arrived:  # by whoever calls meanwhile, too; an exception of the caller leaves the rest
            waitable, value = self._arrived.popleft()
            if waitable is not None and (awaited := self._awaited.pop(waitable, None)) is not None:
                yield awaited[0], waitable, value

    def _put(self, waitable: Waitable, value: Any) -> None:
        self._queue.put((waitable, value))
