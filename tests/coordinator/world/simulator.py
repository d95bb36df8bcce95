"""A cluster in virtual time around the real machine, links, members and driver. Owns the faults and the truth.

    Simulation(seed=1, options=CoordinatorOptions(), workers=6).run(120.0)

The network loses, delays, doubles and overtakes messages, and cuts nodes off; workers, the driver and the coordinator
crash and come again; workers and nodes come and go for good, with notice or without (`churn.py`); trainers
hang, fail, or do not come up. Everything follows from the seed. What is checked is the truth, not the machine's books:

  - a worker that has work trains no longer than the stop deadline, and none is told to train while it has work;
  - of one group, no two workers ever train in different sessions;
  - what is drained or paused does not begin to train, whichever coordinator was asked;
  - the machine's own invariants hold after every message (`tests.coordinator.world.invariants`);
  - nobody is due for ever: time goes on;
  - once the faults end, books and truth agree within a bounded time, who is gone is forgotten, the members of a session
    know each other, and idle workers train: every wait has ended.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Drain, Pause, Resume, RolloutComplete, RolloutStarted, State, Stop, Train, Undrain
from coordinator.driver import Driver
from coordinator.hub import Hub
from coordinator.machine import Machine, UnknownTargetError
from coordinator.member import Identity, Member
from coordinator.standing import Standing
from coordinator.wire import DRIVER, Ack, Say, Tell
from tests.coordinator.world.churn import Churn, node_id
from tests.coordinator.world.invariants import check_invariants
from tests.coordinator.world.simulated import (
    NO_FAULTS,
    SOME_FAULTS,
    BrokenTruthError,
    Faults,
    Outcome,
    SimulatedTrainer,
    SimulatedWorker,
)
from tests.coordinator.world.wishes import Wishes

EPSILON_S = 1e-6
MAX_EVENTS_AT_ONCE = 100_000


class Simulation:
    """One seeded run of `workers` workers in `groups` groups."""

    def __init__(
        self,
        seed: int,
        options: CoordinatorOptions,
        *,
        workers: int = 6,
        groups: int = 2,
        faults: Faults = SOME_FAULTS,
        micro_step_s: float = 0.2,
        rollout_s: float = 6.0,
    ) -> None:
        self._rng = random.Random(seed)
        self.options, self.faults = options, faults
        self._micro_step_s, self._rollout_s = micro_step_s, rollout_s
        self.now_s = 0.0
        self.outcome = Outcome(seed=seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self.hub: Hub | None = Hub(Machine(options, term=1))
        self._kept = Standing()  # what the coordinator's file holds
        self.wishes = Wishes(faults.late_s + 0.01)
        self._term = 1
        self._hub_wake_s = math.inf
        self.driver: Driver | None = Driver(1, options, 0.0)
        self._trains = False  # a rollout with training in its tail is under way
        self._driver_wake_s = math.inf
        self._step = 0
        self._ended_s: float | None = None  # a rollout is complete, and trainers still run
        self._groups = groups
        self._rollout = 0  # chain of rollouts: a driver that starts again begins another
        self.workers: dict[str, SimulatedWorker] = {}
        self.churn = Churn(self, self._rng)
        self.churn.begin(workers)

    def run(self, virtual_s: float, calm_s: float | None = None) -> Outcome:
        """`virtual_s` seconds with faults, then long enough without for the truth to come out. Raises
        BrokenTruthError, BrokenInvariantError."""
        for node in self.workers.values():
            self.serve(node)
        self._begin_rollout(self._rollout)
        self._plan_crashes()
        self.churn.plan()
        self._run_until(virtual_s)
        self.faults = NO_FAULTS
        self.churn.calm()
        self._revive()
        longest_s = max(self.options.start_deadline_s, self.options.retry_after_s, 2 * self.options.lease_s)
        calm_s = longest_s + 3 * self.options.lease_s + self._rollout_s if calm_s is None else calm_s
        self._run_until(self.now_s + calm_s)
        self._finish()
        return self.outcome

    # Time.

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
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

    def _send(self, deliver: Callable[[], None], *, cut: bool = False) -> None:
        faults, rng = self.faults, self._rng
        if rng.random() < faults.drop or cut:
            self.outcome.happened["dropped"] += 1
            return
        copies = 2 if rng.random() < faults.duplicate else 1
        for _ in range(copies):
            late = rng.random() < faults.late
            self.at(0.0002 + rng.random() * (faults.late_s if late else 0.001), deliver)

    # The coordinator.

    def _to_hub(self, peer: str, say: Say) -> None:
        if self.hub is not None:
            self.hub.hear(peer, say, self.now_s)
            if self._rng.random() < 0.5:
                self._serve_hub()
            else:  # what comes within a millisecond is decided together
                self.at(self._rng.random() * 0.001, self._serve_hub)

    def _serve_hub(self) -> None:
        hub = self.hub
        if hub is None:
            return
        hub.tick(self.now_s)
        check_invariants(hub.machine, self.now_s)
        self.wishes.check(hub.machine, self.now_s)
        self._check_sessions(hub.machine)
        self._kept = hub.machine.standing
        for peer, message in hub.take(self.now_s):
            cut = peer in self.workers and self._cut(self.workers[peer])[1]
            self._send(lambda peer=peer, message=message: self._to_peer(peer, message), cut=cut)
        due_s = hub.next_deadline_s
        if due_s < self._hub_wake_s - EPSILON_S:
            self._hub_wake_s = due_s
            self.at(max(0.0, due_s - self.now_s), self._wake_hub)

    def _check_sessions(self, machine: Machine) -> None:
        """Where all members are believed to train with each other, each was told of all."""
        for session in machine.roster.sessions.values():
            for name in session.members if session.settled(machine.roster) else ():
                worker = self.workers.get(name)
                told = worker.trainer.told if worker is not None and worker.trainer is not None else None
                if told is not None and told.session == session.number and told.epoch < session.epoch:
                    raise BrokenTruthError(f"{self.now_s:.3f}: {name} trains as {told}, the books: {session}")

    def _wake_hub(self) -> None:
        self._hub_wake_s = math.inf
        self._serve_hub()

    def _crash_coordinator(self) -> None:
        if self.hub is None or self.faults is NO_FAULTS:
            return
        self.outcome.happened["coordinator crashed"] += 1
        self.outcome.counts += self.hub.counts
        self.hub = None
        self.at(self._rng.random() * 2 * self.options.lease_s, self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        if self.hub is None:
            self._term += 1
            settles_at_s = self.now_s + self.options.lease_s
            machine = Machine(self.options, term=self._term, settles_at_s=settles_at_s, standing=self._kept)
            self.hub = Hub(machine)
            self._serve_hub()

    # Workers.

    def _to_peer(self, peer: str, message: Ack | Tell) -> None:
        if peer == DRIVER:
            if self.driver is not None:
                self.driver.hear(message, self.now_s)
                self._serve_driver()
        elif (node := self.workers.get(peer)) is not None and node.alive:
            node.member.hear(message, self.now_s)
            self.serve(node)

    def serve(self, node: SimulatedWorker) -> None:
        node.member.tick(self.now_s)
        for command in node.member.commands():
            if isinstance(command, Train):
                self._told_to_train(node, command)
            else:
                self._told_to_stop(node, command)
        for say in node.member.take():
            self._send(lambda say=say: self._to_hub(node.name, say), cut=self._cut(node)[0])
        due_s = node.member.due_s
        if node.alive and due_s < node.wake_s - EPSILON_S:
            node.wake_s = due_s
            self.at(max(0.0, due_s - self.now_s), lambda: self._wake_node(node))

    def _cut(self, node: SimulatedWorker) -> tuple[bool, bool]:
        return self.churn.cut.get(node.member.identity.node, (False, False))

    def add_worker(self, name: str, node: str, number: int) -> SimulatedWorker:
        group = f"g{number % self._groups}"
        member = Member(Identity(name, 1, node, group, node_id(node)), self.options, self.now_s)
        worker = self.workers[name] = SimulatedWorker(name=name, group=group, member=member)
        if number % 3 == 0 and self.now_s > 0:  # it has nothing to do yet
            member.idle(self.now_s)
        else:
            worker.works = True
            self.at(self._rng.random() * self._rollout_s, lambda: self._work_done(worker, 1))
        return worker

    def end_worker(self, worker: SimulatedWorker, *, goodbye: bool) -> None:
        """It is gone for good, and so is its trainer, a child process."""
        del self.workers[worker.name]
        if goodbye and worker.alive:
            worker.trainer = None
            worker.member.leave(self.now_s)
            self.serve(worker)
        worker.alive, worker.trainer = False, None

    def _wake_node(self, node: SimulatedWorker) -> None:
        node.wake_s = math.inf
        if node.alive:
            self.serve(node)

    def _told_to_train(self, node: SimulatedWorker, command: Train) -> None:
        if node.works:
            raise BrokenTruthError(f"{self.now_s:.3f}: {node.name} has work and is told to train")
        self.wishes.check_command(node.member.identity, command, self.now_s)
        if node.trainer is None or node.trainer.told.session != command.session:
            others = {
                n.trainer.told.session for n in self.workers.values() if n.group == node.group and n.trainer is not None
            }
            if others - {command.session}:
                raise BrokenTruthError(f"{self.now_s:.3f}: {node.name} begins {command}, others train in {others}")
            self.outcome.happened["trainer started"] += 1
            node.trainer = SimulatedTrainer(command, self._rng.random() < self.faults.trainer_hang)
        else:
            self.outcome.happened["members changed"] += 1
            node.trainer.told = command
        trainer, member = node.trainer, node.member

        def up() -> None:
            if node.trainer is not trainer or member is not node.member or trainer.hangs:
                return
            if self._rng.random() < self.faults.trainer_failure:
                self._trainer_gone(node, "fell over")
            else:
                member.started(command.session, command.epoch, f"{node.name}:1", self.now_s)
            self.serve(node)

        self.at(self._rng.random() * self._micro_step_s, up)

    def _told_to_stop(self, node: SimulatedWorker, command: Stop) -> None:
        self.outcome.happened["stopped"] += 1
        self._stop_trainer(node, command.within_s)

    def _stop_trainer(self, node: SimulatedWorker, within_s: float) -> None:
        """At the end of its micro-step, or by SIGKILL at the deadline."""
        trainer = node.trainer
        if trainer is None:
            return
        trainer.stop_by_s = min(trainer.stop_by_s, self.now_s + within_s)
        self.at(
            within_s if trainer.hangs else self._rng.random() * self._micro_step_s, lambda: self._end(node, trainer)
        )

    def _end(self, node: SimulatedWorker, trainer: SimulatedTrainer) -> None:
        if node.trainer is trainer:
            if trainer.hangs:
                self.outcome.happened["trainer killed"] += 1
            self._trainer_gone(node, "killed past its deadline" if trainer.hangs else "")
            self.serve(node)

    def _trainer_gone(self, node: SimulatedWorker, failure: str) -> None:
        trainer, node.trainer = node.trainer, None
        assert trainer is not None
        limit_s = min(trainer.stop_by_s, trainer.works_since_s + self.options.stop_deadline_s)
        if self.now_s > limit_s + EPSILON_S:
            raise BrokenTruthError(f"{self.now_s:.3f}: the trainer of {node.name} should have ended at {limit_s:.3f}")
        if failure:
            node.member.trainer_failed(trainer.told.session, failure, self.now_s)
        else:
            node.member.stopped(trainer.told.session, self.now_s)
        if self._ended_s is not None and not any(n.trainer for n in self.workers.values()):
            self.outcome.preemption_s.append(self.now_s - self._ended_s)
            self._ended_s = None

    def _give_work(self, node: SimulatedWorker, seconds: float) -> None:
        """The driver submits requests; nobody is asked."""
        if not node.alive or node.works:
            return
        node.works = True
        node.member.busy(1, self.now_s)
        if node.trainer is not None:
            self.outcome.happened["work while training"] += 1
            node.trainer.works_since_s = self.now_s
        incarnation = node.incarnation
        self.at(seconds, lambda: self._work_done(node, incarnation))
        self.serve(node)

    def _work_done(self, node: SimulatedWorker, incarnation: int) -> None:
        if node.alive and node.incarnation == incarnation and node.works:
            if node.trainer is not None:  # the work waited for the trainer to end
                self.at(0.01, lambda: self._work_done(node, incarnation))
                return
            node.works = False
            node.member.idle(self.now_s)
            self.serve(node)

    def _crash_worker(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        if not alive:
            return
        node = self._rng.choice(alive)
        self.outcome.happened["worker crashed"] += 1
        node.alive = node.works = False
        node.trainer = None  # a child, which the kernel ends with its parent
        self.at(self._rng.random() * 2 * self.options.lease_s, lambda: self._restart_worker(node))

    def _restart_worker(self, node: SimulatedWorker) -> None:
        if node.alive or self.workers.get(node.name) is not node:
            return
        node.incarnation += 1
        who = node.member.identity
        node.member = Member(replace(who, incarnation=node.incarnation), self.options, self.now_s)
        node.alive, node.wake_s = True, math.inf
        node.member.idle(self.now_s)
        self.serve(node)

    # The driver and people.

    def _begin_rollout(self, chain: int) -> None:
        if self.driver is None or chain != self._rollout:
            return
        self._step += 1
        self._trains = self._rng.random() < 0.9
        self.driver.report(RolloutStarted(self._step, train=self._trains), self.now_s)
        for node in self.workers.values():
            for _ in range(1 + (self._rng.random() < 0.3)):  # some are given more later
                seconds = self._rng.random() ** 2 * self._rollout_s
                self.at(self._rng.random() ** 2 * self._rollout_s, lambda n=node, s=seconds: self._give_work(n, s))
        self.at(2 * self._rollout_s, lambda: self._end_rollout(chain))
        self._serve_driver()

    def _end_rollout(self, chain: int) -> None:
        if self.driver is None or chain != self._rollout:
            return
        self._trains = False
        self.driver.report(RolloutComplete(self._step), self.now_s)
        if any(node.trainer for node in self.workers.values()) and self.faults is NO_FAULTS:
            self._ended_s = self.now_s
        self.at(self._rng.random() * self._rollout_s / 2, lambda: self._begin_rollout(chain))
        self._serve_driver()

    def crash_driver(self) -> None:
        """Its successor goes on from a checkpoint, perhaps steps before."""
        if self.driver is None or self.faults is NO_FAULTS:
            return
        self.outcome.happened["driver crashed"] += 1
        self.driver = None
        self.at(self._rng.random() * 2 * self.options.lease_s, self._restart_driver)

    def _restart_driver(self) -> None:
        if self.driver is not None:
            return
        self._rollout += 1
        self.driver = Driver(1 + self._rollout, self.options, self.now_s)
        self._step = max(0, self._step - self._rng.randrange(3))
        self._begin_rollout(self._rollout)

    def _serve_driver(self) -> None:
        if self.driver is None:
            return
        self.driver.tick(self.now_s)
        for say in self.driver.take():
            self._send(lambda say=say: self._to_hub(DRIVER, say))
        due_s = self.driver.due_s
        if due_s < self._driver_wake_s - EPSILON_S:
            self._driver_wake_s = due_s
            self.at(max(0.0, due_s - self.now_s), self._wake_driver)

    def _wake_driver(self) -> None:
        self._driver_wake_s = math.inf
        self._serve_driver()

    def _request(self) -> None:
        if self.hub is None or self.faults is NO_FAULTS or not self.workers:
            return
        name = self._rng.choice(list(self.workers))
        node = self.workers[name].member.identity.node
        acts: list[Drain | Undrain | Pause | Resume] = [Drain(worker=name), Undrain(worker=name), Pause(), Resume()]
        if node not in self.churn.doomed:
            acts += [Drain(node=node), Undrain(node=node)]
        event = self._rng.choice(acts)
        self.outcome.happened[type(event).__name__.lower()] += 1
        self.ask(event)

    def ask(self, event: Drain | Undrain | Pause | Resume) -> bool:
        """People, or the driver. False: no coordinator is there."""
        if self.hub is None:
            return False
        try:
            self.hub.control(event, self.now_s)
        except UnknownTargetError:
            self.outcome.happened["refused"] += 1
        else:
            self.wishes.told(event, self.now_s)
        self._serve_hub()
        return True

    # Faults, and what is left of them.

    def _plan_crashes(self) -> None:
        self.poisson(self.faults.worker_crash_rate * len(self.workers), self._crash_worker)
        self.poisson(self.faults.coordinator_crash_rate, self._crash_coordinator)
        self.poisson(self.faults.request_rate, self._request)

    def poisson(self, rate: float, act: Callable[[], None]) -> None:
        def again() -> None:
            if self.faults is not NO_FAULTS:
                act()
                self.at(self._rng.expovariate(rate), again)

        if rate > 0:
            self.at(self._rng.expovariate(rate), again)

    def _revive(self) -> None:
        for node in self.workers.values():
            self._restart_worker(node)
        self._restart_coordinator()
        self._restart_driver()
        assert self.hub is not None
        standing = self.hub.machine.standing
        undo: list[Resume | Undrain] = [Resume()]
        undo += [Undrain(worker=name) for name in standing.workers] + [Undrain(node=name) for name in standing.nodes]
        for event in undo:
            self.ask(event)

    def _finish(self) -> None:
        """Books and truth differ for moments only, while a message is on its way or a micro-step ends."""
        assert self.hub is not None
        self.outcome.counts += self.hub.counts
        differences = dict(self._differences())
        for _ in range(50):
            if not differences:
                return
            self._run_until(self.now_s + 0.1)
            still = dict(self._differences())
            differences = {who: still[who] for who in differences if who in still}
        if differences:
            raise BrokenTruthError(f"{self.now_s:.3f}, calm again, for 5 s already: {list(differences.values())}")

    def _differences(self) -> Iterator[tuple[str, str]]:
        """Where books and truth differ: about whom, and how."""
        assert self.hub is not None
        machine = self.hub.machine
        for name in machine.roster.workers.keys() - self.workers.keys():
            yield name, f"{name} is gone for good and is in the books"
        if (machine.rolling, machine.rollout_step) != (self._trains, self._step):
            yield DRIVER, f"{machine.rolling=} {machine.rollout_step=}, the driver: {self._trains=} {self._step=}"
        for node in self.workers.values():
            worker = machine.roster.workers.get(node.name)
            if worker is None or worker.incarnation != node.incarnation:
                yield node.name, f"{node.name} is not registered: {worker}"
            elif node.works != (worker.state is State.BUSY) or (node.trainer is not None) != (
                worker.session is not None
            ):
                yield node.name, f"{node.name} {node.works=} {node.trainer=} is believed {worker}"
            elif node.trainer is not None and (found := machine.roster.session_of(worker)) is not None:
                if node.trainer.told.members != tuple(found.members):
                    yield node.name, f"{node.name} trains as {node.trainer.told}, the books: {found}"
            elif worker.state is State.IDLE and machine.rolling and worker.rests_until_s <= self.now_s:
                session = machine.roster.sessions.get(node.group)
                idle = [machine.roster.workers[name] for name in machine.roster.idle[node.group]]
                enough = sum(w.rests_until_s <= self.now_s for w in idle) >= self.options.threshold
                if (session is None and enough) or (
                    session is not None
                    and session.settled(machine.roster)
                    and len(session.members) < self.options.max_members
                ):
                    yield node.name, f"{node.name} is idle and does not train; its session: {session}"
