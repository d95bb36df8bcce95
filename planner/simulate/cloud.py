"""Spot nodes that are lost and replaced; lost learners. Owns the times of losses and recoveries; the ledger owns
requests.

With a notice, workers get nothing more at once, and are drained `react_s` later with every token they have; their
successors are requested at the notice. Without one, a node is silent from its loss on. The driver detects it `detect_s`
later, and the tokens since the last reported prefix are sampled again. A successor is ready after capacity, boot, start
and loading of the present weights. Places keep their names when their workers change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from launch.errors import PacelineError
from planner.simulate.clock import Clock
from planner.simulate.learner import LearnerTimes
from planner.simulate.places import Places
from planner.simulate.scenario import Scenario

MOST_OF_STEP = 2000  # interruptions


@dataclass(slots=True, kw_only=True)
class Cloud:
    """The cloud of a run."""

    scenario: Scenario
    clock: Clock
    places: Places
    learner: "SimulatedLearners"
    interruptions: int = 0
    paid_s: float = 0.0  # GPU-seconds beyond those of all places: old nodes still running next to new ones
    _of_step: int = 0
    _rng: np.random.Generator = field(init=False)

    def step_begins(self) -> None:
        self._of_step = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.scenario.seed, 5])
        self._next(self._times())

    def _times(self) -> Iterator[float]:
        spot = self.scenario.spot
        if spot.trace_s:
            yield from sorted(spot.trace_s)
            return
        at_s, rate = 0.0, spot.interruptions_per_hour / 3600
        if spot.node_life_h is not None:
            rate += self.scenario.fleet.nodes / (3600 * spot.node_life_h)
        while spot.every_s is not None or rate:
            at_s += spot.every_s if spot.every_s is not None else float(self._rng.exponential(1 / rate))
            yield at_s

    def _next(self, times: Iterator[float]) -> None:
        at_s = next(times, None)
        if at_s is not None:

            def happens() -> None:
                self._interrupt()
                self._next(times)

            self.clock.at(at_s, happens)

    def _interrupt(self) -> None:
        spot, now_s, clock = self.scenario.spot, self.clock.now_s, self.clock
        takes = self.places.up()
        self._of_step += 1
        if self._of_step > MOST_OF_STEP:
            raise PacelineError(
                f"{MOST_OF_STEP:,} interruptions within one RL step: they come faster than nodes and learners recover",
                remedy="let nodes live longer (section spot), or shorten boot_s and start_s",
            )
        if not takes:
            return
        names = takes[int(self._rng.integers(len(takes)))]
        self.interruptions += 1
        comes_s = spot.capacity_s + spot.boot_s + spot.start_s + spot.load_s
        asked_s = 0.0 if spot.notice_s else spot.detect_s
        whole = self.scenario.fleet.gpus_per_node if spot.takes == "node" else self.scenario.fleet.gpus_per_worker
        self.paid_s += whole * ((spot.notice_s or 0.0) - asked_s - spot.capacity_s)
        if self.scenario.fleet.layout == "colocated":  # its ranks are lost too, with or without a notice
            rest_s = max(asked_s + spot.capacity_s + spot.boot_s - spot.notice_s, 0.0)
            clock.at(now_s + spot.notice_s, self.learner.lost, rest_s)
        for name in names:
            if spot.notice_s:
                self.places.withhold(name)
                clock.at(now_s + min(spot.react_s, spot.notice_s), self.places.drain, name)
            else:
                self.places.fall_silent(name)
                clock.at(now_s + spot.detect_s, self.places.lose, name)
            clock.at(now_s + asked_s + comes_s, self.places.ready, name)


@dataclass(slots=True, kw_only=True)
class SimulatedLearners:
    """The learner. When lost, it restarts from the last checkpoint: detection, restart, load, and the updates of the
    steps since then. Rollouts continue meanwhile."""

    scenario: Scenario
    clock: Clock
    failures: int = 0
    ready_s: float = 0.0
    since_checkpoint: list[float] = field(default_factory=list)  # seconds of each step's updates
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.scenario.seed, 6])
        self._next()

    def _next(self) -> None:
        rate = self.scenario.learning.failures_per_day / 86_400
        if rate:

            def happens() -> None:
                self.lost(self.scenario.learning.restart_s)
                self._next()

            self.clock.at(self.clock.now_s + float(self._rng.exponential(1 / rate)), happens)

    def lost(self, restart_s: float) -> None:
        """A rank is lost. Detection, load and repeated updates add to `restart_s`."""
        given = self.scenario.learning
        self.failures += 1
        again_s = given.detect_s + restart_s + given.load_s + sum(self.since_checkpoint)
        self.ready_s = max(self.ready_s, self.clock.now_s + again_s)

    def learn(self, times: LearnerTimes, responses: Sequence[int]) -> tuple[float, float]:
        """Run the clock until the responses of these lengths are learned. Returns the seconds of learning and of
        losses."""
        needs_s, begin_s = times.learn_s(responses), self.clock.now_s
        while True:
            self.clock.run_to(max(self.ready_s, self.clock.now_s))
            if self.ready_s > self.clock.now_s:
                continue  # lost again
            if self._learned(needs_s):
                self.since_checkpoint.append(needs_s)
                lost_s = self.clock.now_s - begin_s - needs_s
                return needs_s, lost_s if lost_s > 1e-6 else 0.0  # less is rounding

    def _learned(self, needs_s: float) -> bool:
        """Return whether nothing was lost meanwhile."""
        failures = self.failures
        self.clock.run(lambda: self.failures != failures, self.clock.now_s + needs_s)
        return self.failures == failures

    def checkpointed(self) -> None:
        self.since_checkpoint.clear()
