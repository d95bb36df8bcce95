"""Workers that are released and requested again: the policy's inputs from a simulated run, and its effects.

Owns when the policy is called, and the cost of releases and returns; policies.fleet.wanted_workers decides. Places are
released one by one. A node without any place left is paid for `idle_timeout_s` longer. After that, a return needs a new
machine.
"""

import math
from dataclasses import dataclass, field
from functools import partial

from planner.simulate.clock import Clock
from planner.simulate.places import Places
from planner.simulate.scenario import Scenario
from policies.fleet import FleetNow, wanted_workers

LOOK_S = 2.0  # between two looks within a rollout


@dataclass(slots=True, kw_only=True)
class Elastic:
    """The elastic fleet of a run. Seconds of released places are no worker-seconds; a starting worker has a place."""

    scenario: Scenario
    clock: Clock
    places: Places
    away_s: float = 0.0  # of places
    saved_s: float = 0.0  # GPU-seconds that were not paid for
    joined: int = 0
    left: int = 0
    _since_s: dict[str, float] = field(default_factory=dict)  # release times of places
    _coming: dict[str, float] = field(default_factory=dict)  # ready times of places requested again
    _empty_s: dict[int, float] = field(default_factory=dict)  # nodes without any place: time since when
    _rolling: bool = False
    _next_s: float = 0.0  # earliest begin of the next rollout
    _between_s: float = 0.0  # usual time between two
    _tokens: float = 0.0  # of a rollout
    _looks: int = 0
    _left: int = 1  # rollouts

    @property
    def on(self) -> bool:
        return self.scenario.fleet.min_workers is not None

    def rollout_begins(self, after_s: float, left: int) -> None:
        """The next rollout begins about `after_s` after this one's end. `left`: rollouts left, including it."""
        if self.on:
            self._rolling, self._between_s, self._left = True, after_s, left
            self._look()

    def rollout_ends(self, tokens: float) -> None:
        if self.on:
            self._rolling, self._tokens = False, tokens
            self._next_s = self.clock.now_s + self._between_s
            self._look()

    def _look(self) -> None:
        self._looks += 1  # those that were planned are not needed
        up, idle = self.places.standing()
        now_s, spot = self.clock.now_s, self.scenario.spot
        most = self.scenario.fleet.workers
        waiting, tokens = self.places.waiting() if self._rolling else (0, 0.0)
        until_s = self._between_s if self._rolling else max(self._next_s - now_s, 0.0)
        machine_s = spot.capacity_s + spot.boot_s if self._empty_s else 0.0
        now = FleetNow(
            workers=len(up) + len(self._coming),
            idle_s=[seconds for seconds, _ in idle],
            waiting=waiting,
            waiting_tokens=tokens,
            next_tokens=self._tokens if self._left else 0.0,
            next_in_s=until_s,
            between_s=self._between_s,
            rollouts_left=self._left,
            tokens_per_s=self.places.tokens_per_s(),
            start_s=machine_s + spot.start_s + spot.load_s,
            training=self._rolling and self.scenario.speculation.training.enabled,
        )
        least = self.scenario.fleet.min_workers
        assert least is not None
        wanted = wanted_workers(now, least=least, most=most)
        for _, name in idle[: max(now.workers - wanted, 0)]:
            self._let_go(name)
        away = [name for name in self._since_s if name not in self._coming]
        for name in away[: max(wanted - now.workers, 0)]:
            self._ask(name)
        if self._rolling or (self._since_s and self._next_s > now_s):
            self.clock.at(now_s + LOOK_S, partial(self._look_again, self._looks))

    def _look_again(self, look: int) -> None:
        if look == self._looks:
            self._look()

    def _let_go(self, name: str) -> None:
        self.places.let_go(name)
        self.left += 1
        self._since_s[name] = self.clock.now_s
        node = self.places.node_of(name)
        if all(self.places.node_of(other) != node for other in self.places.standing()[0]):
            self._empty_s[node] = self.clock.now_s

    def _ask(self, name: str) -> None:
        spot, now_s = self.scenario.spot, self.clock.now_s
        takes_s = spot.start_s + spot.load_s
        empty_s = self._empty_s.pop(self.places.node_of(name), None)
        if empty_s is not None and now_s - empty_s > self.scenario.fleet.idle_timeout_s:
            gone_s = now_s + spot.capacity_s - empty_s - self.scenario.fleet.idle_timeout_s
            self.saved_s += gone_s * self.scenario.fleet.gpus_per_node
            takes_s += spot.capacity_s + spot.boot_s
        self._coming[name] = now_s + takes_s
        self.clock.at(now_s + takes_s, self._back, name)

    def _back(self, name: str) -> None:
        del self._coming[name]
        starting_s = self.scenario.spot.start_s + self.scenario.spot.load_s  # time in its place
        self.away_s += max(self.clock.now_s - self._since_s.pop(name) - starting_s, 0.0)
        self.joined += 1
        self.places.ready(name)

    @property
    def gone_s(self) -> float:
        """Seconds of released places up to now."""
        starting_s = self.scenario.spot.start_s + self.scenario.spot.load_s
        return self.away_s + sum(
            max(min(self.clock.now_s, self._coming.get(name, math.inf) - starting_s) - since_s, 0.0)
            for name, since_s in self._since_s.items()
        )

    def finish(self) -> None:
        """Book the places that are still released."""
        now_s = self.clock.now_s
        self.away_s = self.gone_s
        self._since_s.clear()
        for empty_s in self._empty_s.values():
            gone_s = max(now_s - empty_s - self.scenario.fleet.idle_timeout_s, 0.0)
            self.saved_s += gone_s * self.scenario.fleet.gpus_per_node
