"""The coordinator's end of all links, around the machine: which peer may send what, acknowledgements, repetition.

No sockets, clock or threads: received messages enter by `hear`, `tick` processes them, and `take` returns the messages
to send. A command is repeated until it is answered or the worker is lost.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice

from contracts.coordinator import Changed, Command, ControlEvent, Notice, Output, Reregister, Stop, Train, WorkerMessage
from coordinator.link import Fate, Inlink
from coordinator.machine import IllegalTransitionError, Machine
from coordinator.wire import DRIVER, Ack, Say, Tell, speaker

RESEND_S = 0.25
# Members of a large session receive their commands in bursts: all of them answer, and other messages would queue behind
# all the answers. 256 members take 16 ms, less than a micro-step.
BURST, BURST_S = 16, 0.001
MAX_PEERS = 8192  # names remembered if any name is admitted


class Hub:
    """All links of one coordinator.

    watch is called with every notice, in order. members: workers that may register; None: any, up to a bound.
    """

    def __init__(
        self,
        machine: Machine,
        watch: Callable[[Notice], None] = lambda notice: None,
        members: Collection[str] | None = None,
    ) -> None:
        self.machine, self._watch = machine, watch
        self._members = None if members is None else set(members)
        self.counts: Counter[str] = Counter()  # messages by fate: heard, repeated, replayed, impostor, ...
        self._links: dict[str, Inlink] = {}
        self._owed: dict[str, tuple[Train | Stop, float]] = {}  # by worker: what to repeat, and when; soonest first
        self._out: list[tuple[str, Ack | Tell]] = []
        self._commands: dict[str, Tell] = {}  # by worker, sent after `_out`: a newer command voids an older one
        self._next_burst_s = -math.inf  # when the next burst of commands may be sent
        self._unsettled = False  # the machine has unprocessed events

    @property
    def next_deadline_s(self) -> float:
        if self._unsettled or self._out:
            return -math.inf
        return min(self.machine.next_deadline_s, self._resend_at_s, self._next_burst_s if self._commands else math.inf)

    @property
    def _resend_at_s(self) -> float:
        return next(iter(self._owed.values()))[1] if self._owed else math.inf

    def take(self, now_s: float) -> list[tuple[str, Ack | Tell]]:
        """Return the messages to send now, by peer: all acknowledgements, then one burst of commands."""
        out, self._out = self._out, []
        if self._commands and now_s >= self._next_burst_s:
            self._next_burst_s = now_s + BURST_S
            for name in list(islice(self._commands, BURST)):
                tell = self._commands.pop(name)
                if self._owes(name):
                    out.append((name, tell))
        return out

    def _owes(self, name: str) -> bool:
        """Return whether the worker's answer is still due; it may be busy or lost since."""
        worker = self.machine.roster.workers.get(name)
        return worker is not None and worker.answer_by_s is not None

    def hear(self, peer: str, say: Say, now_s: float) -> Fate:
        """Receive a message from a sender that may speak as `peer`. Never raises: faults are counted."""
        event = say.event
        of_worker = isinstance(event, WorkerMessage)
        if not peer or speaker(say) != peer or (of_worker and event.incarnation != say.incarnation):  # type: ignore[union-attr]
            self.counts[Fate.IMPOSTOR.value] += 1
            return Fate.IMPOSTOR
        if not self._admits(peer):
            self.counts[Fate.STRANGER.value] += 1
            return Fate.STRANGER
        link = self._links.get(peer) or Inlink()
        fate = link.judge(say)
        self.counts[fate.value] += 1
        if fate is Fate.NEW:
            self._links[peer] = link
            link.take(say)  # first: the resulting commands must acknowledge it
            outputs: list[Output] = []
            try:
                outputs = self.machine.take(event, now_s)
                self._unsettled = True
            except IllegalTransitionError as illegal:
                self.counts["illegal"] += 1
                link.error = str(illegal)
            if of_worker and peer not in self.machine.roster.workers:
                link.close()
            self._out.append((peer, Ack(say.incarnation, say.number, self.machine.term, link.error)))
            self._emit(outputs, now_s)
        elif fate is Fate.REPEATED:
            self._out.append((peer, Ack(say.incarnation, say.number, self.machine.term, link.error)))
        elif fate is Fate.UNOPENED:
            self._out.append((peer, Tell(Reregister(peer, self.machine.term), say.incarnation, say.number)))
        return fate

    def _admits(self, peer: str) -> bool:
        """Return whether this name may register. A sender chooses its name, and each name costs memory and a row of
        every status.
        """
        if peer == DRIVER or peer in self._links:
            return True
        return peer in self._members if self._members is not None else len(self._links) < MAX_PEERS

    def admit(self, peer: str) -> None:
        """Allow another worker to register."""
        if self._members is not None:
            self._members.add(peer)

    def control(self, event: ControlEvent, now_s: float) -> None:
        """Apply an event of this process. Raises UnknownTargetError."""
        self._emit(self.machine.take(event, now_s), now_s)
        self._unsettled = True

    def tick(self, now_s: float) -> None:
        """Do what is due. Call it at `next_deadline_s` and after received messages; other calls have no effect."""
        if self._unsettled or now_s >= self.machine.next_deadline_s:
            self._unsettled = False
            self._emit(self.machine.settle(now_s), now_s)
        while self._owed and now_s >= self._resend_at_s:
            name, (command, _) = next(iter(self._owed.items()))
            if self._owes(name):
                self.counts["sent again"] += 1
                self._tell(command, now_s)
            else:
                del self._owed[name]

    def _emit(self, outputs: list[Output], now_s: float) -> None:
        for output in outputs:
            if isinstance(output, Train | Stop | Reregister):
                self._tell(output, now_s)
                continue
            if isinstance(output, Changed) and not output.after and output.worker in self._links:
                self._links[output.worker].close()
            self._watch(output)

    def _tell(self, command: Command, now_s: float) -> None:
        name = command.worker
        link = self._links[name]  # present: the machine only knows workers it has received messages from
        tell = Tell(command, link.incarnation, link.number)
        if isinstance(command, Reregister):
            self._out.append((name, tell))
            return
        self._owed.pop(name, None)
        self._owed[name] = (command, now_s + RESEND_S)
        self._commands[name] = tell
