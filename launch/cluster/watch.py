"""Whether Ray itself is still there, watched from threads of the driver. Owns the finding out; what follows is told.

Ray's calls do not all obey deadlines: `ray.put` beside a stopped raylet never returns, nor does the end of a run beside
a stopped GCS; where one of them dies, Ray's core ends the driver, with its own words. So nothing in the driver's loop
can be relied on to notice. Two threads can: one waits for the end of the processes of a private head, the other
asks Ray's servers for their health. A server that never answered (one that wants TLS) is not asked further.
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
LEAST_FAILURES = 3  # in a row: this process may have been stopped itself


class RayWatch:
    """Watches from `__enter__` to `__exit__`, and calls `lost` with the reason once at most, on a thread of its own.

    servers: host:port by what it is. processes: process ids by what they are; their end is a loss until `closing`.
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
        self._told = threading.Lock()  # taken once, by whoever tells
        self._armed: set[str] = set()  # servers that have answered once
        self._over, self._expected = threading.Event(), threading.Event()
        self._ends: dict[int, str] = {}  # by descriptor of the process
        if hasattr(os, "pidfd_open"):
            for name, pid in processes.items():
                with suppress(OSError):  # an old kernel: Ray's own words then
                    self._ends[os.pidfd_open(pid)] = f"{name} (process {pid})"
        self._wake = os.eventfd(0) if self._ends else -1
        targets = [self._ask, self._wait] if self._ends else [self._ask]
        self._threads = [threading.Thread(target=t, name=f"ray-watch-{t.__name__}", daemon=True) for t in targets]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def closing(self) -> None:
        """From now on Ray is being ended: processes may go, but a silence is still a loss."""
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
        """After a failure of anything that uses Ray: returns when every server answers, so that the failure is its own,
        or not at all, for a loss of Ray has other symptoms first, and is told in at most the time it always takes."""
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
        since_s: dict[str, float] = {}  # start of the first question in a row without an answer
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
