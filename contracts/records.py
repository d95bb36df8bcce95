"""The target's hidden states over one sequence, sent from engine to buffer to trainer. numpy only, no torch.

Tokens and states are kept together and unpadded. Every row has an explicit position, so no offset is inferred.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """Row i of `states` is computed at position `first + i`, whose input token is tokens[first + i].

    A row is [aux_0 | aux_1 | aux_2 | hidden] or just [hidden]: outputs of the recorded layers (residual stream, no
    norm), then the state after the final norm; `width` scalars in all. The last token of a finished response is never
    fed, so there are at most L - 1 rows. Every row was computed by the target itself, with the weights of
    `target_version`.
    """

    tokens: NDArray[np.int32]  # [L], prompt and response
    prompt_length: int
    first: int
    states: NDArray[np.uint8]  # [n, width * itemsize], raw bytes: numpy has no bfloat16
    dtype: str  # "float32" | "bfloat16"
    width: int
    target_version: int  # RL steps that the target had learned from when it computed this
    request_id: int = -1  # of its rollout; with `target_version` it identifies what was computed

    @property
    def rows(self) -> int:
        return int(self.states.shape[0])

    @property
    def bytes(self) -> int:
        """Host memory in bytes."""
        return int(self.states.nbytes + self.tokens.nbytes)
