"""What the length of a response makes of its reward: near the limit, or beside other right ones. Owns the formulas;
pure numpy.

Source of the first: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.4. Its other remedy, overlong filtering
(responses that were cut carry no gradient), needs no formula: `objective.mask_truncated`, obeyed where sequences are
made for the learner.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def overlong_penalties(
    lengths: Sequence[int], *, max_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """`penalty` times DAPO's eq. 13, to be added to the rewards: 0 up to max_tokens - buffer_tokens, falling linearly
    to -1 at max_tokens, and -1 beyond. Lengths in tokens; [n], none above 0.

    verl and NeMo-RL go on falling beyond max_tokens, where no response of theirs or of ours can be.
    Raises ValueError for a buffer that is not in 1 .. max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"an overlong buffer of {buffer_tokens} tokens: it must be in 1 .. max_tokens = {max_tokens}")
    over = np.asarray(lengths, dtype=np.float64) - (max_tokens - buffer_tokens)
    return -penalty * np.clip(over / buffer_tokens, 0.0, 1.0)


def concise_rewards(rewards: Sequence[float], lengths: Sequence[int], *, strength: float) -> NDArray[np.float64]:
    """Of one group, [n]: a reward above 0 times exp(-strength * z), z the length standardised over the responses with a
    reward above 0; the others as they are. With one of those, or all of one length, nothing changes.

    Source: Zhang and Zuo 2025 (GRPO-LEAD), arXiv 2504.09696, the length-dependent accuracy reward, whose strength is
    0.05; its penalty of wrong answers and its weights by difficulty are not here. std with n in the denominator.
    """
    values, tokens = np.asarray(rewards, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    right = values > 0
    if not right.any() or np.ptp(tokens[right]) == 0:
        return values
    z = (tokens[right] - tokens[right].mean()) / tokens[right].std()
    shaped = values.copy()
    shaped[right] *= np.exp(-strength * z)
    return shaped
