"""A Machine behind a ZeroMQ ROUTER socket, in one thread. Owns sockets, the clock, request numbers and re-sending.

Messages are safe to repeat: a number that was heard is acknowledged again and not applied again; a lower one is a
replay and is counted. Commands that are owed an answer are sent again until it comes or the machine gives the worker
up. A frame that cannot be read, is too long, or speaks for another worker than its connection is dropped and counted.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from coordinator.events import (
    Changed,
    Command,
    ControlEvent,
    Event,
    Join,
    Lead,
    Lost,
    Register,
    Stop,
    Tick,
    WorkerEvent,
)
from coordinator.machine import IllegalTransitionError, Machine
from coordinator.transport.security import ServerKeys, secure_server
from coordinator.wire import MAX_FRAME_BYTES, Ack, BadFrameError, Say, Tell, decode_say, encode

RESEND_S = 0.25
Watcher = Callable[[Command], None]


@dataclass(slots=True)
class _Peer:
    """What a connection has said so far."""

    incarnation: int = -1
    number: int = -1
    error: str = ""  # of the last one


class CoordinatorServer:
    """Serves `machine` until `close`. Everything but the constructor's arguments lives on its thread.

    endpoint: e.g. tcp://0.0.0.0:* (any port: see `endpoint`). keys: CURVE with an allow-list; None: unencrypted, for
    loopback and private networks. watcher is called on the server's thread with Changed and Lost, and must not block.
    """

    def __init__(
        self,
        machine: Machine,
        endpoint: str,
        *,
        keys: ServerKeys | None = None,
        watcher: Watcher = lambda command: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine, self._watcher, self._clock = machine, watcher, clock
        self.counts: Counter[str] = Counter()  # frames by fate: heard, repeated, replayed, malformed, ...
        self._peers: dict[bytes, _Peer] = {}
        self._owed: dict[str, tuple[Command, float]] = {}  # by worker: what to send again, and when
        self._resend_at_s = math.inf  # none of them is due before
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        self._context = zmq.Context()
        self._guard = secure_server(self._context, keys) if keys is not None else None
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that comes again takes its name over
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.apply(self._router)
        self._router.bind(endpoint)
        self.endpoint = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._wake_to = self._context.socket(zmq.PAIR)
        self._wake_from = self._context.socket(zmq.PAIR)
        self._wake_from.bind("inproc://wake")
        self._wake_to.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)
        self._thread.start()

    def control(self, event: ControlEvent, timeout_s: float = 5.0) -> None:
        """Apply an event of the driver or of an administrator. Raises what the machine raises; TimeoutError."""
        self.call(lambda: self._apply(event), timeout_s)

    def call(self, function: Callable[[], object], timeout_s: float = 5.0) -> object:
        """Run `function` on the server's thread, where the machine may be read, and return what it returns."""
        future: Future[object] = Future()
        self._calls.put((function, future))
        self._wake()
        return future.result(timeout_s)

    def close(self) -> None:
        """Stop serving. Workers go on decoding; they notice by missing acknowledgements."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._wake()
            self._thread.join(5.0)

    def _wake(self) -> None:
        with self._wake_lock:
            self._wake_to.send(b"")

    # On the thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_from, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._patience_ms()))
                if self._wake_from in ready:
                    self._wake_from.recv()
                    if not self._run_calls():
                        return
                if self._router in ready:
                    self._receive_all()
                self._on_time()
        finally:
            for socket in (self._router, self._wake_from, self._wake_to):
                socket.close()
            if self._guard is not None:
                self._guard.stop()
            self._context.term()

    def _patience_ms(self) -> int:
        due_s = min(self.machine.next_deadline_s, self._resend_at_s, self._clock() + 1.0)
        return max(0, int((due_s - self._clock()) * 1000) + 1)

    def _run_calls(self) -> bool:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return True
            if call is None:
                return False
            function, future = call
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _receive_all(self) -> None:
        """What has come, but not for ever: time must pass for the others too."""
        for _ in range(256):
            try:
                frames: list[bytes] = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.counts["malformed"] += 1
            return
        identity, frame = frames
        try:
            say = decode_say(frame)
        except BadFrameError:
            self.counts["malformed"] += 1
            return
        name = identity.decode("utf-8", "replace")
        event = say.event
        if isinstance(event, WorkerEvent) and event.worker != name:
            self.counts["impostor"] += 1
            return
        if not isinstance(event, WorkerEvent):
            self.counts["unauthorised"] += 1  # control comes from this process only, or by the admin service
            return
        error = self._hear(identity, say, event)
        if error is not None:
            self._send(identity, Ack(say.number, self.machine.term, error))

    def _hear(self, identity: bytes, say: Say, event: WorkerEvent) -> str | None:
        """What to acknowledge with ("": fine), or None for silence."""
        peer = self._peers.setdefault(identity, _Peer())
        if event.incarnation > peer.incarnation and isinstance(event, Register):
            peer.incarnation, peer.number = event.incarnation, -1
        if event.incarnation == peer.incarnation and say.number <= peer.number:
            self.counts["repeated" if say.number == peer.number else "replayed"] += 1
            return peer.error if say.number == peer.number else None
        self.counts["heard"] += 1
        try:
            self._apply(event)
            error = ""
        except IllegalTransitionError as illegal:
            self.counts["illegal"] += 1
            error = str(illegal)
        if event.incarnation == peer.incarnation:
            peer.number, peer.error = say.number, error
        return error

    def _apply(self, event: Event) -> None:
        now_s = self._clock()
        commands = self.machine.step(event, now_s)
        touched = {command.worker for command in commands}
        if isinstance(event, WorkerEvent):
            touched.add(event.worker)
        for name in touched & self._owed.keys():
            worker = self.machine.roster.workers.get(name)
            if worker is None or worker.answer_by_s is None:
                del self._owed[name]
        for command in commands:
            if isinstance(command, Changed | Lost):
                self._watcher(command)
            else:
                self._tell(command.worker, command, now_s)

    def _on_time(self) -> None:
        now_s = self._clock()
        if now_s >= self.machine.next_deadline_s:
            self._apply(Tick())
        if now_s >= self._resend_at_s:
            self._resend_at_s = math.inf
            for name, (command, at_s) in list(self._owed.items()):
                if now_s >= at_s:
                    self._tell(name, command, now_s)
                    self.counts["sent again"] += 1
                self._resend_at_s = min(self._resend_at_s, self._owed[name][1])

    def _tell(self, name: str, command: Command, now_s: float) -> None:
        if isinstance(command, Lead | Join | Stop):
            self._owed[name] = (command, now_s + RESEND_S)
            self._resend_at_s = min(self._resend_at_s, now_s + RESEND_S)
        self._send(name.encode(), Tell(command))

    def _send(self, identity: bytes, message: Ack | Tell) -> None:
        self._router.send_multipart([identity, encode(message)])
