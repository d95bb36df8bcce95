"""Whether weights that were just swapped may stay. Pure: it counts what others measure, and never moves a weight.

A drafter whose weights are garbage changes no token; it only makes every step slow, and nobody notices. So after each
swap, of the drafter or of the target, acceptance is compared with what it was before.
"""

from enum import StrEnum
from typing import Any

from policies.drafter.acceptance import Tally
from policies.drafter.options import CanaryOptions

MIN_ACCEPTED = 16  # tokens, that the floor must amount to: fewer are noise
MAX_WAIT = 16  # times min_drafted; an acceptance that takes more to be judged is too low to lose anything


class Verdict(StrEnum):
    WAIT = "wait"  # not enough was drafted, or nothing was swapped
    PASS = "pass"  # once per swap
    ROLL_BACK = "roll_back"  # once, for a drafter's version: hand out `version`, which is the last that passed
    COLLAPSED = "collapsed"  # once, after a swap of the target alone: there is nothing to go back to


class Canary:
    """Watches one drafter, whose versions are its micro-steps.

    A trainer that goes back to older weights counts on from their number; until it has passed the newest that was ever
    offered, what it makes is not handed out. After COLLAPSED the version stays, training is what helps, and it is
    judged no further until the next swap.
    """

    def __init__(self, options: CanaryOptions, version: int = 0) -> None:
        """`version`: what the engines draft with now; it is trusted."""
        self._options = options
        self._good = self._current = self._newest = version
        self._reference: dict[str, float] = {}  # acceptance by strategy before the swap
        self._tally = Tally()  # of the current version with the current target
        self._on_trial = False
        self._rolled_back: list[int] = []

    @property
    def version(self) -> int:
        """What engines are to draft with."""
        return self._current

    @property
    def good(self) -> int:
        """The last version that passed: what a roll-back brings."""
        return self._good

    @property
    def rolled_back(self) -> tuple[int, ...]:
        """Versions that were taken back, in order."""
        return tuple(self._rolled_back)

    def offer(self, version: int) -> bool:
        """A trainer has weights of `version`. True: hand them out, they are on trial; False: they were offered before,
        or are older than some that were."""
        if version <= self._newest:
            return False
        self._settle()
        self._newest = self._current = version
        self._on_trial = True
        return True

    def new_target(self) -> None:
        """The target's weights were swapped. A drafter on trial stays on trial; another one is on trial again."""
        if self._current == self._good:
            self._settle()
            self._on_trial = True
        self._tally = Tally()

    def observe(self, version: int, strategy: str, drafted: int, accepted: int) -> Verdict:
        """Drafted and accepted tokens of engine steps under `version`; of other versions than the current one they are
        late, and left out."""
        if version != self._current:
            return Verdict.WAIT
        self._tally.add(strategy, drafted, accepted)
        return self._judge() if self._on_trial else Verdict.WAIT

    def _judge(self) -> Verdict:
        if self._tally.drafted < self._options.min_drafted:
            return Verdict.WAIT
        _, accepted, before = self._tally.against(self._reference)
        least = self._options.floor * before
        significant = least >= MIN_ACCEPTED
        if self._reference and not significant and self._tally.drafted < MAX_WAIT * self._options.min_drafted:
            return Verdict.WAIT
        return self._failed() if significant and accepted < least else self._passed()

    def _passed(self) -> Verdict:
        self._good = self._current
        self._on_trial = False
        return Verdict.PASS

    def _failed(self) -> Verdict:
        self._on_trial = False
        if self._current == self._good:
            self._reference = {}
            return Verdict.COLLAPSED
        self._rolled_back.append(self._current)
        self._current = self._good
        self._tally = Tally()
        return Verdict.ROLL_BACK

    def _settle(self) -> None:
        """What was measured until now is what the next swap is compared with. Of a version that is still on trial
        nothing is known: the reference stays."""
        if not self._on_trial and self._tally.drafted >= self._options.min_drafted:
            self._reference = self._tally.rates()
        self._tally = Tally()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, JSON. Counts of the step in hand are not kept."""
        return {
            "good": self._good,
            "current": self._current,
            "newest": self._newest,
            "reference": self._reference,
            "on_trial": self._on_trial,
            "rolled_back": self._rolled_back,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._good, self._current, self._newest = state["good"], state["current"], state["newest"]
        self._reference, self._on_trial = dict(state["reference"]), bool(state["on_trial"])
        self._rolled_back, self._tally = list(state["rolled_back"]), Tally()
