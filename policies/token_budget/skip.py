"""Skip prompts that have had no signal for a while: a coin decides at their turn.

Owns the record of a prompt's groups, and the coin, never the order of the prompts. A prompt is *settled* when its last
`after` groups all had the same reward: it is always solved, or never. Settled prompts are sampled with probability
`keep` at their turn, so that a change is noticed. A single group with two different rewards, or with another reward,
unsettles it.

The relative is GRESO (Zheng et al. 2025, "Act Only When It Pays", arXiv 2506.02177). There the probability falls
geometrically with the number of such groups in a row and is controlled to a target share of groups without spread. A
round is sampled again until the batch is full. Here it is constant, and the order goes on to the next prompt.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from config.token_budget import SkipOptions
from policies.advantages import TIE, has_zero_variance

BIAS = (
    "rollout.skip: prompts that were always or never solved lately are sampled with probability keep and not weighted "
    "for it, so that they count less than the others"
)


class PromptSkip:
    """The record of all prompts. Groups of a prompt must come in the order of its visits. State is plain JSON."""

    def __init__(self, options: SkipOptions, seed: int) -> None:
        """`seed`: of the run."""
        self._after, self._keep, self._seed = options.after, options.keep, seed
        self._settled: dict[int, tuple[int, float]] = {}  # by prompt: groups in a row, and their common reward

    def passes_over(self, epoch: int, prompt_id: int) -> bool:
        """Whether the prompt is skipped in this epoch. Deterministic given the same past."""
        groups, _ = self._settled.get(prompt_id, (0, 0.0))
        return self._after is not None and groups >= self._after and coin(self._seed, epoch, prompt_id) >= self._keep

    def observe(self, prompt_id: int, rewards: Sequence[float]) -> None:
        """Add a group's rewards as graded, without any shaping. Fewer than two are ignored."""
        if len(rewards) < 2:
            return
        if not has_zero_variance(rewards):
            self._settled.pop(prompt_id, None)
            return
        groups, reward = self._settled.get(prompt_id, (0, rewards[0]))
        same = abs(rewards[0] - reward) <= TIE * max(1.0, abs(reward))
        self._settled[prompt_id] = (groups + 1, reward) if same else (1, rewards[0])

    def state_dict(self) -> dict[str, Any]:
        return {str(prompt_id): [groups, reward] for prompt_id, (groups, reward) in sorted(self._settled.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        settled = {} if "successes" in state else state  # the state of a curriculum has no groups
        self._settled = {
            int(prompt_id): (int(groups), float(reward)) for prompt_id, (groups, reward) in settled.items()
        }


def coin(seed: int, epoch: int, prompt_id: int) -> float:
    """Return a number in [0, 1) from a separate stream, independent of every response and every other draw of a run."""
    digest = hashlib.blake2b(struct.pack("<3q", seed, epoch, prompt_id), digest_size=8, person=b"paceline-skip")
    return float(int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53
