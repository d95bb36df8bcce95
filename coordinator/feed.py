"""Changes of a coordinator for its watchers. It never blocks on a watcher: a slow one is cut off."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Full, Queue

from contracts.coordinator import Changed, Lost, Notice
from coordinator.status import Change

CAPACITY = 10_000  # most pending changes of a watcher


class Subscription:
    """`changes` in order; `cut_off` is set once too many are pending."""

    def __init__(self) -> None:
        self.changes: Queue[Change] = Queue(CAPACITY)
        self.cut_off = False


class StatusFeed:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []

    def publish(self, notice: Notice, at_s: float) -> None:
        """Pass on what happened at that Unix time."""
        if not self._subscriptions:
            return
        change = as_change(notice, at_s)
        with self._lock:
            for subscription in list(self._subscriptions):
                try:
                    subscription.changes.put_nowait(change)
                except Full:
                    subscription.cut_off = True
                    self._subscriptions.remove(subscription)

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        subscription = Subscription()
        with self._lock:
            self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                if subscription in self._subscriptions:
                    self._subscriptions.remove(subscription)


def as_change(notice: Notice, at_s: float) -> Change:
    if isinstance(notice, Changed):
        return Change(at_s=at_s, worker=notice.worker, before=notice.before, after=notice.after, reason=notice.reason)
    if isinstance(notice, Lost):
        return Change(at_s=at_s, worker=notice.worker, after="LOST", reason=notice.reason)
    return Change(at_s=at_s, group=notice.group, session=notice.session, epoch=notice.epoch, members=notice.members)
