"""The expected cost of a response to a prompt now, although the prompt was last seen an epoch ago.

Owns the length statistics of the budget; thresholds have their own window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.lengths import LengthModel

_RETAINED = 0.8  # weight of earlier steps in the estimate of tokens saved by giving up, per step


@dataclass(frozen=True, slots=True)
class Visit:
    """The responses to one prompt in one RL step. At least one."""

    prompt_id: int
    tokens: Sequence[int]  # of each response, as far as it came
    propensities: Sequence[float]  # probability that its rule let such a response continue; 1: it was not late
    given_up: Sequence[bool]


class ExpectedLengths:
    """Tokens spent on a response = the prompt's own length, relative to all, times the present level of all lengths.

    Lengths drift as the policy learns, and an epoch has many steps. A prompt's last length alone would miss the growth
    since then, and every budget would be overspent. So the prompt's length is stored in units of the level of its visit
    (exponential mean over visits; new prompts: the mean of the known). The level follows the tokens that steps spend:
    it is multiplied by sqrt(spent / expected at the actual counts), which halves the noise of a step and lags by two
    steps.
    """

    def __init__(self, default_tokens: float) -> None:
        """`default_tokens`: of a response, before any has been seen."""
        self._relative = LengthModel(default_tokens)
        self._level = 1.0
        self._seen = False
        # Sums over visits of means: tokens of responses not late; late ones; kept ones, weighted; their tokens,
        # weighted.
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._spent = 0.0  # likewise all tokens

    def expected_tokens(self, prompt_id: int) -> float:
        """Return the tokens spent on a response to the prompt, after the savings of its rule."""
        return self._relative.expected_tokens(prompt_id) * self._level

    @property
    def natural(self) -> float:
        """The cost of responses if none were given up, relative to the actual cost; at least 1. Late responses that
        continued stand for all late ones, and each visit counts alike."""
        early, late, kept, kept_tokens = self._sums
        if not (kept and self._spent):
            return 1.0
        return max(1.0, (early + late * kept_tokens / kept) / self._spent)

    def observe(self, visits: Sequence[Visit]) -> None:
        """Add all visits of one RL step, in the canonical order of their prompts."""
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
        """Return the state as JSON; floats are kept exactly."""
        state = {"level": self._level, "seen": self._seen, "sums": self._sums, "spent": self._spent}
        return {"relative": self._relative.state_dict(), **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._relative.load_state_dict(state["relative"])
        self._level, self._seen, self._spent = float(state["level"]), bool(state["seen"]), float(state["spent"])
        self._sums = [float(each) for each in state["sums"]]
