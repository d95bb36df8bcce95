"""What crosses the boundary of a spot trainer: a session in, micro-steps and weights out. Plain data; no torch, no Ray.

Times are `time.time()` of the machine that produced them, as in `contracts.rollout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.records import SequenceRecord
from models.manifest import WeightsManifest


@dataclass(frozen=True, slots=True)
class TrainSession:
    """A training session and this trainer's place in it. A change of members is a new epoch."""

    session: int
    epoch: int
    members: tuple[str, ...]  # workers, the leader first
    rank: int  # of this one in members
    store: str = ""  # host:port of the leader's rendezvous store; empty for one member


@dataclass(frozen=True, slots=True)
class TrainStarted:
    """It belongs to this epoch, and trains in it from the next micro-step boundary on that all members reach."""

    session: int
    epoch: int
    store: str = ""  # host:port of its rendezvous store, if it leads


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One optimizer step. Accuracies are of the drafter's most probable token(s) against the target's own draw."""

    step: int  # micro-steps of this drafter since its first
    session: int
    epoch: int
    members: int
    loss: float
    accuracy: float  # top-1
    top3_accuracy: float
    tokens: int  # supervised positions, this member's
    target_version: int
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class NeedData:
    """Fewer than two packs are left in the trainer."""

    tokens: int  # worth asking for


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records that it did not learn from, and why: they contradict themselves or the target, or came too many."""

    records: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainStopped:
    """It stands still; what it held of the engine's memory is free. Once per `stop`, and when it ends by itself."""

    session: int
    step: int
    seconds: float  # from the command
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Drafter weights after `manifest.version` micro-steps are ready. Their bytes (what the manifest describes) go no
    further than the trainer's worker, which hands them out (`RolloutWorker.drafter_weights`): None beyond it, and on
    the wire of the child, where they travel beside as memory."""

    manifest: WeightsManifest
    payload: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Checkpointed:
    step: int
    directory: str
    blocking_s: float  # what training waited for
    seconds: float  # until it was durable


@dataclass(frozen=True, slots=True)
class TrainFailed:
    """The process ended, or cannot go on; it must be spawned anew."""

    reason: str


TrainerEvent = TrainStarted | MicroStep | NeedData | Skipped | TrainStopped | Published | Checkpointed | TrainFailed


class SpotTrainer(Protocol):
    """A drafter trainer in a process of its own. Thread-safe; commands return at once, answers come by `poll`.

    Nothing here waits for a micro-step. `kill` is always safe: the last checkpoint is resumed by the next process.
    """

    def set_target(self, manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> None:
        """The target's weights of a new version; only embedding, head and final norm are kept. Before `start`, or
        between two micro-steps."""

    def start(self, session: TrainSession) -> None:
        """Train, or go on with other members, from the next micro-step boundary on."""

    def feed(self, records: Sequence[SequenceRecord]) -> None: ...

    def stop(self) -> None:
        """Stop at the end of the present micro-step; answer: TrainStopped."""

    def publish(self) -> None:
        """Answer: Published, between two micro-steps or at once when standing still."""

    def load(self, manifest: WeightsManifest, payload: NDArray[np.uint8]) -> None:
        """Go on from these drafter weights (another member trained them, or they were rolled back)."""

    def poll(self, timeout_s: float) -> list[TrainerEvent]: ...

    def kill(self) -> None: ...

    def close(self, timeout_s: float = 5.0) -> None: ...
