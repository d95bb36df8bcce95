"""Simulated clusters at random: options, faults, sizes and durations all follow from a seed. Owns their ranges only."""

import random
from dataclasses import dataclass

from config.coordinator import CoordinatorOptions
from tests.coordinator.world.simulated import Faults, Outcome
from tests.coordinator.world.simulator import Simulation


@dataclass(frozen=True, slots=True)
class World:
    """What a seed stands for. Times in seconds."""

    seed: int
    options: CoordinatorOptions
    faults: Faults
    workers: int
    groups: int
    micro_step_s: float
    rollout_s: float
    virtual_s: float

    def run(self) -> Outcome:
        """Raises BrokenTruthError, BrokenInvariantError."""
        return Simulation(
            self.seed,
            self.options,
            workers=self.workers,
            groups=self.groups,
            faults=self.faults,
            micro_step_s=self.micro_step_s,
            rollout_s=self.rollout_s,
        ).run(self.virtual_s)


def random_world(seed: int) -> World:
    """From a perfect network to one that loses half of all messages, from no crash to one every five seconds; leases as
    short as the options allow. Every draw is made, whatever the others are, so that a seed keeps its meaning."""
    rng = random.Random(seed)
    heartbeat_s, stop_deadline_s = rng.choice((0.3, 0.5, 1.0)), rng.choice((0.3, 0.5, 1.0))
    options = CoordinatorOptions(
        threshold=rng.choice((1, 1, 2)),
        max_members=rng.choice((1, 2, 3, 8)),
        heartbeat_s=heartbeat_s,
        lease_s=(2 * heartbeat_s + stop_deadline_s) * rng.choice((1.0, 1.3, 3.0)),
        start_deadline_s=rng.choice((0.3, 1.0, 3.0)),
        stop_deadline_s=stop_deadline_s,
        retry_after_s=rng.choice((0.0, 1.0, 2.0)),
    )
    faults = Faults(
        drop=rng.choice((0, 0.05, 0.3, 0.5)),
        duplicate=rng.choice((0, 0.05, 0.3)),
        late=rng.choice((0, 0.1, 0.5)),
        late_s=rng.choice((0.5, 2.0, 6.0)),
        worker_crash_rate=rng.choice((0, 0.02, 0.2)),
        coordinator_crash_rate=rng.choice((0, 0.02, 0.2)),
        request_rate=rng.choice((0, 0.05, 0.3)),
        trainer_failure=rng.choice((0, 0.05, 0.3)),
        trainer_hang=rng.choice((0, 0.05, 0.3)),
        join_rate=rng.choice((0, 0.05, 0.3)),
        leave_rate=rng.choice((0, 0.05, 0.3)),
        node_join_rate=rng.choice((0, 0.05, 0.1)),
        node_death_rate=rng.choice((0, 0.05, 0.2)),
        notice_rate=rng.choice((0, 0.1, 0.3)),
        cut_rate=rng.choice((0, 0.1, 0.3)),
        driver_crash_rate=rng.choice((0, 0.05, 0.2)),
    )
    workers, groups = rng.choice(((2, 1), (3, 1), (4, 2), (6, 2), (6, 1)))
    return World(
        seed,
        options,
        faults,
        workers,
        groups,
        micro_step_s=rng.choice((0.05, 0.2)),
        rollout_s=rng.choice((1.0, 2.0, 4.0)),
        virtual_s=rng.choice((4.0, 8.0, 16.0)),
    )
