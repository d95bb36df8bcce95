"""One coordinator, complete: machine, sockets, admin service, address file. Owns how they start and end.

    with CoordinatorService(options, directory=Path("runs/demo")) as service:
        service.endpoint           # for WorkerClient and DriverClient
        service.rollout_started(7) # or by a DriverClient of another process

It holds no torch and no ray: an actor may host it, or `python -m coordinator` runs it alone. One that starts where
another left its address file has a higher term, takes over its ports if they are free, and decides nothing until every
worker has registered again or has stopped by itself (`lease_s`).
"""

import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from coordinator.address import Address
from coordinator.admin.server import AdminServer
from coordinator.events import ControlEvent, Notice, RolloutComplete, RolloutStarted
from coordinator.feed import Feed
from coordinator.machine import Machine
from coordinator.options import CoordinatorOptions
from coordinator.status import Status, read_status
from coordinator.transport.security import server_keys
from coordinator.transport.server import CoordinatorServer

S = TypeVar("S")


class OptionsError(ValueError):
    """Options that contradict each other."""


class CoordinatorService:
    """Runs from construction to `close`. Raises OSError if a port is taken, OptionsError, KeyFilesError,
    AddressFileError.

    directory: gets the address file. members, watch, on_failure: as CoordinatorServer has them.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        directory: Path | None = None,
        members: Collection[str] | None = None,
        watch: Callable[[Notice], None] = lambda notice: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        if fault := options.contradiction():
            raise OptionsError(f"lease_s: {fault}")
        before = Address.read(directory) if directory is not None else None
        self._started_s = time.monotonic()
        self._feed, self._also = Feed(), watch
        term = max(time.time_ns() // 1_000_000, before.term + 1 if before is not None else 0)
        if before is None:
            machine = Machine(options, term=term)
        else:
            machine = Machine(options, term=term, settles_at_s=self._started_s + options.lease_s)
        keys = server_keys(Path(options.curve.directory)) if options.curve.directory is not None else None
        self._server = _first_free(
            lambda port: CoordinatorServer(
                machine,
                f"tcp://{options.host}:{port}",
                keys=keys,
                members=members,
                watch=self._watch,
                on_failure=on_failure,
            ),
            _ports(options.port, before.endpoint if before is not None else ""),
        )
        try:
            self._admin = _first_free(
                lambda port: AdminServer(self, self._feed, f"{options.admin_host}:{port}"),
                _ports(options.admin_port, before.admin if before is not None else ""),
            )
        except BaseException:
            self._server.close()
            raise
        self.address = Address(
            endpoint=self.endpoint,
            admin=self._admin.address,
            term=term,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=time.time(),
        )
        if directory is not None:
            self.address.write(directory)

    @property
    def endpoint(self) -> str:
        """For workers and the driver: tcp://host:port."""
        return self._server.endpoint

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        """As DriverClient, for a driver in this process."""
        self.control(RolloutStarted(step, train))

    def rollout_complete(self, step: int) -> None:
        self.control(RolloutComplete(step))

    def control(self, event: ControlEvent) -> None:
        """Raises UnknownTargetError; TimeoutError and ConnectionError if the service does not run."""
        self._server.control(event)

    def admit(self, worker: str) -> None:
        """It may register too, from now on. Raises TimeoutError and ConnectionError if the service does not run."""
        self._server.call(lambda hub, now_s: hub.admit(worker))

    def status(self) -> Status:
        return self._server.call(
            lambda hub, now_s: read_status(hub, now_s, started_s=self._started_s, endpoint=self.endpoint)
        )

    def close(self) -> None:
        """End; the address file stays, for a successor. Workers that train stop within their lease."""
        self._admin.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, notice: Notice) -> None:
        self._feed.publish(notice)
        self._also(notice)


def _ports(wanted: int, before: str) -> list[int]:
    """Ports to try, in order: the one asked for, else the predecessor's, else any."""
    if wanted:
        return [wanted]
    last = before.rpartition(":")[2]
    return [int(last), 0] if last.isdigit() else [0]


def _first_free(start: Callable[[int], S], ports: list[int]) -> S:
    for port in ports[:-1]:
        try:
            return start(port)
        except OSError:
            continue
    return start(ports[-1])
