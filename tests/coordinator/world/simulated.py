"""What a simulated cluster is made of: how bad its world is, its workers and trainers, and what happened. Plain
data.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from contracts.coordinator import Train
from coordinator.member import Member


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
    join_rate: float = 0.01
    leave_rate: float = 0.01
    node_join_rate: float = 0.005
    node_death_rate: float = 0.005
    notice_rate: float = 0.01  # spot notices: a node is drained, and dies at its deadline
    cut_rate: float = 0.01  # a node's network fails for a while
    driver_crash_rate: float = 0.01


SOME_FAULTS = Faults()
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
    join_rate=0,
    leave_rate=0,
    node_join_rate=0,
    node_death_rate=0,
    notice_rate=0,
    cut_rate=0,
    driver_crash_rate=0,
)


@dataclass(slots=True)
class SimulatedTrainer:
    """A trainer process; it runs until it is gone, however it was told to stop."""

    told: Train  # last
    hangs: bool
    works_since_s: float = math.inf  # its worker has had work since
    stop_by_s: float = math.inf


@dataclass(slots=True, kw_only=True)
class SimulatedWorker:
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
