"""What crosses the boundary of a spot trainer: commands in, micro-steps and weights out. Plain data; no torch, no Ray.

A command is a class here, a case in the child's loop (`actors.spot.child`), and whoever sends it. Each takes effect
between two micro-steps, in the order in which they were sent; nothing waits for one.

Times are `time.time()` of the machine that produced them, as in `contracts.rollout`.
"""

from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.members):
            raise ValueError(f"rank {self.rank} is none of {len(self.members)} members")


@dataclass(frozen=True, slots=True)
class SetTarget:
    """The target's weights of a new version, of which `drafter.training.cut.cut_head` has left what a trainer keeps."""

    manifest: WeightsManifest
    weights: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train, or go on with other members. Answer: TrainStarted."""

    session: TrainSession


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Learn from these. They are lost where no session runs."""

    records: tuple[SequenceRecord, ...]


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Stop at the end of the present micro-step. Answer: TrainStopped."""

    at_s: float  # time.time() of the command


@dataclass(frozen=True, slots=True)
class PublishDrafter:
    """Answer: Published, also when it stands still."""


@dataclass(frozen=True, slots=True)
class ContinueFrom:
    """Go on from these drafter weights: another member trained them, or they were rolled back."""

    manifest: WeightsManifest
    weights: NDArray[np.uint8]


SpotCommand = SetTarget | StartTraining | TrainOn | StopTraining | PublishDrafter | ContinueFrom


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
class TrainedWeights:
    """Drafter weights after `manifest.version` micro-steps are ready. Their bytes (what the manifest describes) go no
    further than the trainer's worker, which hands them out (`RolloutWorker.drafter_weights`): None beyond it."""

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


TrainerEvent = (
    TrainStarted | MicroStep | NeedData | Skipped | TrainStopped | TrainedWeights | Checkpointed | TrainFailed
)
