"""Reward shaping by length: near the limit, or relative to other right responses. Owns the formulas; pure numpy.

Source of the first: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.4. Its other remedy, overlong filtering
(truncated responses carry no gradient), needs no formula: `objective.mask_truncated`, applied where sequences are made
for the learner.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def overlong_penalties(
    lengths: Sequence[int], *, max_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """Return `penalty` times DAPO's eq. 13, to be added to the rewards. It is 0 up to max_tokens - buffer_tokens, falls
    linearly to -1 at max_tokens, and is -1 beyond. Lengths in tokens; [n], none above 0.

    verl and NeMo-RL continue to fall beyond max_tokens, which no response of theirs or of ours can reach. Raises
    ValueError for a buffer that is not in 1 .. max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"an overlong buffer of {buffer_tokens} tokens: it must be in 1 .. max_tokens = {max_tokens}")
    over = np.asarray(lengths, dtype=np.float64) - (max_tokens - buffer_tokens)
    return -penalty * np.clip(over / buffer_tokens, 0.0, 1.0)


def concise_rewards(rewards: Sequence[float], lengths: Sequence[int], *, strength: float) -> NDArray[np.float64]:
    """Return one group's shaped rewards, [n]. A reward above 0 is multiplied by exp(-strength * z), with z the length
    standardised over the responses with a reward above 0. Other rewards stay. With one such response, or equal lengths,
    nothing changes.

    Source: Zhang and Zuo 2025 (GRPO-LEAD), arXiv 2504.09696, the length-dependent accuracy reward with strength 0.05.
    Its penalty of wrong answers and its weights by difficulty are not here. std with n in the denominator.
    """
    values, tokens = np.asarray(rewards, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    right = values > 0
    if not right.any() or np.ptp(tokens[right]) == 0:
        return values
    z = (tokens[right] - tokens[right].mean()) / tokens[right].std()
    shaped = values.copy()
    shaped[right] *= np.exp(-strength * z)
    return shaped
