"""A coordinator on localhost and what talks to it, for tests: clients, and a bare socket that says anything."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

import zmq

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Train
from coordinator.machine import Machine
from coordinator.member import Identity
from coordinator.service import CoordinatorService
from coordinator.transport.client import Command, WorkerClient
from coordinator.transport.security import ClientKeys, ServerKeys
from coordinator.transport.server import CoordinatorServer
from coordinator.wire import Ack, Say, Tell, decode_answer, encode

OPTIONS = CoordinatorOptions(heartbeat_s=0.2, lease_s=60, start_deadline_s=20, stop_deadline_s=1)
PATIENCE_S = 60.0


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it holds. Raises AssertionError after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


class Leaping:
    """A coordinator's clock: time as it goes, and what a test adds to it. With a lease that no machine is too slow for,
    its end comes when the test says so."""

    LEASE_S = 3600.0

    def __init__(self) -> None:
        self._added_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._added_s

    def settle(self, service: CoordinatorService) -> None:
        """The lease of those who were there before passes, in steps after which every worker is heard again: nobody has
        been silent for as long."""
        while service.status().settling:
            self._added_s += self.LEASE_S / 4
            eventually(lambda: all(worker.silent_s < self.LEASE_S / 8 for worker in service.status().workers))


@contextmanager
def served(
    options: CoordinatorOptions = OPTIONS,
    *,
    keys: ServerKeys | None = None,
    members: Collection[str] | None = None,
    term: int = 1,
) -> Iterator[CoordinatorServer]:
    """The machine behind a socket, without an admin service."""
    server = CoordinatorServer(Machine(options, term=term), "tcp://127.0.0.1:*", keys=keys, members=members)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def worker(
    endpoint: str,
    name: str,
    options: CoordinatorOptions = OPTIONS,
    *,
    keys: ClientKeys | None = None,
    on_command: Callable[[Command], None] | None = None,
) -> Iterator[WorkerClient]:
    client = WorkerClient(endpoint, Identity(name, 1, "n0", "g"), options, keys=keys, on_command=on_command)
    try:
        yield client
    finally:
        client.close()


def states(server: CoordinatorServer) -> dict[str, str]:
    """By worker: its state, and what it does in it."""
    with server.hub() as (hub, _):
        return {w.name: f"{w.state} {w.phase or ''}".strip() for w in hub.machine.roster}


def train_command(client: WorkerClient, members: int = 1) -> Train:
    """The next command, which must be to train, among so many. One among fewer is obeyed: another has left, or not yet
    come. Of several the last counts."""
    while True:
        *_, command = client.poll(PATIENCE_S)
        assert isinstance(command, Train)
        if len(command.members) >= members:
            return command
        client.started(command.session, command.epoch, "h0:7")


class Raw:
    """A bare DEALER: says what it is told to, and hears every answer."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.apply(self._socket)
        self._socket.connect(endpoint)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send(self, *frames: bytes) -> None:
        """Lost if the coordinator has turned the connection down."""
        with suppress(zmq.Again):
            self._socket.send_multipart(list(frames), zmq.NOBLOCK)

    def say(self, say: Say) -> None:
        self.send(encode(say))

    def answer(self, timeout_s: float = PATIENCE_S) -> Ack | Tell | None:
        """None: no answer within `timeout_s`."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        return decode_answer(self._socket.recv())
