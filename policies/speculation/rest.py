"""When an engine decodes plainly without looking for anything better.

Choosing and learning take time of each engine step that no drafter's account shows. Beside steps of a large model it is
nothing; a model of 0.6M parameters loses a tenth. After a rollout in which drafts saved less than that, the next one
rests: nothing is chosen or booked, and what plain steps take is learned from a sample. Where drafts still do not pay,
the next four rest, then sixteen. Drafters hear of requests all the time, so an index knows what was decoded meanwhile.
"""

from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.policy import StrategyPolicy
from policies.speculation.toggle import RooflinePolicy

FREE = 0.03  # of decode time: what choosing and learning may take, whether drafts save anything or not
ENOUGH_STEPS = 64  # of decoding, for a verdict: shorter rollouts are judged together
LONGER, LONGEST = 4, 16  # times the last rest; rollouts


class Rest:
    """The rests of one engine. Reads no clock."""

    def __init__(self) -> None:
        self._left, self._next = 0, 1  # rollouts to rest, of this rest and of the next
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._decoded_s = self._saved_s = self._chose_s = 0.0

    @property
    def on(self) -> bool:
        return self._left > 0

    def decoded(self, seconds: float, saved_s: float, chose_s: float) -> None:
        """Add a step of a training rollout, what its drafts saved, and the seconds of choosing and learning."""
        self._steps += 1
        self._decoded_s += seconds
        self._saved_s += saved_s
        self._chose_s += chose_s

    def corrected(self, saved_s: float) -> None:
        """Add to what was saved."""
        self._saved_s += saved_s

    def wake(self) -> None:
        """End the rest: a drafter that had failed is back."""
        self._left, self._next = 0, 1

    def ended(self) -> None:
        """A rollout has ended: no request is left, or its weights are replaced."""
        if self._steps < ENOUGH_STEPS:
            return
        if self._left:
            self._left -= 1
        elif self._chose_s > FREE * self._decoded_s and self._saved_s < self._chose_s:
            self._left, self._next = self._next, min(LONGER * self._next, LONGEST)
        else:
            self._next = 1
        self._begin()


def may_rest(policy: StrategyPolicy | None) -> bool:
    """Whether an engine may leave it unasked for whole rollouts: not a fixed strategy, nor Algorithm 1 as printed."""
    return isinstance(policy, AdaptivePolicy | RooflinePolicy)
