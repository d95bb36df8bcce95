"""Whether a drafting network has fallen silent: nothing of it is accepted, or at most half as much as at first. Pure:
it counts reported measurements, and decides nothing.

A garbage head changes no token. The chooser switches it off, and the run is slow for no visible reason. The canary
(`policies.drafter.canary`) rolls back new weights of a trained drafter; for a frozen one this is the only warning.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from policies.drafter.acceptance import AcceptanceTally

MIN_DRAFTED = 256  # tokens without an accepted one: at 10 % acceptance this happens by chance to one head in 800
REFERENCE_DRAFTED = 2048  # tokens of the first measurement, the reference of later ones
RECENT_STEPS = 4  # compared together
FLOOR = 0.5  # of the initial acceptance
SURE_SIGMAS = 4.0  # below the floor: a long run tests hundreds of times


@dataclass(frozen=True, slots=True)
class Silence:
    """One silent drafter, reported once. share: of its initial acceptance, 0 if it never had any."""

    drafter: str
    kind: Literal["silent", "fallen"]
    drafted: int
    share: float


class SilenceWatch:
    """Watches drafters by name. Those trained during the run are the canary's. They are reported only if nothing was
    accepted in sixteen times as many tokens."""

    def __init__(self, names: Iterable[str], trained: Iterable[str] = ()) -> None:
        self._names, self._trained = frozenset(names), frozenset(trained)
        self._all: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
        self._first: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
        self._recent: dict[str, deque[AcceptanceTally]] = defaultdict(partial(deque, maxlen=RECENT_STEPS))
        self._told: set[str] = set()

    def step(self, strategies: Iterable[tuple[str, int, int]]) -> list[Silence]:
        """Take (strategy, drafted, accepted) of an RL step. Returns what is newly certain."""
        by_name: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
        for strategy, drafted, accepted in strategies:
            name = strategy.partition(":")[0]
            if name in self._names and drafted:
                by_name[name].add(strategy, drafted, min(accepted, drafted))
        found = [self._judge(name, tally) for name, tally in sorted(by_name.items())]
        fresh = [one for one in found if one is not None and one.drafter not in self._told]
        self._told |= {one.drafter for one in fresh}
        return fresh

    def _judge(self, name: str, tally: AcceptanceTally) -> Silence | None:
        self._all[name] = whole = self._all[name].with_(tally)
        least = MIN_DRAFTED * (16 if name in self._trained else 1)
        if not any(accepted for _, accepted in whole.counts.values()):
            return Silence(name, "silent", whole.drafted, 0.0) if whole.drafted >= least else None
        if self._first[name].drafted < REFERENCE_DRAFTED:
            self._first[name] = self._first[name].with_(tally)
            return None
        self._recent[name].append(tally)
        now = AcceptanceTally()
        for one in self._recent[name]:
            now = now.with_(one)
        compared = now.against(self._first[name], FLOOR)
        if name in self._trained or compared is None or compared.sigmas > -SURE_SIGMAS:
            return None
        return Silence(name, "fallen", now.drafted, compared.level)
