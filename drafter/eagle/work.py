"""The work of one `propose` call as arrays on the host: requests, positions to catch up with, sampling.

Plain data, before anything is on a device.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter.eagle.cache import CachePlaces
from drafter.protocol import HiddenRows

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The R' of R requests that can draft, and their T rows to catch up with, packed."""

    index: Int64Array  # [R'], their places in the batch
    lengths: Int64Array
    places: CachePlaces
    rows: Int64Array  # [R'] >= 1
    kept: HiddenRows  # of those rows
    tokens: Int64Array  # [T], the token after each of them
    positions: Int64Array  # [T]
    slots: Int64Array  # [T], of the cache
    keys: Int64Array  # [R']
    noise_positions: Int64Array  # [R'], of the next token
    temperatures: NDArray[np.float32]
    top_k: Int64Array
    top_p: NDArray[np.float32]

    @property
    def truncated(self) -> bool:
        return bool(((self.top_k > 0) | (self.top_p < 1)).any())
