"""Who comes and goes for good in a simulated cluster: workers, nodes, notices, cut nodes, the driver. Owns when, and
what it means for whoever is there; the simulation owns time, the network and the truth.
"""

import random
from collections.abc import Callable
from typing import Protocol

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Drain
from tests.coordinator.world.simulated import Faults, Outcome, SimulatedWorker


class World(Protocol):
    """The simulation, as far as it is needed here."""

    faults: Faults
    options: CoordinatorOptions
    outcome: Outcome
    workers: dict[str, SimulatedWorker]

    def at(self, delay_s: float, act: Callable[[], None]) -> None: ...
    def poisson(self, rate: float, act: Callable[[], None]) -> None: ...
    def add_worker(self, name: str, node: str, number: int) -> SimulatedWorker: ...
    def end_worker(self, worker: SimulatedWorker, *, goodbye: bool) -> None: ...
    def serve(self, node: SimulatedWorker) -> None: ...
    def ask(self, event: Drain) -> bool: ...
    def crash_driver(self) -> None: ...


class Churn:
    """Of one simulation. `here`: the nodes that are up; a name is used once."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self.here: dict[str, None] = {}
        self.doomed: set[str] = set()  # notice was given
        self.cut: dict[str, tuple[bool, bool]] = {}  # nothing gets through: from there, to there
        self._workers_born = self._nodes_born = 0

    def begin(self, workers: int) -> None:
        """Two workers on each node."""
        for index in range(workers):
            self.add_worker(self.add_node() if index % 2 == 0 else list(self.here)[-1])

    def plan(self) -> None:
        faults, poisson = self._world.faults, self._world.poisson
        poisson(faults.join_rate, self._join)
        poisson(faults.leave_rate, self._leave)
        poisson(faults.node_join_rate, self._node_join)
        poisson(faults.node_death_rate, self._node_death)
        poisson(faults.notice_rate, self._notice)
        poisson(faults.cut_rate, self._cut)
        poisson(faults.driver_crash_rate, self._world.crash_driver)

    def calm(self) -> None:
        """No more of it: what was announced happens, what was cut is joined."""
        for node in list(self.doomed):
            self._die(node)
        self.cut.clear()
        if not self.here:
            self.add_node()
        if not self._world.workers:
            self.add_worker(next(iter(self.here)))

    def add_node(self) -> str:
        name = f"n{self._nodes_born}"
        self._nodes_born += 1
        self.here[name] = None
        return name

    def add_worker(self, node: str) -> SimulatedWorker:
        self._workers_born += 1
        return self._world.add_worker(f"w{self._workers_born - 1}", node, self._workers_born - 1)

    # What happens.

    def _join(self) -> None:
        if where := [node for node in self.here if node not in self.doomed]:
            self._said("worker joined")
            self._world.serve(self.add_worker(self._rng.choice(where)))

    def _leave(self) -> None:
        """Released, or drained: it says goodbye. Or its process is gone for good, without a word."""
        if self._world.workers:
            self._end(self._rng.choice(list(self._world.workers.values())), goodbye=self._rng.random() < 0.7)

    def _node_join(self) -> None:
        self._said("node joined")
        node = self.add_node()
        for _ in range(self._rng.randrange(1, 3)):
            self._world.serve(self.add_worker(node))

    def _node_death(self) -> None:
        if self.here:
            self._die(self._rng.choice(list(self.here)))

    def _notice(self) -> None:
        """The cloud takes a node back: drained at once by Ray's id, left by some workers, gone at the deadline."""
        nodes = [node for node in self.here if node not in self.doomed]
        if not nodes:
            return
        node = self._rng.choice(nodes)
        self._said("notice")
        self.doomed.add(node)
        self._drain(node)
        deadline_s = self._rng.random() * 2 * self._world.options.lease_s
        for worker in self._on(node):
            if self._rng.random() < 0.5:
                self._world.at(self._rng.random() * deadline_s, lambda w=worker: self._end(w, goodbye=True))
        self._world.at(deadline_s, lambda: self._die(node))

    def _drain(self, node: str) -> None:
        """The driver goes on asking while no coordinator is there."""
        if node in self.here and not self._world.ask(Drain(node=node_id(node), reason="notice")):
            self._world.at(0.5, lambda: self._drain(node))

    def _cut(self) -> None:
        """The network of a node fails, in one direction or both, for a while."""
        if not self.here:
            return
        node = self._rng.choice(list(self.here))
        self._said("node cut off")
        self.cut[node] = self._rng.choice(((True, True), (True, False), (False, True)))
        self._world.at(self._rng.random() * 2 * self._world.options.lease_s, lambda: self._join_again(node))

    def _join_again(self, node: str) -> None:
        self.cut.pop(node, None)

    def _die(self, node: str) -> None:
        if node not in self.here:
            return
        self._said("node died")
        for worker in self._on(node):
            self._end(worker, goodbye=False)
        del self.here[node]
        self.doomed.discard(node)

    def _end(self, worker: SimulatedWorker, *, goodbye: bool) -> None:
        if self._world.workers.get(worker.name) is worker:
            self._said("worker left" if goodbye else "worker gone")
            self._world.end_worker(worker, goodbye=goodbye)

    def _on(self, node: str) -> list[SimulatedWorker]:
        return [worker for worker in self._world.workers.values() if worker.member.identity.node == node]

    def _said(self, what: str) -> None:
        self._world.outcome.happened[what] += 1


def node_id(node: str) -> str:
    """Ray's, of the node with this address."""
    return f"id-{node}"
