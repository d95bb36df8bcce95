"""Whether a network that drafts has fallen silent: nothing of it is accepted, or half of what was. Pure: it counts what
others measure, and decides nothing.

A garbage head changes no token. A chooser switches it off, and the run is slow for no visible reason. The canary
(`policies.drafter.canary`) takes new weights of a trained drafter back; of a frozen one nobody else says a word.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from policies.drafter.acceptance import AcceptanceTally

MIN_DRAFTED = 256  # tokens without an accepted one: at a tenth of drafts right, one head in 800 is so unlucky
REFERENCE_DRAFTED = 2048  # tokens of the first measurement, which later ones are compared with
RECENT_STEPS = 4  # are compared together
FLOOR = 0.5  # of the acceptance at first
SURE_SIGMAS = 4.0  # below the floor: a long run looks hundreds of times


@dataclass(frozen=True, slots=True)
class Silence:
    """One drafter, told once. share: of its acceptance at first, 0 where it never had any."""

    drafter: str
    kind: Literal["silent", "fallen"]
    drafted: int
    share: float


class SilenceWatch:
    """Watches drafters by name, of which some are trained as the run goes on: those are the canary's, but for one that
    was never right in sixteen times as many tokens."""

    def __init__(self, names: Iterable[str], trained: Iterable[str] = ()) -> None:
        self._names, self._trained = frozenset(names), frozenset(trained)
        self._all: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
        self._first: dict[str, AcceptanceTally] = defaultdict(AcceptanceTally)
        self._recent: dict[str, deque[AcceptanceTally]] = defaultdict(partial(deque, maxlen=RECENT_STEPS))
        self._told: set[str] = set()

    def step(self, strategies: Iterable[tuple[str, int, int]]) -> list[Silence]:
        """(strategy, drafted, accepted) of an RL step -> what is certain now and was not told yet."""
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
