"""A fleet over a dispatcher, places and a clock that are a test's own."""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from config.rollout import WorkerCount
from launch.dispatch import SeatState, WorkerNow
from launch.fleet.autoscaler import Autoscaler
from launch.fleet.fleet import Fleet
from tests.context import run_context

GROUP = SimpleNamespace(strategy="STRICT_PACK", bundles=({"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0}))
LEARNER = SimpleNamespace(strategy="PACK", bundles=({"CPU": 1.0}, {"CPU": 1.0}))
PLAN: Any = SimpleNamespace(groups=(LEARNER, GROUP), workers=("planned",), further=(GROUP, "slot"))


@dataclass
class Cluster:
    """Nodes with room for so many workers each, and the placement that reserves there."""

    room: dict[str, int]
    planned: int = 1
    places: dict[str, str] = field(default_factory=dict)  # worker: node; "": it waits
    avoided: dict[str, Collection[str]] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)  # nodes that could hold a learner rank

    def ask(self, name: str, avoid: Collection[str] = ()) -> None:
        assert name not in self.places
        self.places[name], self.avoided[name] = "", set(avoid)

    def ready(self, name: str) -> bool:
        for node, room in self.room.items():
            if not self.places[name] and node not in self.avoided[name]:
                taken = sum(where == node for where in self.places.values())
                self.places[name] = node if taken < room else ""
        return self.places[name] != ""

    def look(self) -> Any:
        return nullcontext()

    def node(self, name: str) -> str:
        return self.places[name]

    def nodes(self, names: Collection[str]) -> dict[str, str]:
        return {name: self.places[name] for name in names}

    def own(self, name: str) -> bool:
        return int(name.rpartition("-")[2]) >= self.planned

    def placed(self) -> Any:
        return self.places.keys()

    def let_go(self, name: str) -> None:
        del self.places[name]

    def in_the_way(self, names: Collection[str]) -> list[str]:
        return [name for name in names if self.places[name] in self.large and self.own(name)]

    def missing(self, name: str) -> str:
        return "missing on every node: all (GPU: 1 needed)"


STEPS = 20


def config_of(count: WorkerCount) -> Any:
    return SimpleNamespace(
        rollout=SimpleNamespace(workers=count, engine=SimpleNamespace(max_running=4), staleness=0),
        cluster=SimpleNamespace(layout="colocated"),
        eval_sets={},
        objective=SimpleNamespace(dynamic_sampling=SimpleNamespace(max_rounds=1)),
        run=SimpleNamespace(steps=STEPS),
    )


class Asked(Autoscaler):
    """An autoscaler whose requests are kept in `demands`."""

    def __init__(self, demands: list[Any], *, there: bool = True) -> None:
        self._demands = demands
        super().__init__(PLAN, there=there)

    def _request(self, wanted: list[dict[str, float]]) -> None:
        self._demands.append(wanted)


class World:
    """One run's: workers are up `start_s` after they join, and gone at once when they leave."""

    def __init__(
        self,
        count: WorkerCount,
        room: dict[str, int],
        *,
        start_s: float = 4.0,
        vouched: Any = None,
        scaled: bool = False,
    ) -> None:
        self.now_s, self.start_s, self.count = 0.0, start_s, count
        self.cluster = Cluster(room, planned=count.min)
        self.up_s: dict[str, float] = {}
        self.running: dict[str, int] = {}
        self.waiting = (0, 0.0)
        self.handing_back = False
        self.dead: set[str] = set()  # their restarts are used up
        self.loading: set[str] = set()  # weights
        self.startable = True
        self.events: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self.listed = 0
        self.demands: list[Any] = []
        self.trains = False
        self.may_begin = False
        self.idle_s: list[list[float]] = []  # of workers without requests, as the training was told
        context = run_context(
            config_of(count),
            on_event=lambda kind, message: self.events.append((kind, message)),
            clock=lambda: self.now_s,
        )
        self._observer: Any = context.observer
        self.rollouts_left = 10
        autoscaler = Asked(self.demands, there=scaled)
        versions: Any = SimpleNamespace(vouched=vouched or (lambda node: True))
        world: Any = self  # dispatcher, learner and training
        self.fleet = Fleet(world, self.cluster, world, versions, world, autoscaler, context)
        self.fleet.start()

    @property
    def busy(self) -> bool:
        """A learner that shares its GPUs."""
        return not self.startable

    @property
    def rollouts_left(self) -> int:
        return STEPS + 1 - int(self._observer.current_step)

    @rollouts_left.setter
    def rollouts_left(self, left: int) -> None:
        self._observer.current_step = STEPS + 1 - left

    # A dispatcher's.

    def start(self) -> None:
        for index in range(self.count.min):
            self.cluster.ask(f"rollout-{index}")
            assert self.cluster.ready(f"rollout-{index}")
            self.join(f"rollout-{index}")
        self.now_s += self.start_s

    def join(self, name: str) -> None:
        assert name not in self.up_s
        assert self.cluster.places[name] or not self.up_s, "without a place only where there is nobody else"
        self.up_s[name] = self.now_s + self.start_s
        assert len(self.up_s) <= self.count.max

    def leave(self, name: str, reason: str) -> None:
        del self.up_s[name]
        self.running.pop(name, None)
        self.left.append((name, reason))

    def workers(self) -> dict[str, WorkerNow]:
        self.listed += 1
        for name in self.up_s.keys() - self.dead:
            if not self.cluster.places[name] and not self.cluster.ready(name):
                self.up_s[name] = self.now_s + self.start_s  # Ray starts it when there is room
        return {
            name: WorkerNow(
                self._state(name, up_s),
                self.running.get(name, 0),
                self.cluster.places[name] if self.now_s >= up_s and name not in self.dead else "",
                retiring=False,
            )
            for name, up_s in self.up_s.items()
        }

    def _state(self, name: str, up_s: float) -> SeatState:
        if name in self.dead:
            return SeatState.DEAD
        if self.now_s < up_s:
            return SeatState.STARTING
        return SeatState.LOADING if name in self.loading else SeatState.READY

    def idle(self, seconds: list[float], dispatcher: Any) -> None:
        self.idle_s.append(seconds)

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            self.fleet.look()

    def measured(self, *, tokens_per_s: float = 100.0, gap_s: float = 60.0) -> None:
        """Two rollouts went before, with learning between them."""
        for _ in range(2):
            self.fleet.begins("rollout")
            self.fleet.timings.window(int(tokens_per_s * 10), 10.0, waiting=True)
            self.fleet.timings.ends(int(tokens_per_s * 100), self.now_s)
            self.fleet._rolling = False
            self.now_s += gap_s

    def asked(self) -> int:
        return len(self.fleet.state.asked)

    @property
    def names(self) -> list[str]:
        return sorted(self.up_s)


ELASTIC = WorkerCount(min=1, max=3)
