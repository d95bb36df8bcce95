"""Many workers of a coordinator in one process: real connections, the real worker's code, no trainers.

    with Swarm(endpoint, workers=256, options=options) as swarm:
        swarm.idle()
        swarm.round_trips()      # seconds by kind of message, since the last call

A worker starts and stops training at once on command. Owns the child process, not the measurements.
"""

import contextlib
import multiprocessing
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import zmq

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Train
from coordinator.member import Identity, Member
from coordinator.wire import Ack, Say, decode_answer, encode

_TICK_S = 0.01
_NOBLOCK = int(zmq.NOBLOCK)


class Swarm:
    """`workers` connections to `endpoint`, from a separate process. They begin BUSY, in one group."""

    def __init__(self, endpoint: str, workers: int, options: CoordinatorOptions) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far_end = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(endpoint, workers, options, far_end), daemon=True)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.send("end")
        self._process.join(20)
        self._process.kill()

    def idle(self) -> None:
        """Report every worker as idle. Returns when all have."""
        self._ask("idle")

    def round_trips(self) -> dict[str, list[float]]:
        """Return seconds from a message to its acknowledgement, by kind of message."""
        return dict(self._ask("round trips"))

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()


class _Worker:
    def __init__(self, context: zmq.Context[Any], endpoint: str, name: str, options: CoordinatorOptions) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.member = Member(Identity(name, 1, "n0", "all"), options, time.monotonic())
        self.said: dict[int, tuple[float, Say]] = {}
        self.due_s = self.member.due_s

    def send(self) -> None:
        for say in self.member.take():
            self.said.setdefault(say.number, (time.monotonic(), say))
            with contextlib.suppress(zmq.Again):
                self.socket.send(encode(say), _NOBLOCK)
        self.due_s = self.member.due_s

    def receive(self, round_trips: dict[str, list[float]]) -> None:
        """Receive one message. Another worker may have waited longer than this one's next message."""
        message = decode_answer(self.socket.recv(_NOBLOCK))
        now_s = time.monotonic()
        self.member.hear(message, now_s)
        if isinstance(message, Ack):
            if message.number in self.said:
                said_s, say = self.said.pop(message.number)
                round_trips[type(say.event).__name__].append(now_s - said_s)
            return
        for command in self.member.commands():
            if isinstance(command, Train):
                self.member.started(command.session, command.epoch, "h:1", now_s)
            else:
                self.member.stopped(command.session, now_s)
        self.send()


def _run(endpoint: str, workers: int, options: CoordinatorOptions, pipe: Connection) -> None:
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, workers + 16)
    swarm = [_Worker(context, endpoint, f"w{i:04}", options) for i in range(workers)]
    by_socket = {worker.socket: worker for worker in swarm}
    poller = zmq.Poller()
    poller.register(pipe.fileno(), zmq.POLLIN)
    for worker in swarm:
        poller.register(worker.socket, zmq.POLLIN)
    round_trips: dict[str, list[float]] = defaultdict(list)
    tick_at_s = 0.0
    while True:
        for ready, _ in poller.poll(round(_TICK_S * 1000)):
            if isinstance(ready, zmq.Socket):
                by_socket[ready].receive(round_trips)
        now_s = time.monotonic()
        if now_s >= tick_at_s:
            tick_at_s = now_s + _TICK_S
            for worker in swarm:
                if now_s >= worker.due_s:
                    worker.member.tick(now_s)
                    worker.send()
        if pipe.poll():
            asked = pipe.recv()
            if asked == "end":
                context.destroy(0)
                return
            if asked == "round trips":
                pipe.send(dict(round_trips))
                round_trips.clear()
                continue
            for worker in swarm:
                worker.member.idle(now_s)
                worker.send()
            pipe.send(asked)
