"""What a response to a prompt will cost now, though the prompt was last seen an epoch ago. Owns what is remembered of
lengths for the budget; thresholds have their own window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.lengths import LengthModel

_RETAINED = 0.8  # of what earlier steps say of the tokens that giving up saves, at each further step


@dataclass(frozen=True, slots=True)
class Visit:
    """The responses to one prompt in one RL step. At least one."""

    prompt_id: int
    tokens: Sequence[int]  # of each response, as far as it went
    propensities: Sequence[float]  # with which its rule let such a response go on; 1: it was not late
    given_up: Sequence[bool]


class ExpectedLengths:
    """Tokens spent on a response = the prompt's own length, relative to all, times the level of all lengths now.

    Lengths drift as the policy learns, and an epoch is many steps: a prompt's last length alone would be too small by
    what all have grown since, and every budget overspent. So the prompt's is kept in units of the level of its visit
    (exponential mean over visits; new prompts: the mean of the known), and the level follows what steps spend: times
    sqrt(spent / expected at the counts that came), which halves the noise of a step and is two steps behind.
    """

    def __init__(self, default_tokens: float) -> None:
        """`default_tokens`: of a response, before any has been seen."""
        self._relative = LengthModel(default_tokens)
        self._level = 1.0
        self._seen = False
        # Of visits, each a mean: tokens of those not late; late ones; kept ones, weighed; their tokens, weighed.
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._spent = 0.0  # likewise all tokens

    def expected_tokens(self, prompt_id: int) -> float:
        """Spent on a response to the prompt, what its rule saves taken off."""
        return self._relative.expected_tokens(prompt_id) * self._level

    @property
    def natural(self) -> float:
        """What responses would cost if none were given up, relative to what they do cost; 1 at least. The late ones
        that went on stand for all late ones, each visit counting alike."""
        early, late, kept, kept_tokens = self._sums
        if not (kept and self._spent):
            return 1.0
        return max(1.0, (early + late * kept_tokens / kept) / self._spent)

    def observe(self, visits: Sequence[Visit]) -> None:
        """All of one RL step, in the canonical order of their prompts."""
        if not visits:
            return
        expected = sum(len(visit.tokens) * self.expected_tokens(visit.prompt_id) for visit in visits)
        if self._seen:
            self._level *= float(np.sqrt(sum(sum(visit.tokens) for visit in visits) / expected))
        self._seen = True
        self._sums, self._spent = [_RETAINED * each for each in self._sums], _RETAINED * self._spent
        for visit in visits:
            tokens, given_up, count = np.array(visit.tokens, float), np.array(visit.given_up), len(visit.tokens)
            weights = 1 / np.array(visit.propensities)
            late = given_up | (weights > 1)
            kept = np.where(late & ~given_up, weights, 0.0)
            own = (tokens[~late].sum(), late.sum(), kept.sum(), (kept * tokens).sum())
            self._sums = [whole + float(part) / count for whole, part in zip(self._sums, own, strict=True)]
            self._spent += float(tokens.mean())
            self._relative.observe(visit.prompt_id, float(tokens.mean()) / self._level)

    def state_dict(self) -> dict[str, Any]:
        """JSON; floats survive it."""
        state = {"level": self._level, "seen": self._seen, "sums": self._sums, "spent": self._spent}
        return {"relative": self._relative.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._relative.load_state_dict(state["relative"])
        self._level, self._seen, self._spent = float(state["level"]), bool(state["seen"]), float(state["spent"])
        self._sums = [float(each) for each in state["sums"]]
