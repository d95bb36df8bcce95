"""A worker's end of the coordinator's socket, in one thread. Owns numbering, repeats, heartbeats and stale commands.

Nothing that decodes waits for it: `say` returns at once, and a coordinator that does not answer changes nothing but
`connected`. Commands arrive on the thread, one at a time; those of an older term, or sent again, are dropped.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

from coordinator.events import Command, Heartbeat, Join, Lead, Members, Register, Reregister, Stop, WorkerEvent
from coordinator.transport.security import ClientKeys
from coordinator.wire import Ack, BadFrameError, Say, decode_answer, encode

REPEAT_S = 0.25
SILENCE_S = 3.0  # without an acknowledgement: not connected


class CoordinatorClient:
    """Connects `name` to the coordinator at `endpoint`.

    registration() tells what the worker is now; it is sent first, and whenever the coordinator asks for it. on_command
    is called on the client's thread with Lead, Join, Members and Stop, and must return at once.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        endpoint: str,
        registration: Callable[[int], Register],
        on_command: Callable[[Command], None],
        *,
        keys: ClientKeys | None = None,
        heartbeat_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._incarnation, self._clock = name, incarnation, clock
        self._registration, self._on_command, self._heartbeat_s = registration, on_command, heartbeat_s
        self.term = 0
        self._number = 0
        self._unacked: deque[Say] = deque()
        self._heard_s = -SILENCE_S
        self._done: tuple[object, ...] | None = None  # the last command, so that its repetition is known
        self._inbox: SimpleQueue[WorkerEvent | None] = SimpleQueue()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, name.encode())
        self._dealer.setsockopt(zmq.LINGER, 200)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if keys is not None:
            keys.apply(self._dealer)
        self._dealer.connect(endpoint)
        self._wake_to = self._context.socket(zmq.PAIR)
        self._wake_from = self._context.socket(zmq.PAIR)
        self._wake_from.bind("inproc://wake")
        self._wake_to.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self.say(registration(0))
        self._thread = threading.Thread(target=self._serve, name=f"{name}-coordinator", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """The coordinator has answered lately."""
        return self._clock() - self._heard_s < SILENCE_S

    def say(self, event: WorkerEvent) -> None:
        """Send an event, in order, again and again until it is heard. Never blocks, never raises."""
        self._inbox.put(event)
        with self._wake_lock:
            self._wake_to.send(b"")

    def close(self) -> None:
        """Send what is waiting, once, and end."""
        if self._thread.is_alive():
            self._inbox.put(None)
            with self._wake_lock:
                self._wake_to.send(b"")
            self._thread.join(5.0)

    # On the thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wake_from, zmq.POLLIN)
        beat_s, repeat_s = self._clock() + self._heartbeat_s, float("inf")
        try:
            while True:
                now_s = self._clock()
                due_s = min(beat_s, repeat_s if self._unacked else beat_s)
                ready = dict(poller.poll(max(0, int((due_s - now_s) * 1000) + 1)))
                now_s = self._clock()
                if self._wake_from in ready:
                    self._wake_from.recv()
                    if not self._send_waiting():
                        return
                    repeat_s = now_s + REPEAT_S
                if self._dealer in ready and self._receive_all():
                    repeat_s = now_s + REPEAT_S
                if now_s >= beat_s:
                    self._send(Heartbeat(self._name, self._incarnation))
                    beat_s = now_s + self._heartbeat_s
                if self._unacked and now_s >= repeat_s:
                    for say in self._unacked:
                        self._dealer.send(encode(say), zmq.NOBLOCK)
                    repeat_s = now_s + REPEAT_S
        finally:
            for socket in (self._dealer, self._wake_from, self._wake_to):
                socket.close()
            self._context.term()

    def _send_waiting(self) -> bool:
        while True:
            try:
                event = self._inbox.get_nowait()
            except Empty:
                return True
            if event is None:
                return False
            self._send(event)

    def _send(self, event: WorkerEvent) -> None:
        if isinstance(event, Heartbeat) and self._unacked:
            return  # what is repeated is a sign of life already
        say = Say(self._number, event)
        self._number += 1
        self._unacked.append(say)
        try:
            self._dealer.send(encode(say), zmq.NOBLOCK)
        except zmq.Again:
            pass  # Repeated later.

    def _receive_all(self) -> bool:
        progressed = False
        while True:
            try:
                message = decode_answer(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return progressed
            except BadFrameError:
                continue
            self._heard_s = self._clock()
            if isinstance(message, Ack):
                while self._unacked and self._unacked[0].number <= message.number:
                    self._unacked.popleft()
                    progressed = True
            else:
                self._obey(message.command)

    def _obey(self, command: Command) -> None:
        if not isinstance(command, Lead | Join | Members | Stop | Reregister) or command.term < self.term:
            return
        if command.term > self.term:
            self.term, self._done = command.term, None
        if isinstance(command, Reregister):
            self._unacked.clear()  # all of it was said to a coordinator that is gone
            self._send(self._registration(self.term))
            return
        key = (type(command), command.session, getattr(command, "epoch", 0))
        if key != self._done:
            self._done = key
            self._on_command(command)
