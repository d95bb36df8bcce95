"""A cluster in virtual time around the real machine, links, members and driver. Owns the faults and the truth.

    Simulation(seed=1, options=CoordinatorOptions(), workers=6).run(120.0)

The network loses, delays, doubles and overtakes messages; workers and the coordinator crash and come again; trainers
hang, fail, or do not come up. Everything follows from the seed. What is checked is the truth, not the machine's books:

  - a worker that has work trains no longer than the stop deadline, and none is told to train while it has work;
  - of one group, no two workers ever train in different sessions;
  - the machine's own invariants hold after every message (`coordinator.invariants`);
  - nobody is due for ever: time goes on;
  - once the faults end, books and truth agree within a bounded time, and idle workers train: every wait has ended.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coordinator.driver import Driver
from coordinator.events import Drain, Pause, Resume, RolloutComplete, RolloutStarted, State, Stop, Train, Undrain
from coordinator.hub import Hub
from coordinator.invariants import check_invariants
from coordinator.machine import Machine, UnknownTargetError
from coordinator.member import Identity, Member
from coordinator.options import CoordinatorOptions
from coordinator.wire import DRIVER, Ack, Say, Tell

EPSILON_S = 1e-6
MAX_EVENTS_AT_ONCE = 100_000


class BrokenTruthError(AssertionError):
    """Something happened in the simulated cluster that never must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How bad the world is. Probabilities are per message or per start of a trainer; rates are per second."""

    drop: float = 0.05
    duplicate: float = 0.05
    late: float = 0.1  # probability of a delay up to `late_s`, by which later messages overtake
    late_s: float = 2.0
    worker_crash_rate: float = 0.01  # of each worker
    coordinator_crash_rate: float = 0.01
    request_rate: float = 0.02  # drains and pauses
    trainer_failure: float = 0.05
    trainer_hang: float = 0.05  # neither starts, nor stops, nor fails: it is killed


NO_FAULTS = Faults(
    drop=0,
    duplicate=0,
    late=0,
    late_s=0,
    worker_crash_rate=0,
    coordinator_crash_rate=0,
    request_rate=0,
    trainer_failure=0,
    trainer_hang=0,
)


@dataclass(slots=True)
class SimulatedTrainer:
    """A trainer process; it runs until it is gone, however it was told to stop."""

    session: int
    hangs: bool
    works_since_s: float = math.inf  # its worker has had work since
    stop_by_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class Node:
    """A rollout worker: its supervisor (member), its requests, its trainer."""

    name: str
    group: str
    member: Member
    incarnation: int = 1
    alive: bool = True
    works: bool = False  # has been given requests
    trainer: SimulatedTrainer | None = None
    wake_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What happened."""

    seed: int
    virtual_s: float = 0.0
    events: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    preemption_s: list[float] = field(default_factory=list)  # from a rollout's end to the last trainer's
    counts: Counter[str] = field(default_factory=Counter)  # of all coordinators


class Simulation:
    """One seeded run of `workers` workers in `groups` groups."""

    def __init__(
        self,
        seed: int,
        options: CoordinatorOptions,
        *,
        workers: int = 6,
        groups: int = 2,
        faults: Faults = Faults(),
        micro_step_s: float = 0.2,
        rollout_s: float = 6.0,
    ) -> None:
        self._rng = random.Random(seed)
        self._options, self._faults = options, faults
        self._micro_step_s, self._rollout_s = micro_step_s, rollout_s
        self.now_s = 0.0
        self.outcome = Outcome(seed=seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.hub: Hub | None = Hub(Machine(options, term=1))
        self._term = 1
        self._hub_wake_s = math.inf
        self.driver = Driver(1, options, 0.0)
        self._driver_wake_s = math.inf
        self._step = 0
        self._ended_s: float | None = None  # a rollout is complete, and trainers still run
        self.nodes = {
            name: Node(
                name=name,
                group=f"g{i % groups}",
                member=Member(Identity(name, 1, f"n{i // 2}", f"g{i % groups}"), options, 0.0),
            )
            for i, name in enumerate(f"w{i}" for i in range(workers))
        }

    def run(self, virtual_s: float, calm_s: float | None = None) -> Outcome:
        """`virtual_s` seconds with faults, then long enough without for the truth to come out. Raises
        BrokenTruthError, BrokenInvariantError."""
        for node in self.nodes.values():
            self._serve_node(node)
        self._begin_rollout()
        self._plan_crashes()
        self._run_until(virtual_s)
        self._faults = NO_FAULTS
        self._revive()
        longest_s = max(self._options.start_deadline_s, self._options.retry_after_s, 2 * self._options.lease_s)
        calm_s = longest_s + 3 * self._options.lease_s + self._rollout_s if calm_s is None else calm_s
        self._run_until(self.now_s + calm_s)
        self._finish()
        return self.outcome

    # Time.

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._serial, act))

    def _run_until(self, end_s: float) -> None:
        still = 0
        while self._queue and self._queue[0][0] <= end_s:
            at_s, _, act = heapq.heappop(self._queue)
            still = still + 1 if at_s == self.now_s else 0
            if still > MAX_EVENTS_AT_ONCE:
                raise BrokenTruthError(f"{at_s:.3f}: time stands still, somebody is always due")
            self.now_s = at_s
            self.outcome.events += 1
            act()
        self.now_s = self.outcome.virtual_s = end_s

    # The network.

    def _send(self, deliver: Callable[[], None]) -> None:
        faults, rng = self._faults, self._rng
        if rng.random() < faults.drop:
            self.outcome.happened["dropped"] += 1
            return
        copies = 2 if rng.random() < faults.duplicate else 1
        for _ in range(copies):
            late = rng.random() < faults.late
            self._at(0.0002 + rng.random() * (faults.late_s if late else 0.001), deliver)

    # The coordinator.

    def _to_hub(self, peer: str, say: Say) -> None:
        if self.hub is not None:
            self.hub.hear(peer, say, self.now_s)
            self._serve_hub()

    def _serve_hub(self) -> None:
        hub = self.hub
        if hub is None:
            return
        hub.tick(self.now_s)
        check_invariants(hub.machine, self.now_s)
        for peer, message in hub.take():
            self._send(lambda peer=peer, message=message: self._to_peer(peer, message))  # type: ignore[misc]
        due_s = hub.next_deadline_s
        if due_s < self._hub_wake_s - EPSILON_S:
            self._hub_wake_s = due_s
            self._at(max(0.0, due_s - self.now_s), self._wake_hub)

    def _wake_hub(self) -> None:
        self._hub_wake_s = math.inf
        self._serve_hub()

    def _crash_coordinator(self) -> None:
        if self.hub is None or self._faults is NO_FAULTS:
            return
        self.outcome.happened["coordinator crashed"] += 1
        self.outcome.counts += self.hub.counts
        self.hub = None
        self._at(self._rng.random() * 2 * self._options.lease_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        if self.hub is None:
            self._term += 1
            settles_at_s = self.now_s + self._options.lease_s
            self.hub = Hub(Machine(self._options, term=self._term, settles_at_s=settles_at_s))
            self._serve_hub()

    # Workers.

    def _to_peer(self, peer: str, message: Ack | Tell) -> None:
        if peer == DRIVER:
            self.driver.hear(message, self.now_s)
            self._serve_driver()
        elif (node := self.nodes[peer]).alive:
            node.member.hear(message, self.now_s)
            self._serve_node(node)

    def _serve_node(self, node: Node) -> None:
        node.member.tick(self.now_s)
        for command in node.member.commands():
            if isinstance(command, Train):
                self._told_to_train(node, command)
            else:
                self._told_to_stop(node, command)
        for say in node.member.take():
            self._send(lambda say=say: self._to_hub(node.name, say))  # type: ignore[misc]
        due_s = node.member.due_s
        if node.alive and due_s < node.wake_s - EPSILON_S:
            node.wake_s = due_s
            self._at(max(0.0, due_s - self.now_s), lambda: self._wake_node(node))

    def _wake_node(self, node: Node) -> None:
        node.wake_s = math.inf
        if node.alive:
            self._serve_node(node)

    def _told_to_train(self, node: Node, command: Train) -> None:
        if node.works:
            raise BrokenTruthError(f"{self.now_s:.3f}: {node.name} has work and is told to train")
        if node.trainer is None or node.trainer.session != command.session:
            others = {n.trainer.session for n in self.nodes.values() if n.group == node.group and n.trainer is not None}
            if others - {command.session}:
                raise BrokenTruthError(f"{self.now_s:.3f}: {node.name} begins {command}, others train in {others}")
            self.outcome.happened["trainer started"] += 1
            node.trainer = SimulatedTrainer(command.session, self._rng.random() < self._faults.trainer_hang)
        else:
            self.outcome.happened["members changed"] += 1
        trainer, member = node.trainer, node.member

        def up() -> None:
            if node.trainer is not trainer or member is not node.member or trainer.hangs:
                return
            if self._rng.random() < self._faults.trainer_failure:
                self._trainer_gone(node, "fell over")
            else:
                member.started(command.session, command.epoch, f"{node.name}:1", self.now_s)
            self._serve_node(node)

        self._at(self._rng.random() * self._micro_step_s, up)

    def _told_to_stop(self, node: Node, command: Stop) -> None:
        self.outcome.happened["stopped"] += 1
        self._stop_trainer(node, command.within_s)

    def _stop_trainer(self, node: Node, within_s: float) -> None:
        """At the end of its micro-step, or by SIGKILL at the deadline."""
        trainer = node.trainer
        if trainer is None:
            return
        trainer.stop_by_s = min(trainer.stop_by_s, self.now_s + within_s)
        self._at(
            within_s if trainer.hangs else self._rng.random() * self._micro_step_s, lambda: self._end(node, trainer)
        )

    def _end(self, node: Node, trainer: SimulatedTrainer) -> None:
        if node.trainer is trainer:
            if trainer.hangs:
                self.outcome.happened["trainer killed"] += 1
            self._trainer_gone(node, "killed past its deadline" if trainer.hangs else "")
            self._serve_node(node)

    def _trainer_gone(self, node: Node, failure: str) -> None:
        trainer, node.trainer = node.trainer, None
        assert trainer is not None
        limit_s = min(trainer.stop_by_s, trainer.works_since_s + self._options.stop_deadline_s)
        if self.now_s > limit_s + EPSILON_S:
            raise BrokenTruthError(f"{self.now_s:.3f}: the trainer of {node.name} should have ended at {limit_s:.3f}")
        if failure:
            node.member.trainer_failed(trainer.session, failure, self.now_s)
        else:
            node.member.stopped(trainer.session, self.now_s)
        if self._ended_s is not None and not any(n.trainer for n in self.nodes.values()):
            self.outcome.preemption_s.append(self.now_s - self._ended_s)
            self._ended_s = None

    def _give_work(self, node: Node, seconds: float) -> None:
        """The driver submits requests; nobody is asked."""
        if not node.alive or node.works:
            return
        node.works = True
        node.member.busy(1, self.now_s)
        if node.trainer is not None:
            self.outcome.happened["work while training"] += 1
            node.trainer.works_since_s = self.now_s
        incarnation = node.incarnation
        self._at(seconds, lambda: self._work_done(node, incarnation))
        self._serve_node(node)

    def _work_done(self, node: Node, incarnation: int) -> None:
        if node.alive and node.incarnation == incarnation and node.works:
            if node.trainer is not None:  # the work waited for the trainer to end
                self._at(0.01, lambda: self._work_done(node, incarnation))
                return
            node.works = False
            node.member.idle(self.now_s)
            self._serve_node(node)

    def _crash_worker(self, node: Node) -> None:
        if not node.alive or self._faults is NO_FAULTS:
            return
        self.outcome.happened["worker crashed"] += 1
        node.alive = node.works = False
        node.trainer = None  # a child, which the kernel ends with its parent
        self._at(self._rng.random() * 2 * self._options.lease_s, lambda: self._restart_worker(node))

    def _restart_worker(self, node: Node) -> None:
        if node.alive:
            return
        node.incarnation += 1
        who = node.member.identity
        node.member = Member(Identity(who.name, node.incarnation, who.node, who.group), self._options, self.now_s)
        node.alive, node.wake_s = True, math.inf
        node.member.idle(self.now_s)
        self._serve_node(node)

    # The driver and people.

    def _begin_rollout(self) -> None:
        self._step += 1
        self.driver.report(RolloutStarted(self._step, train=self._rng.random() < 0.9), self.now_s)
        for node in self.nodes.values():
            for _ in range(1 + (self._rng.random() < 0.3)):  # some are given more later
                seconds = self._rng.random() ** 2 * self._rollout_s
                self._at(self._rng.random() ** 2 * self._rollout_s, lambda n=node, s=seconds: self._give_work(n, s))  # type: ignore[misc]
        self._at(2 * self._rollout_s, self._end_rollout)
        self._serve_driver()

    def _end_rollout(self) -> None:
        self.driver.report(RolloutComplete(self._step), self.now_s)
        if any(node.trainer for node in self.nodes.values()) and self._faults is NO_FAULTS:
            self._ended_s = self.now_s
        self._at(self._rng.random() * self._rollout_s / 2, self._begin_rollout)
        self._serve_driver()

    def _serve_driver(self) -> None:
        self.driver.tick(self.now_s)
        for say in self.driver.take():
            self._send(lambda say=say: self._to_hub(DRIVER, say))  # type: ignore[misc]
        due_s = self.driver.due_s
        if due_s < self._driver_wake_s - EPSILON_S:
            self._driver_wake_s = due_s
            self._at(max(0.0, due_s - self.now_s), self._wake_driver)

    def _wake_driver(self) -> None:
        self._driver_wake_s = math.inf
        self._serve_driver()

    def _request(self) -> None:
        if self.hub is None or self._faults is NO_FAULTS:
            return
        name, node = self._rng.choice(list(self.nodes)), f"n{self._rng.randrange(2)}"
        event = self._rng.choice(
            (Drain(worker=name), Undrain(worker=name), Drain(node=node), Undrain(node=node), Pause(), Resume())
        )
        self.outcome.happened[type(event).__name__.lower()] += 1
        try:
            self.hub.control(event, self.now_s)
        except UnknownTargetError:
            self.outcome.happened["refused"] += 1
        self._serve_hub()

    # Faults, and what is left of them.

    def _plan_crashes(self) -> None:
        for node in self.nodes.values():
            self._poisson(self._faults.worker_crash_rate, lambda n=node: self._crash_worker(n))  # type: ignore[misc]
        self._poisson(self._faults.coordinator_crash_rate, self._crash_coordinator)
        self._poisson(self._faults.request_rate, self._request)

    def _poisson(self, rate: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self._at(self._rng.expovariate(rate), again)

        if rate > 0:
            self._at(self._rng.expovariate(rate), again)

    def _revive(self) -> None:
        for node in self.nodes.values():
            self._restart_worker(node)
        self._restart_coordinator()
        assert self.hub is not None
        self.hub.control(Resume(), self.now_s)
        for worker in self.hub.machine.roster:
            self.hub.control(Undrain(worker=worker.name), self.now_s)
        for name in list(self.hub.machine.roster.drained_nodes):
            self.hub.control(Undrain(node=name), self.now_s)
        self._serve_hub()

    def _finish(self) -> None:
        """Books and truth differ for moments only, while a message is on its way or a micro-step ends."""
        assert self.hub is not None
        self.outcome.counts += self.hub.counts
        differences = list(self._differences())
        for _ in range(50):
            if not differences:
                return
            self._run_until(self.now_s + 0.1)
            still = set(self._differences())
            differences = [difference for difference in differences if difference in still]
        raise BrokenTruthError(f"{self.now_s:.3f}, calm again, for 5 s already: {differences}")

    def _differences(self) -> Iterator[str]:
        """Where books and truth differ."""
        assert self.hub is not None
        machine = self.hub.machine
        for node in self.nodes.values():
            worker = machine.roster.workers.get(node.name)
            if worker is None or worker.incarnation != node.incarnation:
                yield f"{node.name} is not registered: {worker}"
            elif node.works != (worker.state is State.BUSY) or (node.trainer is not None) != (
                worker.session is not None
            ):
                yield f"{node.name} {node.works=} {node.trainer=} is believed {worker}"
            elif worker.state is State.IDLE and machine.rolling and worker.rests_until_s <= self.now_s:
                session = machine.roster.sessions.get(node.group)
                if session is None or (
                    session.settled(machine.roster) and len(session.members) < self._options.max_members
                ):
                    yield f"{node.name} is idle and does not train; its session: {session}"
