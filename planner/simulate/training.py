"""Drafter training on idle workers, around the real coordinator: its machine and hub, a member per worker, the driver.

Owns the virtual trainers and the delivery of messages; never decides who trains. Messages arrive after `LATENCY_S`, and
none is lost. Heartbeats are left out (their interval exceeds the run), since tests/coordinator/world covers what they
are for. A lost worker is reported after the lease.
"""

import math
from dataclasses import dataclass

from config.coordinator import CoordinatorOptions
from contracts.coordinator import RolloutComplete, RolloutStarted, Stop, Train
from coordinator.driver import Driver
from coordinator.hub import Hub
from coordinator.machine import Machine
from coordinator.member import Identity, Member
from coordinator.wire import DRIVER, Ack, Say, Tell
from planner.simulate.clock import Clock
from planner.simulate.scenario import SpotTraining as TrainingOptions

LATENCY_S = 1e-3
_NEVER_S = 1e9


@dataclass(slots=True, kw_only=True)
class _Trainer:
    session: int
    since_s: float  # time of the command
    begun_s: float  # of the first micro-step; infinite during the start


@dataclass(slots=True, kw_only=True)
class _Member:
    member: Member
    incarnation: int = 1
    trainer: _Trainer | None = None
    alive: bool = True


class SpotTrainers:
    """The trainers of a run. `micro_steps`: the sum over all workers so far."""

    def __init__(self, clock: Clock, training: TrainingOptions, options: CoordinatorOptions) -> None:
        self._clock, self._training = clock, training
        self._lease_s = options.lease_s
        quiet = {"heartbeat_s": _NEVER_S, "lease_s": 4 * _NEVER_S}
        self._options = options.model_copy(update=quiet)
        self._hub = Hub(Machine(self._options, term=1))
        self._driver = Driver(1, self._options, clock.now_s)
        self._workers: dict[str, _Member] = {}
        self._hub_wake_s = math.inf
        self.micro_steps = 0.0
        self.seconds = 0.0  # worker-seconds of training, without starts
        self.sessions: set[int] = set()
        self.stopping_s = 0.0  # from the last rollout's end until all training stopped

    # The driver's side.

    def join(self, name: str, node: str) -> None:
        """A worker is up; possibly again under its name after `lose`."""
        before = self._workers.get(name)
        incarnation = 1 if before is None else before.incarnation + 1
        member = Member(Identity(name, incarnation, node), self._options, self._clock.now_s)
        self._workers[name] = worker = _Member(member=member, incarnation=incarnation)
        self._serve(name, worker)

    def lose(self, name: str) -> None:
        """A worker is lost; the coordinator detects it after the lease."""
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            return
        self._gone(worker, stopped=False)
        worker.alive = False

        def expire() -> None:
            if self._workers.get(name) is worker:  # otherwise its successor's registration reports it
                worker.member.leave(self._clock.now_s)
                for say in worker.member.take():
                    self._to_hub(name, say)

        self._clock.at(self._clock.now_s + self._lease_s, expire)

    def begin(self, step: int) -> None:
        self._driver.report(RolloutStarted(step, True), self._clock.now_s)
        self._serve_driver()

    def end(self, step: int) -> None:
        self._driver.report(RolloutComplete(step), self._clock.now_s)
        self._serve_driver()

    @property
    def training(self) -> int:
        """The number of workers whose trainer has not stopped yet."""
        return sum(worker.trainer is not None for worker in self._workers.values())

    def busy(self, name: str, running: int) -> None:
        worker = self._workers[name]
        worker.member.busy(running, self._clock.now_s)
        self._serve(name, worker)

    def idle(self, name: str) -> None:
        worker = self._workers[name]
        worker.member.idle(self._clock.now_s)
        self._serve(name, worker)

    # The coordinator.

    def _to_hub(self, peer: str, say: Say) -> None:
        self._hub.hear(peer, say, self._clock.now_s)
        self._serve_hub()

    def _serve_hub(self) -> None:
        hub, now_s = self._hub, self._clock.now_s
        hub.tick(now_s)
        for peer, message in hub.take(now_s):
            self._clock.at(now_s + LATENCY_S, self._to_peer, peer, message)
        due_s = hub.next_deadline_s
        if due_s < min(self._hub_wake_s, _NEVER_S):
            self._hub_wake_s = due_s
            self._clock.at(due_s, self._wake_hub)

    def _wake_hub(self) -> None:
        self._hub_wake_s = math.inf
        self._serve_hub()

    # Its peers.

    def _to_peer(self, peer: str, message: Ack | Tell) -> None:
        if peer == DRIVER:
            self._driver.hear(message, self._clock.now_s)
            self._serve_driver()
        elif (worker := self._workers[peer]).alive:
            worker.member.hear(message, self._clock.now_s)
            self._serve(peer, worker)

    def _serve_driver(self) -> None:
        for say in self._driver.take():
            self._clock.at(self._clock.now_s + LATENCY_S, self._to_hub, DRIVER, say)

    def _serve(self, name: str, worker: _Member) -> None:
        now_s, member = self._clock.now_s, worker.member
        for command in member.commands():
            if isinstance(command, Train):
                self._train(name, worker, command)
            else:
                self._stop(name, worker, command)
        for say in member.take():
            self._clock.at(now_s + LATENCY_S, self._to_hub, name, say)

    def _train(self, name: str, worker: _Member, command: Train) -> None:
        now_s, member = self._clock.now_s, worker.member
        self.sessions.add(command.session)
        trainer = worker.trainer
        starts_s = 0.0
        if trainer is None or trainer.session != command.session:
            self._gone(worker)
            starts_s = self._training.start_s
            trainer = _Trainer(session=command.session, since_s=now_s, begun_s=now_s + starts_s)
            worker.trainer = trainer

        def up() -> None:
            if worker.trainer is trainer and worker.alive:
                member.started(command.session, command.epoch, f"{name}:1", self._clock.now_s)
                self._serve(name, worker)

        self._clock.at(now_s + starts_s, up)

    def _stop(self, name: str, worker: _Member, command: Stop) -> None:
        """Stop at the end of the micro-step, by the deadline at the latest."""
        trainer, now_s = worker.trainer, self._clock.now_s
        if trainer is None:
            return
        step_s = self._training.micro_step_s
        into_s = (now_s - trainer.begun_s) % step_s if now_s > trainer.begun_s else 0.0
        rest_s = min(step_s - into_s if into_s else 0.0, command.within_s)

        def stopped() -> None:
            if worker.trainer is trainer and worker.alive:
                self._gone(worker)
                worker.member.stopped(trainer.session, self._clock.now_s)
                self._serve(name, worker)

        self._clock.at(now_s + rest_s, stopped)

    def _gone(self, worker: _Member, *, stopped: bool = True) -> None:
        trainer, worker.trainer = worker.trainer, None
        if trainer is None:
            return
        trained_s = max(self._clock.now_s - trainer.begun_s, 0.0)
        if stopped:  # a lost worker's learning is replicated in its session, but not its share of the present step
            self.micro_steps += trained_s / self._training.micro_step_s
        self.seconds += self._clock.now_s - trainer.since_s
