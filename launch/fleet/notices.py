"""Reaction to notices: a node that will be lost gets no new work, and the run saves a checkpoint first if needed.

Owns the reactions to news (feed.py), for the driver's thread. Never waits and queries nothing.

    rollout workers there     leave with all their tokens; others take their place elsewhere (`Fleet.drain`)
    drafter training there    ends, and does not begin again (`Drain` of the coordinator)
    a withdrawn notice        the node is used again
    learner ranks, driver     reported; a checkpoint follows once leaving workers have returned their requests (saving
                              blocks the driver), then one after every RL step, before its evaluation, until the node
                              has gone
"""

from dataclasses import dataclass
from typing import assert_never

from actors.context import Context
from actors.notices.types import SpotNotice, Withdrawn
from actors.notices.watch import Trouble, Watching
from actors.reward_pool import RewardPool
from launch.drafter.training import DrafterTraining
from launch.failover import FailoverLearner
from launch.fleet.feed import Gone, Heard, NoticeFeed, RayDrains
from launch.fleet.fleet import Fleet

LOOK_S = 0.25  # between two checks of what is left on nodes
LEAD_S = 900.0  # a later end is obeyed this long before: the node works until then


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """Save the last complete RL step, unless it is saved, and call `saved`. If there is none yet, it is
    posted again."""


@dataclass(slots=True, kw_only=True)
class _Ending:
    """A node that will be lost."""

    address: str
    what: str  # the reason for which it is drained ...
    said: set[str]  # ... among all announced reasons
    heard_s: float
    obey_at_s: float  # Unix time
    obeyed: bool = False
    vital: bool = False  # a checkpoint was asked for
    cleared: bool = False  # no worker there has requests
    empty: bool = False  # nothing of the run is there, which was reported


class Notices:
    """Reactions to notices. here: the driver's node. training: None if no drafter is trained. others: what works
    besides learner and workers."""

    def __init__(
        self,
        feed: NoticeFeed,
        fleet: Fleet,
        learner: FailoverLearner,
        others: RewardPool,
        training: DrafterTraining | None,
        context: Context,
        *,
        here: str,
    ) -> None:
        """Events: spot_watch, spot_trouble, spot_advice, spot_notice, spot_withdrawn, checkpoint_first, node_cleared,
        node_gone."""
        self._look_s = float("-inf")  # when nodes are checked again
        self._feed, self._fleet, self._learner, self._others = feed, fleet, learner, others
        self._here, self._training, self._loop, self._observer = here, training, context.loop, context.observer
        self._clock, self._wall = context.clock, context.wall
        self._unsaved = False  # a checkpoint is wanted
        self._endings: dict[str, _Ending] = {}  # by node id
        self._said: set[tuple[str, str]] = set()
        self._count = 0
        self._drain_s = 0.0

    def look(self) -> None:
        """Obey pending notices. Call it often, wherever the driver waits."""
        for node_id, ending in self._endings.items():
            if not ending.obeyed and self._wall() >= ending.obey_at_s:
                ending.obeyed = True
                self._obey(node_id, ending)
            if ending.obeyed and not ending.vital and self._vital(node_id):  # a learner may move there later
                ending.vital = self._unsaved = True
                part = "the driver runs" if node_id == self._here else "the learner runs"
                name = _name(node_id, ending.address)
                self._observer.event("checkpoint_first", f"{name}: {part} there: a checkpoint at once")
        if self._clock() >= self._look_s:
            self._look_s = self._clock() + LOOK_S
            for node_id, ending in self._endings.items():
                if ending.obeyed and node_id != self._here:
                    self._look(node_id, ending)
        if self._unsaved and not self._fleet.handing_back:
            self._loop.tell(CheckpointWanted())

    def saved(self) -> None:
        """Note that a checkpoint of the last complete RL step exists."""
        self._unsaved = False

    @property
    def endangered(self) -> bool:
        """Whether the driver's node or a learner's node will be lost: unsaved work may have to be repeated."""
        return any(ending.obeyed and self._vital(node_id) for node_id, ending in self._endings.items())

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        metrics = {"fleet/notices": float(self._count)}
        if self._drain_s:
            metrics["fleet/drain_s"] = self._drain_s
        self._count, self._drain_s = 0, 0.0
        return metrics

    def hear(self, heard: Heard) -> None:
        """Store a notice; `look` reacts to it in time."""
        name = _name(heard.node_id, heard.address)
        match heard.event:
            case Watching(provider, detail):
                said = f"notices of {provider} are listened to" if provider else f"no notices: {detail}"
                self._say("spot_watch", said, f"{said} (first on {name})")
            case Trouble(reason):
                self._say("spot_trouble", reason, f"{name}: {reason}; notices may be missed")
            case SpotNotice(what, ends, at_s):
                if ends:
                    self._ends(heard, what, at_s)
                else:
                    self._observer.event("spot_advice", f"{name}: {what}")
            case RayDrains(at_s):
                self._ends(heard, RayDrains.WHAT, at_s)
            case Withdrawn(what):
                self._stays(heard.node_id, what)
            case Gone():
                self._gone(heard.node_id)
            case _:
                assert_never(heard.event)

    def _ends(self, heard: Heard, what: str, at_s: float | None) -> None:
        known, now_s = self._endings.get(heard.node_id), self._wall()
        obey_at_s = now_s if at_s is None else at_s - LEAD_S
        if known is None:
            self._count += 1
            self._endings[heard.node_id] = _Ending(
                address=heard.address, what=what, said={what}, heard_s=heard.heard_s, obey_at_s=obey_at_s
            )
        elif not known.obeyed and obey_at_s < known.obey_at_s:
            known.what, known.heard_s, known.obey_at_s = what, heard.heard_s, obey_at_s
            known.said.add(what)
        elif what in known.said:  # a lost watcher has started anew
            return
        else:
            known.said.add(what)
        left = "" if at_s is None or at_s <= now_s else f", in {at_s - now_s:.0f} s"
        self._observer.event("spot_notice", f"{_name(heard.node_id, heard.address)}: {what}{left}")

    def _stays(self, node_id: str, what: str) -> None:
        """Withdraw one notice. If no other is left, the node is used normally again."""
        ending = self._endings.get(node_id)
        if ending is None or what not in ending.said:
            return
        ending.said.remove(what)
        name, others = _name(node_id, ending.address), sorted(ending.said)
        self._observer.event(
            "spot_withdrawn", f"{name}: withdrawn: {what}; {f'but {others[0]}' if others else 'it stays'}"
        )
        if others:
            return
        del self._endings[node_id]
        if ending.obeyed:
            self._feed.drained(node_id, False)
            if self._training is not None:
                self._training.undrain(node_id)
            self._fleet.admit(node_id, ending.what)

    def _obey(self, node_id: str, ending: _Ending) -> None:
        if self._training is not None:
            self._training.drain(node_id, ending.what)
        if node_id != self._here:  # the run ends with it; until then its workers are useful
            self._fleet.drain(node_id, ending.what)

    def _vital(self, node_id: str) -> bool:
        return node_id == self._here or node_id in self._learner.nodes

    def _look(self, node_id: str, ending: _Ending) -> None:
        if not ending.cleared and not self._fleet.held(node_id):
            self._cleared(node_id, ending)
        if ending.cleared and not ending.empty and self._empty(node_id):
            ending.empty = True
            self._feed.drained(node_id, True)

    def _empty(self, node_id: str) -> bool:
        """Whether nothing of the run is left on the node, so that its machine may end early. False while the learner is
        being made again: it has no nodes then, and may come up anywhere."""
        learners, others = self._learner.nodes, self._others.nodes
        if not learners or node_id in learners or "" in others or node_id in others:
            return False
        return self._fleet.empty(node_id)

    def _cleared(self, node_id: str, ending: _Ending) -> None:
        ending.cleared = True
        seconds = self._clock() - ending.heard_s
        self._drain_s = max(self._drain_s, seconds)
        self._observer.event(
            "node_cleared",
            f"{_name(node_id, ending.address)}: no worker there has requests {seconds:.1f} s after the notice",
        )

    def _gone(self, node_id: str) -> None:
        self._fleet.forget(node_id)  # it may have been refused without a notice
        ending = self._endings.pop(node_id, None)
        if ending is None:
            return
        if self._training is not None and ending.obeyed:
            self._training.undrain(node_id)
        late = "" if ending.cleared or not ending.obeyed else ", before its workers had left"
        self._observer.event("node_gone", f"{_name(node_id, ending.address)}: has ended, as announced{late}")

    def _say(self, kind: str, key: str, message: str) -> None:
        """Report it once, since many nodes report the same."""
        if (kind, key) not in self._said:
            self._said.add((kind, key))
            self._observer.event(kind, message)


def _name(node_id: str, address: str) -> str:
    return f"node {node_id[:8]}{f' ({address})' if address else ''}"
