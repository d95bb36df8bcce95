"""A curriculum by success rate: a coin decides at a prompt's turn, in favour of success rates near
`rollout.skip.target`.

Owns the statistics of a prompt's successes, never the order of the prompts. A group of n responses has signal by the
spread of its rewards, p (1 - p) for a success rate p. So prompts solved always or never have none (Foster and Foerster
2025, "Learning to Reason at the Frontier of Learnability", arXiv 2502.12272, samples by p (1 - p)). Here the chance
falls linearly from 1 at the target to `keep` at 0 and 1. A target above a half begins with easy prompts, and harder
ones come into reach as the policy learns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from config.token_budget import SkipOptions
from policies.token_budget.skip import PromptSkip, coin

BIAS = (
    "rollout.skip.target: prompts are sampled the less, the further their success rate lies from it, and not weighted "
    "for it, so that they count less than the others"
)
FADE = 0.5  # weight of a prompt's successes at each further group, since the policy has changed
KNOWN = 4.0  # responses that a success rate from before the run counts for


class PromptCurriculum:
    """The curriculum of all prompts. Groups of a prompt must come in the order of its visits. State is plain JSON."""

    def __init__(
        self, options: SkipOptions, seed: int, *, right_from: float = 1.0, known: Mapping[int, float] | None = None
    ) -> None:
        """`seed`: of the run. `right_from`: reward of a success. `known`: success rates from before the run, by prompt.
        Raises ValueError without a target."""
        if options.target is None:
            raise ValueError("rollout.skip.target is not set")
        self._target, self._keep, self._seed, self._right_from = options.target, options.keep, seed, right_from
        self._past = {prompt_id: (KNOWN * rate, KNOWN) for prompt_id, rate in (known or {}).items()}

    def chance(self, prompt_id: int) -> float:
        """Return the probability that the prompt is sampled at its turn; 1 while nothing is known of it."""
        if prompt_id not in self._past:
            return 1.0
        right, count = self._past[prompt_id]
        rate = right / count
        near = rate / self._target if rate < self._target else (1.0 - rate) / (1.0 - self._target)
        return max(self._keep, near)

    def passes_over(self, epoch: int, prompt_id: int) -> bool:
        """Whether the prompt is skipped in this epoch. Deterministic given the same past."""
        return coin(self._seed, epoch, prompt_id) >= self.chance(prompt_id)

    def observe(self, prompt_id: int, rewards: Sequence[float]) -> None:
        """Add a group's rewards as graded, without any shaping."""
        if not rewards:
            return
        right, count = self._past.get(prompt_id, (0.0, 0.0))
        found = sum(reward >= self._right_from - 1e-9 for reward in rewards)
        self._past[prompt_id] = (FADE * right + found, FADE * count + len(rewards))

    def state_dict(self) -> dict[str, Any]:
        return {"successes": {str(prompt_id): list(past) for prompt_id, past in sorted(self._past.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. One without successes, from a run without a curriculum, keeps the rates from
        before the run."""
        if "successes" in state:
            self._past = {int(prompt_id): (float(r), float(n)) for prompt_id, (r, n) in state["successes"].items()}


Skipping = PromptSkip | PromptCurriculum  # decides which prompts are skipped at their turn
