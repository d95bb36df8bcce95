"""The fleet of one run: its workers and their places, adjusted toward the wanted number at every look.

Owns the workers' names, their places in the cluster and the nodes that get none. `policies.fleet` decides the number of
workers, and the dispatcher moves requests, weights and engines. Nothing here waits: places are requested, and taken
when they exist.

Names: a worker that joins or replaces another takes the lowest free number. So names are `rollout-0` to `rollout-<max -
1>`, and a few above while others drain.
"""

from dataclasses import dataclass
from math import inf

from actors.placement import Placement
from contracts.rollout import EngineWindow
from launch.cluster.versions import NodeVersions
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher, SeatState, worker_name
from launch.drafter.training import DrafterTraining
from launch.failover import FailoverLearner
from launch.fleet.autoscaler import Autoscaler
from launch.fleet.timings import FleetTimings
from policies.fleet import IDLE_S, FleetNow, wanted_workers

LOOK_S = 0.25  # between two looks
PATIENCE_S = 5.0  # a place missing for longer is reported
MOST_ASKED = 16  # places requested at once: each costs queries to Ray
_UP = (SeatState.READY, SeatState.LOADING)
_COMING = (SeatState.STARTING, SeatState.LOADING)
_RARELY_S = 2.0  # between two checks for a place that is missing for long


@dataclass(frozen=True, slots=True)
class FleetState:
    """The fleet at one moment: names of workers, and nodes by id."""

    up: tuple[str, ...]
    starting: tuple[str, ...]
    leaving: tuple[str, ...]
    asked: tuple[str, ...]  # they join when the cluster has room
    drained: dict[str, str]  # nodes that get no worker, and why

    def counts(self) -> dict[str, int]:
        """Workers by state."""
        return {
            "up": len(self.up),
            "starting": len(self.starting),
            "leaving": len(self.leaving),
            "asked": len(self.asked),
        }


class Fleet:
    """The fleet, for the driver's thread."""

    def __init__(
        self,
        dispatcher: RolloutDispatcher,
        placement: Placement,
        learner: FailoverLearner,
        versions: NodeVersions,
        training: DrafterTraining | None,
        autoscaler: Autoscaler,
        context: RunContext,
    ) -> None:
        """`training`: of drafters, by workers without requests. Events: node_drained, node_returned,
        worker_unplaced."""
        self._dispatcher, self._placement, self._learner, self._training = dispatcher, placement, learner, training
        self._count, self._slots = context.config.rollout.workers, context.config.rollout.engine.max_running
        self._config, self._observer, self._clock = context.config, context.observer, context.clock
        several = self._config.eval_sets or self._config.objective.dynamic_sampling.max_rounds > 1
        self._more = int(bool(several))  # more than one rollout in a step
        self.timings = FleetTimings()
        self._autoscaler, self._versions = autoscaler, versions
        self._drained: dict[str, list[str]] = {}  # node id: reasons
        self._asked: dict[str, float] = {}  # by name: time since which a place is requested ...
        self._check_s: dict[str, float] = {}  # ... and the time of the next check for it
        self._starting: dict[str, float] = {}  # time since which it starts
        self._idle: dict[str, float] = {}  # time since which it has no request
        self._up: set[str] = set()
        self._unplaced = False  # reported since the last join
        self._held_back = False
        self._rolling, self._began_s = False, self._clock()
        self._begun = -1  # `rollouts_left` when the last one began
        self._looked_s = self._clock()
        self._held = 0  # workers that have a place
        self._staying = 0  # including dead ones: without restarts left the maximum falls for good
        self._worker_s = self._idle_s = 0.0
        self._joined = self._left = 0

    def start(self) -> None:
        """Start the workers that the run needs to begin. Raises as the dispatcher does."""
        begin_s = self._clock()
        self._dispatcher.start()
        self._looked_s = self._clock()
        self.timings.started(self._looked_s - begin_s)
        workers = self._dispatcher.workers()
        self._held = len(workers)
        self._came({name for name, now in workers.items() if now.state in _UP}, 0.0)
        self._joined = 0

    def close(self) -> None:
        """Release everything at the end of the run."""
        self._autoscaler.close()

    # Called by the run.

    def begins(self, kind: str) -> None:
        """A rollout begins."""
        self._rolling, self._begun, self._began_s = True, self.rollouts_left, self._clock()
        self.timings.begins(kind, self._began_s)

    def ends(self, tokens: int) -> None:
        """The rollout has ended. `tokens`: of its responses."""
        self._rolling = False
        self.timings.ends(tokens, self._clock())

    def hold_back(self, holds: bool) -> None:
        """Stop requesting places while the learner needs one again, and drop pending requests: Ray might give them what
        the learner waits for, and no worker could start there."""
        self._held_back = holds
        if holds:
            self._ask(0)

    @property
    def startable(self) -> bool:
        """Whether engines may start. In layout colocated a starting engine would take a working learner's memory."""
        colocated = self._config.cluster.layout == "colocated"
        return not (colocated and self._learner.busy) or self._held_back

    @property
    def rollouts_left(self) -> int:
        """The rollouts that the run still has, including one in progress or the last of its step."""
        run, staleness = self._config.run, self._config.rollout.staleness
        return run.steps - self._observer.current_step + 1 + self._more - staleness

    def make_way(self) -> None:
        """Make room for the learner: one worker at a time leaves, if its node could hold a rank. At least one worker
        stays, since the run needs it too."""
        workers = self._dispatcher.workers()
        staying = [name for name, now in workers.items() if not now.retiring and now.state is not SeatState.DEAD]
        if len(staying) < 2 or any(now.retiring for now in workers.values()):
            return
        if found := self._placement.in_the_way(staying):
            name = max(found, key=lambda name: (not workers[name].running, _number(name)))
            self._dispatcher.leave(name, "the learner needs its room")

    def window(self, window: EngineWindow) -> None:
        """A worker has sampled."""
        if window.decode_tokens:
            seconds = window.end_s - window.start_s
            self.timings.window(window.decode_tokens, seconds, waiting=self._dispatcher.waiting[0] > 0)

    def look(self) -> None:
        """Look, if it is time to."""
        if self._clock() >= self._looked_s + LOOK_S:
            self._look()

    # Nodes.

    def drain(self, node_id: str, reason: str) -> None:
        """Place nothing on this node any more. Its workers leave with their tokens, and others replace them
        elsewhere."""
        known = node_id in self._drained
        reasons = self._drained.setdefault(node_id, [])
        if reason not in reasons:
            reasons.append(reason)
        if not known:
            self._ask(0)  # requests from now on avoid the node
            self._observer.event("node_drained", f"node {node_id[:8]}: {reason}")
            for name in self._starting_on(node_id):
                self._dispatcher.leave(name, f"its node is drained ({reason})")
        self._look()

    def admit(self, node_id: str, reason: str) -> None:
        """Remove one reason to drain the node. Without another reason it is used again."""
        known = self._drained.get(node_id, [])
        if known == [reason]:
            del self._drained[node_id]
            self._ask(0)  # pending requests may find room there
            for name in self._starting_on(""):
                if not self._placement.ready(name):
                    self._dispatcher.leave(name, "it waits for room on other nodes")
            self._look()
            self._observer.event("node_returned", f"node {node_id[:8]} can have workers again")
        elif reason in known:
            known.remove(reason)

    def held(self, node_id: str) -> list[str]:
        """Return the workers on the node that may still have requests. A leaving worker counts until it has returned
        its requests."""
        workers = self._dispatcher.workers().items()
        return [name for name, now in workers if now.node_id == node_id and now.state is not SeatState.CLOSING]

    def empty(self, node_id: str) -> bool:
        """Whether no worker is on the node, or may come up there."""
        workers = self._dispatcher.workers().values()
        if any(now.node_id == node_id and now.state is not SeatState.DEAD for now in workers):
            return False
        return not self._starting_on(node_id, "")

    def _starting_on(self, *node_ids: str) -> list[str]:
        """Return the starting workers whose places are on these nodes; "": workers without a known node."""
        starting = [name for name, now in self._dispatcher.workers().items() if now.state is SeatState.STARTING]
        return [name for name, node_id in self._placement.nodes(starting).items() if node_id in node_ids]

    @property
    def handing_back(self) -> bool:
        """Whether workers are returning their requests, which arrive only while the driver listens."""
        return self._dispatcher.handing_back

    # Reports about it.

    def forget(self, node_id: str) -> None:
        """Forget a node that has left. If its machine comes back, Ray gives it a new id."""
        self._drained.pop(node_id, None)

    @property
    def state(self) -> FleetState:
        workers = self._dispatcher.workers()
        return FleetState(
            up=tuple(name for name, now in workers.items() if not now.retiring and now.state in _UP),
            starting=tuple(name for name, now in workers.items() if now.state is SeatState.STARTING),
            leaving=tuple(name for name, now in workers.items() if now.retiring),
            asked=tuple(self._asked),
            drained={node_id: reasons[0] for node_id, reasons in self._drained.items()},
        )

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        self._look()
        metrics = {
            "fleet/workers": float(len(self._up)),
            "fleet/worker_seconds": self._worker_s,
            "fleet/idle_seconds": self._idle_s,
            "fleet/joined": float(self._joined),
            "fleet/left": float(self._left),
        }
        self._worker_s = self._idle_s = 0.0
        self._joined = self._left = 0
        return metrics

    # A look.

    def _look(self) -> None:
        """List the workers once, and query Ray about each group of places once."""
        now_s, elapsed_s = self._clock(), self._account()
        with self._placement.look():
            workers = self._dispatcher.workers()
            for name in list(self._placement.placed() - workers.keys() - self._asked.keys()):
                self._placement.let_go(name)
            before, self._idle = self._idle, {}
            up, dead = set[str](), list[str]()
            self._held = self._staying = coming = 0
            for name, now in workers.items():
                state = now.state
                if state is SeatState.DEAD:
                    dead.append(name)
                    self._staying += not now.retiring
                    continue
                self._held += 1
                if now.retiring:
                    continue
                if state in _UP:
                    up.add(name)
                # A worker that loads weights has no requests. It must not leave, as others may be receiving the same
                # pieces.
                if now.node_id in self._drained and state is not SeatState.LOADING:
                    self._dispatcher.leave(name, f"its node is drained ({self._drained[now.node_id][0]})")
                    continue
                self._staying += 1
                coming += state in _COMING
                if state in _UP and not now.running:
                    self._idle[name] = before.get(name, now_s)
            if self._training is not None:
                ready = (since_s for name, since_s in self._idle.items() if workers[name].state is SeatState.READY)
                self._training.idle([now_s - max(self._began_s, since_s) for since_s in ready], self._dispatcher)
            self._came(up, elapsed_s)
            self._starting = {name: since_s for name, since_s in self._starting.items() if name in workers}
            for name in self._placement.placed() & set(dead):
                self._placement.let_go(name)
            self._adjust(len(dead), coming)

    def _adjust(self, dead: int, coming: int) -> None:
        """Adjust the number of staying workers to the wanted one. `dead`, `coming`: workers that are dead,
        or come up."""
        alive = self._staying - dead
        wanted = self._wanted(alive, coming)
        self._staying -= self._release(alive - wanted)
        startable = self.startable
        if startable:
            self._settle()
        self._ask(min(wanted, self._count.max - dead) - (self._staying - dead))
        if startable and not self._staying:  # the run waits for a worker, for cluster.start_timeout_s
            for name in list(self._asked)[:1]:
                self._join(name, self._clock())
        if self._count.elastic:  # otherwise its pending places say enough
            self._autoscaler.want(wanted)

    @property
    def _scaled(self) -> bool:
        """Whether a worker may wait for a node that is being started, which then takes time at every join."""
        return self._autoscaler.there

    def _wanted(self, workers: int, coming: int) -> int:
        now_s = self._clock()
        waiting, tokens = self._dispatcher.waiting
        unheld = max(waiting - self._slots * coming, 0)
        if self._rolling:
            self.timings.looked(unheld, now_s)
        left = self.rollouts_left
        left -= left == self._begun
        now = FleetNow(
            workers=workers,
            idle_s=[now_s - since_s for since_s in self._idle.values()],
            waiting=unheld,
            waiting_tokens=tokens * unheld / waiting if waiting else 0.0,
            next_tokens=self.timings.next_tokens,
            next_in_s=self.timings.next_in_s(now_s) if left > 0 else inf,
            between_s=self.timings.between_s,
            rollouts_left=max(left, 0),
            tokens_per_s=self.timings.tokens_per_s,
            start_s=self.timings.start_s,
            training=self._training is not None and (self._training.trains or self._training.may_begin),
        )
        return wanted_workers(now, least=self._count.min, most=self._count.max)

    def _account(self) -> float:
        """Add up worker seconds since the last look. Returns that time."""
        now_s = self._clock()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        self._worker_s += elapsed_s * self._held
        self._idle_s += elapsed_s * len(self._idle)
        return elapsed_s

    def _came(self, up: set[str], elapsed_s: float) -> None:
        """Note which workers are up now."""
        now_s = self._clock()
        for name in up - self._up:
            since_s = self._starting.pop(name, None)
            if since_s is not None and elapsed_s < 4 * LOOK_S:  # otherwise it may have been up for long
                self.timings.started(now_s - since_s)
        self._joined += len(up - self._up)
        self._left += len(self._up - up)
        self._up = up

    def _release(self, count: int) -> int:
        """Let up to `count` idle workers go, first those with a place of their own. Returns their number."""
        if count <= 0:
            return 0
        long = [name for name, since_s in self._idle.items() if self._clock() - since_s >= IDLE_S]
        gone = sorted(long, key=lambda name: (not self._placement.own(name), -_number(name)))[:count]
        for name in gone:
            self._dispatcher.leave(name, "there is nothing to do until it can be back")
        return len(gone)

    def _settle(self) -> None:
        """Start the workers whose places exist."""
        now_s = self._clock()
        for name, since_s in list(self._asked.items()):
            if now_s < self._check_s[name]:
                continue
            self._check_s[name] = now_s + min((now_s - since_s) / 4, _RARELY_S)
            if self._placement.ready(name):
                if not self._versions.vouched(self._placement.node(name)):
                    self._check_s[name] = now_s + LOOK_S
                    continue
                self._unplaced = False
                self._join(name, since_s if self._scaled else now_s)
            elif now_s - since_s > PATIENCE_S and not self._unplaced:
                self._unplaced = True
                alone = "" if self._scaled else " (nobody adds nodes to this cluster by itself)"
                missing = self._placement.missing(name)
                self._observer.event("worker_unplaced", f"{name} joins when the cluster has room{alone}: {missing}")

    def _join(self, name: str, since_s: float) -> None:
        del self._asked[name]
        self._starting[name] = since_s
        self._dispatcher.join(name)
        self._staying += 1
        self._held += 1

    def _ask(self, missing: int) -> None:
        """Keep `missing` places requested, up to the useful number at once."""
        for name in list(self._asked)[max(missing, 0) :]:
            del self._asked[name]
            self._placement.let_go(name)
        most = 0 if self._held_back else min(missing, MOST_ASKED)
        if len(self._asked) >= most:
            return
        taken = self._dispatcher.workers().keys() | self._placement.placed()
        number = 0
        while len(self._asked) < most:
            while (name := worker_name(number)) in taken:
                number += 1
            number += 1
            self._placement.ask(name, avoid=self._drained)
            self._asked[name] = self._check_s[name] = self._clock()


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
