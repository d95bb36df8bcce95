"""The coordinator's socket at a worker or the driver, in one thread. Owns the socket, the clock and the lock.

Decoding never blocks here: reports return at once, and a coordinator that does not answer changes only `connected`.
Reconnecting, repeating and heartbeats need no call.

    client = WorkerClient(endpoint, Identity("rollout-0", incarnation=time.time_ns(), node=ip), options)
    client.idle()                                  # out of work, memory released
    for command in client.poll(timeout_s=0.1):     # or on_command=..., called on the client's thread
        match command:
            case Train(): trainer.start(...)       # and, when it runs: client.started(session, epoch, store)
            case Stop(): trainer.stop()            # and, when it has stopped: client.stopped(session)
    client.busy(running=3)                         # from here on no Train is delivered until idle()
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import zmq

from config.coordinator import CoordinatorOptions
from contracts.coordinator import DriverEvent, RolloutComplete, RolloutStarted, State, Stop, Train
from coordinator.driver import Driver
from coordinator.member import Identity, Member
from coordinator.transport.security import ClientKeys
from coordinator.transport.waker import Waker
from coordinator.wire import DRIVER, MAX_FRAME_BYTES, Ack, BadFrameError, Tell, decode_answer, encode

Command = Train | Stop
Clock = Callable[[], float]


E = TypeVar("E", bound=Driver | Member)


class _Connection(Generic[E]):
    """Runs one end of a link. `_end` is accessed only with `_lock` held."""

    def __init__(self, name: str, end: E, endpoint: str, keys: ClientKeys | None, clock: Clock) -> None:
        self._end, self._clock = end, clock
        self._lock = threading.Lock()
        self._closing = False
        self._waker = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 200)
        self._dealer.setsockopt(zmq.IMMEDIATE, 1)  # queues nothing while the coordinator is unreachable
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
        if keys is not None:
            keys.apply(self._dealer)
        self._dealer.connect(endpoint)
        self._thread = threading.Thread(target=self._serve, name=f"{name}-coordinator", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether the coordinator has acknowledged a message lately."""
        with self._lock:
            return self._end.connected(self._clock())

    def close(self) -> None:
        """Send pending messages if possible at once, and end the thread."""
        self._closing = True
        self._waker.wake()
        self._thread.join(5.0)

    def _deliver(self) -> None:
        """Called on the thread after a message or a timeout."""

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while True:
                closing = self._closing
                with self._lock:
                    self._end.tick(self._clock())
                    says, due_s = self._end.take(), self._end.due_s
                for say in says:
                    with contextlib.suppress(zmq.Again):  # not connected: repeated later
                        self._dealer.send(encode(say), zmq.NOBLOCK)
                if closing:
                    return
                self._deliver()
                wait_s = due_s - self._clock()
                ready = dict(poller.poll(None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))))
                if self._waker.fd in ready:
                    self._waker.clear()
                if self._dealer in ready:
                    self._receive()
        finally:
            self._dealer.close()
            self._context.term()
            self._waker.close()

    def _receive(self) -> None:
        messages: list[Ack | Tell] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < 1000:
                with contextlib.suppress(BadFrameError):
                    messages.append(decode_answer(self._dealer.recv(zmq.NOBLOCK)))
        with self._lock:
            now_s = self._clock()
            for message in messages:
                self._end.hear(message, now_s)


class WorkerClient(_Connection[Member]):
    """A worker's client. Thread-safe; every method but `poll` and `close` returns at once, and none raises.

    It starts BUSY. on_command: called on the client's thread with Train and Stop, must return at once; without it,
    `poll` returns them. Only the last of several Train commands counts. The client itself issues a Stop if the
    coordinator has been silent for nearly a lease. The receiver of a Stop kills any trainer still running after
    `within_s`.
    """

    def __init__(
        self,
        endpoint: str,
        identity: Identity,
        options: CoordinatorOptions,
        *,
        keys: ClientKeys | None = None,
        on_command: Callable[[Command], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._on_command = on_command
        self._arrived = threading.Condition()
        super().__init__(identity.name, Member(identity, options, clock()), endpoint, keys, clock)

    @property
    def state(self) -> State:
        with self._lock:
            return self._end.state

    @property
    def error(self) -> str:
        """Why the coordinator refused a report; empty for a worker with valid transitions."""
        with self._lock:
            return self._end.error

    def busy(self, running: int = 1) -> None:
        """Report new work; a running trainer has stopped. running: number of requests, may change from call to call."""
        with self._reporting() as now_s:
            self._end.busy(running, now_s)

    def idle(self) -> None:
        """Report that nothing is left to decode and memory is released."""
        with self._reporting() as now_s:
            self._end.idle(now_s)

    def started(self, session: int, epoch: int, store: str = "") -> None:
        """Answer Train. store: host:port of its rendezvous store, if it leads and others may join."""
        with self._reporting() as now_s:
            self._end.started(session, epoch, store, now_s)

    def stopped(self, session: int) -> None:
        """Report that the trainer has stopped and its memory is free, after a Stop or by itself."""
        with self._reporting() as now_s:
            self._end.stopped(session, now_s)

    def trainer_failed(self, session: int, reason: str) -> None:
        """Report that the trainer has ended with an error; the worker is healthy."""
        with self._reporting() as now_s:
            self._end.trainer_failed(session, reason, now_s)

    def progress(self, *, running: int = 0, step: int = 0) -> None:
        """Note the trainer's progress for `paceline status`; the next heartbeat carries it."""
        with self._lock:
            self._end.running, self._end.step = running, step

    def poll(self, timeout_s: float = 0.0) -> list[Command]:
        """Return the valid commands, oldest first. Waits at most `timeout_s` for the first one."""
        deadline_s = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                with self._lock:
                    commands = self._end.commands()
                wait_s = deadline_s - time.monotonic()
                if commands or wait_s <= 0:
                    return commands
                self._arrived.wait(wait_s)

    def close(self) -> None:
        """Report Leave, and end the thread."""
        with self._reporting() as now_s:
            self._end.leave(now_s)
        super().close()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[float]:
        """Hold the lock for a report at the yielded time; then wake the client's thread to send it."""
        with self._lock:
            yield self._clock()
        self._waker.wake()

    def _deliver(self) -> None:
        if self._on_command is None:
            with self._arrived:
                self._arrived.notify_all()
            return
        with self._lock:
            commands = self._end.commands()
        for command in commands:
            self._on_command(command)


class DriverClient(_Connection[Driver]):
    """The driver's client. Thread-safe; every method returns at once. The last report is repeated as a heartbeat."""

    def __init__(
        self,
        endpoint: str,
        incarnation: int,
        options: CoordinatorOptions,
        *,
        keys: ClientKeys | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(DRIVER, Driver(incarnation, options, clock()), endpoint, keys, clock)

    def rollout_started(self, step: int, *, train: bool = True) -> None:
        """Report a rollout. train: whether to train the drafter in its tail."""
        self._report(RolloutStarted(step, train))

    def rollout_complete(self, step: int) -> None:
        """Report that nothing is left to sample: training ends now."""
        self._report(RolloutComplete(step))

    def _report(self, state: DriverEvent) -> None:
        with self._lock:
            self._end.report(state, self._clock())
        self._waker.wake()
