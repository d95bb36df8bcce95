"""One complete coordinator: machine, sockets, admin service, address file. Starts and stops them.

    with CoordinatorService(options, directory=Path("runs/demo")) as service:
        service.endpoint           # for WorkerClient and DriverClient
        service.rollout_started(7) # or by a DriverClient of another process

It uses neither torch nor ray: an actor may host it, or `python -m coordinator` runs it alone.

A service that finds another's address file is its successor. It has a higher term and takes over free ports. It decides
nothing until every worker has registered again or has stopped by itself (`lease_s`). Its predecessor's drains, pause
and threshold still apply.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from config.coordinator import LOOPBACK, OPEN_TO_ALL, CoordinatorOptions
from contracts.coordinator import Changed, ControlEvent, Notice, RolloutComplete, RolloutStarted
from coordinator.address import Address, reachable
from coordinator.admin.credentials import given_certificate, service_certificate, service_token
from coordinator.admin.server import AdminServer
from coordinator.errors import SetupError
from coordinator.feed import StatusFeed
from coordinator.machine import Machine
from coordinator.standing import NOTHING, Standing
from coordinator.status import Status, read_status
from coordinator.transport.security import server_keys
from coordinator.transport.server import CoordinatorServer

S = TypeVar("S")
_log = logging.getLogger(__name__)


def host_faults(options: CoordinatorOptions) -> Iterator[tuple[str, str]]:
    """Yield keys and faults of hosts on which this machine cannot listen. Opens no port, may ask DNS."""
    cards = {name for _, name in socket.if_nameindex()}  # workers may name a network card
    for key, host, known in (("host", options.host, cards), ("admin_host", options.admin_host, set[str]())):
        if host not in (*OPEN_TO_ALL, *LOOPBACK, *known) and not _is_here(host.strip("[]")):
            yield key, f"{host!r} is no address of this machine"


def _is_here(host: str) -> bool:
    with suppress(OSError, UnicodeError):
        for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.bind(address)
                return True
    return False


class CoordinatorService:
    """Runs from construction to `close`. Raises OSError if a port is taken, SetupError.

    directory: gets the address file, and what holds until it is taken back (standing.py), for a successor with the same
    `run`. members, on_failure, clock: as CoordinatorServer has them.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        *,
        directory: Path | None = None,
        run: str = "",
        members: Collection[str] | None = None,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for key, fault, remedy in options.contradictions():
            raise SetupError(f"{key}: {fault}; {remedy}")
        if options.encrypts and options.curve.directory is None:
            raise SetupError(
                f"curve.directory: {options.host} is not the loopback address, so workers' connections are encrypted; "
                "make keys (python -m coordinator keys DIRECTORY) and name them, or set curve.enabled=false"
            )
        before = Address.read(directory) if directory is not None else None  # a missing folder is not created
        token, certificate = _admin_credentials(options, directory)
        self._started_s = clock()
        self._feed = StatusFeed()
        self._directory, self._run = directory, run
        standing = self._read_standing()
        term = max(time.time_ns() // 1_000_000, before.term + 1 if before is not None else 0)
        if before is None:
            machine = Machine(options, term=term, standing=standing)
        else:
            settles_at_s = self._started_s + options.lease_s
            machine = Machine(options, term=term, settles_at_s=settles_at_s, standing=standing)
        self._machine, self._kept = machine, standing
        keys = server_keys(Path(options.curve.directory)) if options.curve.directory is not None else None
        self._server = _first_free(
            lambda port: CoordinatorServer(
                machine,
                f"tcp://{options.host}:{port}",
                keys=keys,
                members=members,
                watch=self._watch,
                on_failure=on_failure,
                clock=clock,
            ),
            _ports(options.port, before.endpoint if before is not None else ""),
            "",
        )
        try:
            self._admin = _first_free(
                lambda port: AdminServer(
                    self, self._feed, f"{options.admin_host}:{port}", token=token, certificate=certificate
                ),
                _ports(options.admin_port, before.admin if before is not None else ""),
                "admin_",
            )
        except BaseException:
            self._server.close()
            raise
        self.address = Address(
            endpoint=self.endpoint,
            admin=reachable(self._admin.address),
            term=term,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=time.time(),
            admin_tls=certificate is not None,
        )
        if directory is not None:
            self.address.write(directory)

    @property
    def endpoint(self) -> str:
        """Return the address for workers and the driver: tcp://host:port."""
        return f"tcp://{reachable(self._server.endpoint.removeprefix('tcp://'))}"

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        """Same as DriverClient.rollout_started, for a driver in this process."""
        self.control(RolloutStarted(step, train))

    def rollout_complete(self, step: int) -> None:
        self.control(RolloutComplete(step))

    def control(self, event: ControlEvent) -> None:
        """Apply an event of the driver or of an administrator. Raises UnknownTargetError; TimeoutError and
        ConnectionError if the service does not run.
        """
        with self._server.hub() as (hub, now_s):
            hub.control(event, now_s)
            self._keep()

    def admit(self, worker: str) -> None:
        """Allow another worker to register. Raises TimeoutError and ConnectionError if the service does not run."""
        with self._server.hub() as (hub, _):
            hub.admit(worker)

    def status(self) -> Status:
        with self._server.hub() as (hub, now_s):
            return read_status(hub, now_s, started_s=self._started_s, endpoint=self.endpoint)

    def close(self) -> None:
        """Stop the service. The address file stays, for a successor. Training workers stop within their lease."""
        self._admin.close()
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, notice: Notice) -> None:
        if isinstance(notice, Changed) and not notice.after:  # a drained worker may have left
            self._keep()
        self._feed.publish(notice, time.time())

    def _keep(self) -> None:
        """Save the standing orders for a successor, before the caller has the answer. Called with the hub."""
        standing = self._machine.standing
        if self._directory is None or standing == self._kept:
            return
        self._kept = standing
        try:
            standing.write(self._directory, self._run)
        except OSError as error:
            _log.warning("drains and pauses are obeyed, but a restart would forget them: %s", error)

    def _read_standing(self) -> Standing:
        found = None
        try:
            found = Standing.read(self._directory, self._run) if self._directory is not None else None
        except (SetupError, OSError) as error:
            _log.warning("nothing is drained or paused: what was asked before is lost: %s", error)
        return found or NOTHING


def _admin_credentials(options: CoordinatorOptions, directory: Path | None) -> tuple[str, tuple[bytes, bytes] | None]:
    """Token (empty: none is asked for); private key and certificate (None: no TLS). Raises SetupError."""
    given, asks = options.admin, options.admin_asks(folder=directory is not None)
    if directory is None and (asks or (options.admin_tls and given.certificate is None)):
        raise SetupError(
            f"admin_host: {options.admin_host} needs a token and a certificate, which are left in the folder of a run; "
            "name one (--directory), or leave admin_host out and come through ssh -L"
        )
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    token = service_token(directory) if asks and directory is not None else ""
    if given.certificate is not None and given.key is not None:
        return token, given_certificate(given.certificate, given.key, directory)
    return token, service_certificate(directory) if options.admin_tls and directory is not None else None


def _ports(wanted: int, before: str) -> list[int]:
    """Ports to try, in order: the configured one, else the predecessor's, else any."""
    if wanted:
        return [wanted]
    last = before.rpartition(":")[2]
    return [int(last), 0] if last.isdigit() else [0]


def _first_free(start: Callable[[int], S], ports: list[int], key: str) -> S:
    """Call `start` with the first free port. key: of the port, without `port`. Raises OSError that names it."""
    for port in ports[:-1]:
        try:
            return start(port)
        except OSError:
            continue
    try:
        return start(ports[-1])
    except OSError as error:
        why = error.strerror or str(error)
        remedy = f"coordinator.{key}port=0 takes a free port, coordinator.{key}host must be an address of this machine"
        raise OSError(error.errno, f"{why}; {remedy}") from None
