"""Data that crosses processes in a weight hand-off, and the error of a failed one. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

from models.manifest import TensorSpec

Way = Literal["auto", "ipc", "broadcast"]  # auto: ipc where a rank has the engine's GPU, else broadcast


class HandOffError(RuntimeError):
    """The hand-off is incomplete. `began`: some bytes were written, so the held weights are neither old nor new."""

    def __init__(self, reason: str, *, began: bool = False) -> None:
        super().__init__(reason)
        self.began = began


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Offer to one receiver: where the weights are, and its receiver number."""

    store: str  # host:port of the learner's store
    name: str  # of this hand-off; unique
    version: int
    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    receiver: int
    limit_s: float  # for the whole hand-off


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One hand-off, for all ranks of the learner."""

    name: str
    version: int
    receivers: int  # that have the offer; numbered 0, 1, ...
    way: Way
    limit_s: float
    changes: bool = False  # send only the elements that changed to receivers that hold what was sent before


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Rank 0's result. Receivers report their own."""

    version: int
    checksum: int  # of the buffer that was sent
    total_bytes: int
    seconds: float
    ways: tuple[str, ...]  # by receiver: "ipc", "broadcast", or why neither
    quantise_s: float = 0.0  # part of `seconds` spent on quantisation
    delta_bytes: int = 0  # sent to each receiver instead of `total_bytes`; 0: everything was sent
    changed: float = 1.0  # share of the elements that changed, if only those were sent
    whole: str = ""  # why not only the changes were sent, if they could have been


@dataclass(frozen=True, slots=True)
class Received:
    checksum: int
    way: str  # "ipc" | "broadcast" | "delta": by either, only what changed
