"""What crosses processes for a hand-off, and how it is said that it failed. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

from models.manifest import TensorSpec

Way = Literal["auto", "ipc", "broadcast"]  # auto: ipc where a rank has the engine's GPU, else broadcast


class HandOffError(RuntimeError):
    """Not everything was handed over. `began`: something was written, so that what is held is neither old nor new."""

    def __init__(self, reason: str, *, began: bool = False) -> None:
        super().__init__(reason)
        self.began = began


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """To one receiver: where the weights are, and as who it gets them."""

    store: str  # host:port of the learner's store
    name: str  # of this hand-off; no other has it
    version: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    receiver: int
    limit_s: float  # for all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """To all ranks of the learner: one hand-off."""

    name: str
    version: int
    receivers: int  # told the offer; their numbers are 0, 1, ...
    way: Way
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What rank 0 knows at the end. Receivers answer for themselves."""

    version: int
    checksum: int  # of the buffer that passed by
    total_bytes: int
    seconds: float
    ways: tuple[str, ...]  # by receiver: "ipc", "broadcast", or why neither
    quantise_s: float = 0.0  # of `seconds`, in rounding


@dataclass(frozen=True, slots=True)
class Received:
    checksum: int
    way: str  # "ipc" | "broadcast"
