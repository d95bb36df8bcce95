"""What the target computed over one sequence, as it travels from engine to buffer to trainer. numpy only, no torch.

Tokens and states are kept together and unpadded, and every row names its position, so that no offset is ever inferred.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """Row i of `states` is what the target computed at position `first + i`, fed with tokens[first + i].

    A row is [aux_0 | aux_1 | aux_2 | hidden] or just [hidden]: outputs of the recorded layers (residual stream, no
    norm), then the state after the final norm; `width` scalars in all. The last token of a finished response is never
    fed, so there are at most L - 1 rows. Rows that the target did not compute itself, or of other weights than
    `target_version`, are never in it.
    """

    tokens: NDArray[np.int32]  # [L], prompt and response
    prompt_length: int
    first: int
    states: NDArray[np.uint8]  # [n, width * itemsize], raw bytes: numpy has no bfloat16
    dtype: str  # "float32" | "bfloat16"
    width: int
    target_version: int  # RL steps the target had learned when it computed this
    request_id: int = -1  # of its rollout; what was computed once per version is known by both

    @property
    def rows(self) -> int:
        return int(self.states.shape[0])

    @property
    def bytes(self) -> int:
        """Host memory it holds."""
        return int(self.states.nbytes + self.tokens.nbytes)
