"""The coordinator's end of all links, around the machine. Owns who may say what, acknowledgements, and re-sending.

No sockets, clock or threads: what a peer says comes in by `hear`, what is to be sent goes out by `take`. A command that
is owed an answer is sent again until the machine has it, or has given the worker up.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection

from coordinator.events import Changed, Command, ControlEvent, Event, Notice, Reregister, Stop, Tick, Train, WorkerEvent
from coordinator.link import Fate, Inlink
from coordinator.machine import IllegalTransitionError, Machine
from coordinator.wire import DRIVER, Ack, Say, Tell, speaker

RESEND_S = 0.25
MAX_PEERS = 8192  # names remembered where any is admitted


class Hub:
    """watch is called with every notice, in order. members: the workers that may register; None: any, to a bound."""

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
        self._owed: dict[str, tuple[Train | Stop, float]] = {}  # by worker: what to send again, and when
        self._resend_at_s = math.inf  # none of them is due before
        self._out: list[tuple[str, Ack | Tell]] = []

    @property
    def next_deadline_s(self) -> float:
        return min(self.machine.next_deadline_s, self._resend_at_s)

    def take(self) -> list[tuple[str, Ack | Tell]]:
        """What is to be sent, by peer."""
        out, self._out = self._out, []
        return out

    def hear(self, peer: str, say: Say, now_s: float) -> Fate:
        """A message of whoever may speak as `peer`. Never raises: what is wrong with it is counted."""
        event = say.event
        if (
            not peer
            or speaker(say) != peer
            or (isinstance(event, WorkerEvent) and event.incarnation != say.incarnation)
        ):
            self.counts[Fate.IMPOSTOR.value] += 1
            return Fate.IMPOSTOR
        if not self._admits(peer):
            self.counts[Fate.STRANGER.value] += 1
            return Fate.STRANGER
        link = self._links.get(peer) or Inlink()
        fate = link.judge(say)
        self.counts[fate.value] += 1
        first = len(self._out)
        if fate is Fate.NEW:
            self._links[peer] = link
            link.take(say)  # first: the commands that follow have heard it
            try:
                self._apply(event, now_s)
            except IllegalTransitionError as illegal:
                self.counts["illegal"] += 1
                link.error = str(illegal)
            if isinstance(event, WorkerEvent) and peer not in self.machine.roster.workers:
                link.close()
        if fate in (Fate.NEW, Fate.REPEATED):  # acknowledged before anything else is asked of it
            self._out.insert(first, (peer, Ack(say.incarnation, say.number, self.machine.term, link.error)))
        elif fate is Fate.UNOPENED:
            self._out.append((peer, Tell(Reregister(peer, self.machine.term), say.incarnation, say.number)))
        return fate

    def _admits(self, peer: str) -> bool:
        """Whoever reaches the port chooses names: each that is heard costs memory, and a row of every status."""
        if peer == DRIVER or peer in self._links:
            return True
        return peer in self._members if self._members is not None else len(self._links) < MAX_PEERS

    def admit(self, peer: str) -> None:
        """This one may register too, from now on."""
        if self._members is not None:
            self._members.add(peer)

    def control(self, event: ControlEvent, now_s: float) -> None:
        """An event of this process. Raises UnknownTargetError."""
        self._apply(event, now_s)

    def tick(self, now_s: float) -> None:
        """To be called at `next_deadline_s`; harmless at any time."""
        if now_s >= self.machine.next_deadline_s:
            self._apply(Tick(), now_s)
        if now_s < self._resend_at_s:
            return
        self._resend_at_s = math.inf
        for name, (command, at_s) in list(self._owed.items()):
            worker = self.machine.roster.workers.get(name)
            if worker is None or worker.answer_by_s is None:
                del self._owed[name]
            elif now_s >= at_s:
                self.counts["sent again"] += 1
                self._tell(command, now_s)
            else:
                self._resend_at_s = min(self._resend_at_s, at_s)

    def _apply(self, event: Event, now_s: float) -> None:
        for output in self.machine.step(event, now_s):
            if isinstance(output, Command):
                self._tell(output, now_s)
                continue
            if isinstance(output, Changed) and not output.after and output.worker in self._links:
                self._links[output.worker].close()
            self._watch(output)

    def _tell(self, command: Command, now_s: float) -> None:
        name = command.worker
        if not isinstance(command, Reregister):
            self._owed[name] = (command, now_s + RESEND_S)
            self._resend_at_s = min(self._resend_at_s, now_s + RESEND_S)
        link = self._links[name]  # the machine knows whom it has heard only
        self._out.append((name, Tell(command, link.incarnation, link.number)))
