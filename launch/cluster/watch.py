"""Watch from threads of the driver whether Ray itself is still there. Only detects a loss; the caller reacts.

Not all of Ray's calls obey deadlines. `ray.put` next to a stopped raylet never returns, nor does the end of a run next
to a stopped GCS. If one of them dies, Ray's core ends the driver with its own message. So the driver's loop cannot
detect a loss reliably. Two threads can: one waits for the end of a private head's processes, the other asks Ray's
servers for their health. A server that has never answered (one that requires TLS) never counts as lost.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from coordinator.admin.probe import answers

PERIOD_S = 2.0
PROBE_S = 5.0
LEAST_FAILURES = 3  # in a row, since this process may have been stopped itself


class RayWatch:
    """Watches from `__enter__` to `__exit__`, and calls `lost` with the reason at most once, on its own thread.

    servers: host:port by name. processes: process ids by name; the end of one is a loss until `closing` is called.
    """

    def __init__(
        self,
        servers: Mapping[str, str],
        processes: Mapping[str, int],
        timeout_s: float,
        lost: Callable[[str], None],
        *,
        answers: Callable[[str, float], bool] = answers,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers, self._timeout_s, self._lost = dict(servers), timeout_s, lost
        self._answers, self._period_s, self._clock = answers, period_s, clock
        self._told = threading.Lock()  # acquired once, by the thread that reports
        self._armed: set[str] = set()  # servers that have answered once
        self._over, self._expected = threading.Event(), threading.Event()
        self._ends: dict[int, str] = {}  # process names by descriptor
        if hasattr(os, "pidfd_open"):
            for name, pid in processes.items():
                with suppress(OSError):  # an old kernel: then Ray's own message remains
                    self._ends[os.pidfd_open(pid)] = f"{name} (process {pid})"
        self._wake = os.eventfd(0) if self._ends else -1
        targets = [self._ask, self._wait] if self._ends else [self._ask]
        self._threads = [threading.Thread(target=t, name=f"ray-watch-{t.__name__}", daemon=True) for t in targets]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def closing(self) -> None:
        """Note that Ray is being shut down: processes may end from now on, but silence is still a loss."""
        self._expected.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._expected.set()
        self._over.set()
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(PROBE_S + 1.0)
        for descriptor in [*self._ends, self._wake]:
            if descriptor >= 0:
                os.close(descriptor)

    def settle(self) -> None:
        """Call it after a failure of anything that uses Ray. It returns when every server answers: then the failure is
        not Ray's. If Ray is lost, it does not return, and the watch reports the loss within its usual time."""
        while any(not self._answers(self._servers[name], PROBE_S) for name in sorted(self._armed)):
            self._over.wait(self._period_s)

    def _wait(self) -> None:
        poll = select.poll()
        for descriptor in [*self._ends, self._wake]:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor in self._ends and not self._expected.is_set():
                self._tell(f"{self._ends[descriptor]} has ended")

    def _ask(self) -> None:
        failures: dict[str, int] = {}
        since_s: dict[str, float] = {}  # time of the first unanswered question in a row
        while not self._over.wait(self._period_s):
            for name, address in self._servers.items():
                asked_s = self._clock()
                if self._answers(address, PROBE_S):
                    self._armed.add(name)
                    failures.pop(name, None)
                    continue
                if name not in self._armed or self._over.is_set():
                    continue
                failures[name] = failures.get(name, 0) + 1
                if failures[name] == 1:
                    since_s[name] = asked_s
                silent_s = self._clock() - since_s[name]
                if failures[name] >= LEAST_FAILURES and silent_s >= self._timeout_s:
                    self._tell(f"{name} at {address} has not answered for {silent_s:.0f} s (cluster.ray_timeout_s)")

    def _tell(self, reason: str) -> None:
        if self._told.acquire(blocking=False):
            self._lost(reason)
