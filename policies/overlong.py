"""What a response that is nearly, or quite, as long as the limit allows is worth less. Owns the formula; pure numpy.

Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.4. Its other remedy, overlong filtering (responses that were
cut carry no gradient), needs no formula: `objective.mask_truncated`, obeyed where sequences are made for the learner.
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
