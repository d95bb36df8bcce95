"""A Hub behind a ZeroMQ ROUTER socket, in one thread. Owns the socket and the clock, and handles invalid frames.

Frames that are unreadable, too long, or from a peer whose key does not allow the name are dropped and counted. So are
connections that fail the handshake. Beyond HARD_LIMIT_BYTES the library closes the connection before it reads.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

from contracts.coordinator import ControlEvent, Notice
from coordinator.hub import Hub
from coordinator.link import Fate
from coordinator.machine import Machine
from coordinator.transport.security import ServerKeys, authenticator
from coordinator.transport.waker import Waker
from coordinator.wire import (
    MAX_FRAME_BYTES,
    Ack,
    AnswerEncoder,
    BadFrameError,
    OversizedFrameError,
    Tell,
    decode_say,
    speaker,
)

_log = logging.getLogger(__name__)
HARD_LIMIT_BYTES = 16 * MAX_FRAME_BYTES
_BATCH = 64  # messages received before the next check of time and output
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_KNOWN = (Fate.NEW, Fate.REPEATED, Fate.UNOPENED)


class CoordinatorServer:
    """Serves `machine` until `close`, on a thread of its own. Others use its hub by `hub`.

    bind: e.g. tcp://127.0.0.1:* (any port: see `endpoint`). keys: CURVE with an allow-list; None: unencrypted, for
    loopback and private networks. members: as in Hub. watch is called on the thread with every notice, and must not
    block. on_failure is called there if a bug ends the thread; its state is then lost and a successor rebuilds it.
    """

    def __init__(
        self,
        machine: Machine,
        bind: str,
        *,
        keys: ServerKeys | None = None,
        members: Collection[str] | None = None,
        watch: Callable[[Notice], None] = lambda notice: None,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._keys = Hub(machine, watch, members), keys
        self._clock, self._on_failure = clock, on_failure
        self._encoder = AnswerEncoder()
        self._routes: dict[str, bytes] = {}  # by peer: its latest connection
        self._lock = threading.Lock()  # of the hub
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = authenticator(self._context, keys) if keys is not None else None
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
        self._router.setsockopt(zmq.BACKLOG, 4096)
        self._router.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.apply(self._router)
        self._monitor = self._router.get_monitor_socket(_HANDSHAKE_FAILED)
        try:
            self._router.bind(bind)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise OSError(error.errno, f"cannot listen for workers on {bind}: {error}") from None
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def control(self, event: ControlEvent, timeout_s: float = 5.0) -> None:
        """Apply an event of the driver or of an administrator. Raises UnknownTargetError, and as `hub`."""
        with self.hub(timeout_s) as (hub, now_s):
            hub.control(event, now_s)

    @contextmanager
    def hub(self, timeout_s: float = 5.0) -> Iterator[tuple[Hub, float]]:
        """Give the block the hub, and the time by the server's clock. What the block leaves to send is sent at once.
        Raises TimeoutError, and ConnectionError once the server is closed."""
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError(f"the coordinator was busy for {timeout_s:g} s")
        try:
            if not self._thread.is_alive():
                raise ConnectionError("the coordinator has been closed")
            try:
                yield self._hub, self._clock()
            finally:
                self._waker.wake()
        finally:
            self._lock.release()

    def counts(self) -> Counter[str]:
        """Return the numbers of messages and connections by fate."""
        with self.hub() as (hub, _):
            return Counter(hub.counts)

    def close(self) -> None:
        """Stop serving. Workers continue to decode; training workers stop within their lease."""
        if self._thread.is_alive():
            self._closing = True
            self._waker.wake()
            self._thread.join(5.0)

    # On the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _log.exception("the coordinator's thread has ended")
            self._on_failure()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._monitor, self._waker.fd):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                with self._lock:
                    wait_s = max(0.0, self._hub.next_deadline_s - self._clock())
                ready = dict(poller.poll(None if wait_s == math.inf else math.ceil(wait_s * 1000)))
                if self._waker.fd in ready:
                    self._waker.clear()
                    if self._closing:
                        return
                with self._lock:
                    if self._monitor in ready:
                        recv_monitor_message(self._monitor)
                        self._hub.counts["unauthenticated" if self._keys else "bad handshake"] += 1
                    if self._router in ready:
                        self._receive()
                    self._hub.tick(self._clock())
                    messages = self._hub.take(self._clock())
                for peer, message in messages:
                    self._send(peer, message)
        finally:
            self._close_sockets()
            self._waker.close()

    def _receive(self) -> None:
        """Receive pending messages, up to a bound that keeps deadlines."""
        counts = self._hub.counts
        for _ in range(_BATCH):
            try:
                route, key, frames = self._next()
            except zmq.Again:
                return
            if len(frames) != 1:
                counts["malformed"] += 1
                continue
            try:
                say = decode_say(frames[0])
            except OversizedFrameError:
                counts["oversized"] += 1
                continue
            except BadFrameError:
                counts["malformed"] += 1
                continue
            peer = speaker(say)
            if self._keys is not None and not self._keys.admits(key, peer):
                counts[Fate.IMPOSTOR.value] += 1
            elif self._hub.hear(peer, say, self._clock()) in _KNOWN:
                self._routes[peer] = route

    def _next(self) -> tuple[bytes, str, list[bytes]]:
        """Return a message: its connection, its sender's key (empty without CURVE), its frames. Raises zmq.Again."""
        if self._keys is None:
            route, *frames = self._router.recv_multipart(_NOBLOCK)
            return route, "", frames
        first, *rest = self._router.recv_multipart(_NOBLOCK, copy=False)
        return first.bytes, str(rest[0].get("User-Id")) if rest else "", [frame.bytes for frame in rest]

    def _send(self, peer: str, message: Ack | Tell) -> None:
        """Send a message. It is dropped if the peer is unknown or the queue is full."""
        if route := self._routes.get(peer):
            self._router.send(route, _MORE)
            self._router.send(self._encoder.encode(message), _NOBLOCK)

    def _close_sockets(self) -> None:
        self._router.disable_monitor()
        self._monitor.close()
        self._router.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
