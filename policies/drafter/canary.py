"""Whether newly swapped weights may stay. Pure: it counts reported measurements, and never moves a weight.

Garbage drafter weights change no token. They only make every step slow, which no one notices. So after each swap, of
the drafter or of the target, acceptance is compared with that before it, strategy by strategy. Only significant
differences count. If one RL step does not settle it, the next ones add to it.
"""

from enum import StrEnum
from typing import Any

from config.drafter import CanaryOptions
from policies.drafter.acceptance import AcceptanceTally
from policies.drafter.lineage import returning

BAD_SIGMAS = 3.0  # below the floor: one in 740 by chance, and a trial is tested 5 times
GOOD_SIGMAS = 2.0  # above the floor
MAX_WAIT = 16  # times min_drafted; a trial that needs more is too near the floor, or too low, to lose much


class CanaryVerdict(StrEnum):
    WAIT = "wait"  # not enough was drafted, or nothing was swapped
    PASS = "pass"  # once per trial
    ROLL_BACK = "roll_back"  # once, for a drafter's version: hand out `version`, the last that passed, renumbered
    COLLAPSED = "collapsed"  # once, after a swap of the target alone: there is nothing to roll back to


class Canary:
    """Watches one drafter, whose versions are numbered as in `policies.drafter.lineage`.

    A swap begins a trial. Swaps during a trial of the drafter belong to it, so that versions with few drafts each are
    judged together. It is tested when `min_drafted` tokens were drafted, and at each doubling, since frequent tests
    find false positives. After COLLAPSED the version stays, since only training helps. It is not judged again until the
    next swap.
    """

    def __init__(self, options: CanaryOptions, version: int = 0) -> None:
        """`version`: what the engines draft with now; it counts as good."""
        self._options = options
        self._good = self._current = self._newest = version
        self._reference = AcceptanceTally()  # before the swap; older swaps have less weight
        self._tally = AcceptanceTally()  # since the swap
        self._look_at = options.min_drafted  # drafted tokens
        self._on_trial = False
        self._rolled_back: list[int] = []

    @property
    def version(self) -> int:
        """The version that engines must draft with."""
        return self._current

    @property
    def good(self) -> int:
        """The last version that passed. A roll-back restores it, under a new number."""
        return self._good

    @property
    def newest(self) -> int:
        """The largest version so far. Only larger ones are handed out."""
        return self._newest

    @property
    def rolled_back(self) -> tuple[int, ...]:
        """The versions that were rolled back, in order."""
        return tuple(self._rolled_back)

    def offer(self, version: int) -> bool:
        """Offer weights of `version` from a trainer. Returns true if they are to be handed out, on trial. False if they
        were offered before, are older, or belong to an abandoned lineage."""
        if version <= self._newest:
            return False
        if self._current == self._good:
            self._begin_trial()
        self._newest = self._current = version
        return True

    def trust(self, version: int) -> None:
        """Accept these weights without comparison, since those that the engines had are lost."""
        self._good = self._current = self._newest = version
        self._reference, self._tally, self._on_trial = AcceptanceTally(), AcceptanceTally(), False

    def new_target(self) -> None:
        """Note a swap of the target's weights. A trial in progress continues with its counts; otherwise a new one
        begins."""
        if not self._on_trial:
            self._begin_trial()

    def observe(self, version: int, strategy: str, drafted: int, accepted: int) -> CanaryVerdict:
        """Add drafted and accepted tokens of engine steps under `version`. Counts of other versions than the current
        one are late, and ignored."""
        if version != self._current:
            return CanaryVerdict.WAIT
        self._tally.add(strategy, drafted, accepted)
        return self._judge() if self._on_trial else CanaryVerdict.WAIT

    def _begin_trial(self) -> None:
        """Begin a trial. The good version's counts so far become the reference for it."""
        if self._tally.drafted:
            self._reference = self._reference.faded().with_(self._tally)
        self._tally, self._look_at, self._on_trial = AcceptanceTally(), self._options.min_drafted, True

    def _judge(self) -> CanaryVerdict:
        drafted = self._tally.drafted
        if drafted < self._look_at:
            return CanaryVerdict.WAIT
        while self._look_at <= drafted:
            self._look_at *= 2
        if not self._reference.drafted:
            return self._passed()
        found = self._tally.against(self._reference, self._options.floor)
        if found is not None and found.sigmas <= -BAD_SIGMAS:
            return self._failed()
        sure = found is not None and found.sigmas >= GOOD_SIGMAS
        return self._passed() if sure or drafted >= MAX_WAIT * self._options.min_drafted else CanaryVerdict.WAIT

    def _passed(self) -> CanaryVerdict:
        self._good = self._current
        self._on_trial = False
        return CanaryVerdict.PASS

    def _failed(self) -> CanaryVerdict:
        self._on_trial = False
        if self._current == self._good:
            self._reference = AcceptanceTally()
            return CanaryVerdict.COLLAPSED
        self._rolled_back.append(self._current)
        self._good = self._current = self._newest = returning(self._good, self._newest)
        self._tally = AcceptanceTally()
        return CanaryVerdict.ROLL_BACK

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "good": self._good,
            "current": self._current,
            "newest": self._newest,
            "before": self._reference.to_json(),
            "since": self._tally.to_json(),
            "look_at": self._look_at,
            "on_trial": self._on_trial,
            "rolled_back": self._rolled_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._good, self._current, self._newest = state["good"], state["current"], state["newest"]
        self._reference, self._tally = (
            AcceptanceTally.from_json(state["before"]),
            AcceptanceTally.from_json(state["since"]),
        )
        self._look_at, self._on_trial = int(state["look_at"]), bool(state["on_trial"])
        self._rolled_back = list(state["rolled_back"])
