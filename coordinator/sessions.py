"""Training sessions: which workers train together. Handles promotion, leadership, membership, epochs and the members'
commands.

A session begins with one worker, its leader, which creates a rendezvous store. All idle workers then join at once;
later ones join when all current members have confirmed. Every change of members is a new epoch, sent to all members. If
the leader leaves, the member that has trained longest becomes leader.
"""

import math

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Changed, Output, Register, SessionChanged, Started, State, Stop, Train
from coordinator.roster import Phase, Roster, Session, Worker


class Sessions:
    """Changes the roster's sessions and worker states, and emits the resulting outputs.

    out: receives the outputs. closed: a predecessor may have running sessions, so no decisions are made yet.
    Sessions are taken over as workers report them, and not changed until `open`.
    """

    def __init__(
        self,
        roster: Roster,
        options: CoordinatorOptions,
        *,
        term: int,
        closed: bool,
        out: list[Output],
    ) -> None:
        self._roster, self._options, self._term = roster, options, term
        self._out = out
        self.due_s = math.inf  # lower bound of the deadlines of its workers, until the machine looks again
        self.closed = closed
        self.epoch = 0
        self._told = 0  # highest epoch sent to any worker
        self.threshold = options.threshold
        self._dirty: dict[str, None] = {}  # groups to check for promotion
        self._changed: dict[str, None] = {}  # groups whose session has a new epoch to send to its members

    # Promotion.

    def touch(self, group: str | None = None) -> None:
        """Note a change in `group` that promotion depends on; None: in all groups."""
        self._dirty |= dict.fromkeys(self._roster.idle) if group is None else {group: None}

    def promote(self, now_s: float, *, willing: bool) -> None:
        """Let idle workers join their group's session, or begin one where enough are idle."""
        groups, self._dirty = self._dirty, {}
        if willing and not self.closed:
            for group in groups:
                self._consider(group, now_s)

    def _consider(self, group: str, now_s: float) -> None:
        if group not in self._roster.idle:
            return
        session = self._roster.sessions.get(group)
        if session is None:
            if self._haunted(group, now_s):
                return
            idle = self._eligible(group, now_s)
            if len(idle) >= self.threshold:
                self.epoch += 1
                session = Session(number=self.epoch, group=group, members={idle[0]: None})
                self._roster.sessions[group] = session
                self._renew(session)
        elif group in self._changed:
            return  # its members first receive the new epoch
        elif (room := self._options.max_members - len(session.members)) > 0 and session.settled(self._roster):
            joining = self._eligible(group, now_s)[:room]
            if joining:
                session.members |= dict.fromkeys(joining)
                self._renew(session)

    def _eligible(self, group: str, now_s: float) -> list[str]:
        """Return idle workers that may train, longest idle first."""
        workers = (self._roster.workers[name] for name in self._roster.idle[group])
        return [w.name for w in workers if not self._roster.drained(w) and now_s >= w.rests_until_s]

    def _haunted(self, group: str, now_s: float) -> bool:
        """Return whether a worker of that group may still train in an older session."""
        return bool(self._roster.stopping.get(group)) or any(
            ghost.group == group and now_s < ghost.until_s for ghost in self._roster.ghosts.values()
        )

    # Membership.

    def confirm(self, worker: Worker, event: Started, now_s: float) -> bool:
        """Note that the worker trains with the members of `event.epoch`. Returns False if that epoch is stale."""
        session = self._roster.session_of(worker)
        if session is None or event.epoch != session.epoch:
            return False
        self._roster.set_phase(worker, Phase.RUNNING)
        worker.answer_by_s = None
        if session.leader == worker.name and session.store is None:
            session.store = event.store
            for name in list(session.members)[1:]:
                follower = self._roster.workers[name]
                if event.store:
                    self._train(follower, session, now_s)
                else:
                    self.stop(follower, "its new leader cannot be joined", now_s)
        self.touch(worker.group)
        return True

    def adopt(self, worker: Worker, event: Register, now_s: float, *, unwelcome: str) -> None:
        """Adopt a worker that reports training in a predecessor's session, or in one from which it was declared lost.

        unwelcome: the reason why it must not train, or empty.
        """
        before = self._detach(worker)
        self._roster.set_phase(worker, Phase.RUNNING)
        worker.session, worker.answer_by_s = event.session, None
        self._set(worker, State.TRAINING, "registered again", now_s)
        self._go_on(before)
        session = self._roster.sessions.get(worker.group)
        if session is not None and session.number != event.session:
            unwelcome = unwelcome or "its group trains in another session"
        if unwelcome:
            self.stop(worker, unwelcome, now_s)
            return
        if session is None:
            session = Session(number=event.session, group=worker.group, members={worker.name: None})
            self._roster.sessions[worker.group] = session
        elif event.leader and session.store is None:
            session.members = {worker.name: None} | session.members
        else:
            session.members[worker.name] = None
        if event.leader and session.leader == worker.name:
            session.store = event.store or None
        if not self.closed:
            self._renew(session)

    def remind(self, worker: Worker) -> None:
        """Repeat the worker's command; deadlines are unchanged."""
        session = self._roster.session_of(worker)
        if session is not None:
            if not self.closed:
                self._renew(session)
        else:
            self._tell_to_stop(worker, "an earlier Stop has had no answer")

    def open(self) -> None:
        """Start to decide: all workers that train have registered, or have stopped by themselves."""
        self.closed = False
        for session in list(self._roster.sessions.values()):
            self._renew(session)
        self.touch()

    def stop(self, worker: Worker, reason: str, now_s: float) -> None:
        """Stop a TRAINING worker, unless a Stop is pending; the others continue without it."""
        if worker.phase is Phase.STOPPING:
            return
        session = self._detach(worker)
        self._roster.set_phase(worker, Phase.STOPPING)
        worker.answer_by_s = now_s + self._options.stop_deadline_s
        self.due_s = min(self.due_s, worker.answer_by_s)
        self._tell_to_stop(worker, reason)
        self._go_on(session)

    def stop_all(self, reason: str, now_s: float) -> None:
        sessions = list(self._roster.sessions.values())
        self._roster.sessions.clear()  # first: no new leader for a session that ends
        for worker in self._roster:
            if worker.state is State.TRAINING:
                self.stop(worker, reason, now_s)
        for session in sessions:
            self._out.append(SessionChanged(session.group, session.number, self.epoch, ()))

    def move(self, worker: Worker, state: State, reason: str, now_s: float) -> None:
        """Set the worker BUSY or IDLE, out of any session."""
        session = self._detach(worker)
        self._roster.set_phase(worker, None)
        worker.session = worker.answer_by_s = None
        self._set(worker, state, reason, now_s)
        self._go_on(session)

    def remove(self, worker: Worker, reason: str) -> None:
        """Remove a worker that has left or is lost."""
        session = self._detach(worker)
        self._roster.remove(worker)
        self._out.append(Changed(worker.name, worker.state, "", reason))
        self.touch(worker.group)
        self._go_on(session)

    def _detach(self, worker: Worker) -> Session | None:
        """Remove the worker from its session; `_go_on` then informs the other members."""
        session = self._roster.session_of(worker)
        if session is not None:
            if session.leader == worker.name:
                session.store = None
            del session.members[worker.name]
        return session

    def _go_on(self, session: Session | None) -> None:
        if session is None:
            return
        if not session.members:
            del self._roster.sessions[session.group]
            self._out.append(SessionChanged(session.group, session.number, self.epoch, ()))
            self.touch(session.group)
            return
        if session.store is None and not self.closed:
            workers = self._roster.workers
            oldest_first = sorted(session.members, key=lambda name: workers[name].phase is not Phase.RUNNING)
            session.members = dict.fromkeys(oldest_first)
        if not self.closed:
            self._renew(session)

    def _renew(self, session: Session) -> None:
        """Start a new epoch: answers about the one before are stale. `announce` sends it to the members."""
        self.epoch += 1
        session.epoch = self.epoch
        self._changed[session.group] = None

    def announce(self, now_s: float) -> None:
        """Send one command to each member of every session that changed since the last call."""
        groups, self._changed = self._changed, {}
        for group in groups:
            session = self._roster.sessions.get(group)
            if session is not None and not self.closed:
                self._tell_members(session, now_s)

    def _tell_members(self, session: Session, now_s: float) -> None:
        """Send the members to the leader, and to the others once the leader's store is known."""
        if session.epoch <= self._told:  # members may have obeyed a later epoch, and would ignore this one
            self.epoch += 1
            session.epoch = self.epoch
        self._told = session.epoch
        members = session.told = tuple(session.members)
        self._out.append(SessionChanged(session.group, session.number, session.epoch, members))
        for name in members:
            worker = self._roster.workers[name]
            if name == session.leader or session.store is not None:
                self._train(worker, session, now_s)
            else:  # it continues unchanged until its new leader has a store
                self._roster.set_phase(worker, Phase.RUNNING)
                worker.answer_by_s = None

    def _train(self, worker: Worker, session: Session, now_s: float) -> None:
        if worker.phase is not Phase.STARTING or worker.answer_by_s is None:  # an outstanding answer gets no more time
            worker.answer_by_s = now_s + self._options.start_deadline_s
            self.due_s = min(self.due_s, worker.answer_by_s)
        worker.session = session.number
        self._roster.set_phase(worker, Phase.STARTING)
        self._set(worker, State.TRAINING, f"session {session.number}", now_s)
        store = "" if worker.name == session.leader else session.store or ""
        self._out.append(Train(worker.name, self._term, session.epoch, session.number, session.told, store))

    def _tell_to_stop(self, worker: Worker, reason: str) -> None:
        assert worker.session is not None
        self.epoch += 1
        self._told = self.epoch
        within_s = self._options.stop_deadline_s
        self._out.append(Stop(worker.name, self._term, self.epoch, worker.session, within_s, reason))

    def _set(self, worker: Worker, state: State, reason: str, now_s: float) -> None:
        if worker.state is not state:
            self._out.append(Changed(worker.name, worker.state, state, reason))
            self._roster.set_state(worker, state, now_s)
            self.touch(worker.group)
