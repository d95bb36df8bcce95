"""Commands to and events from a spot trainer. Plain data; no torch, no Ray.

A new command needs a class here, a case in the child's loop (`actors.spot.child`), and a sender. Each takes effect
between two micro-steps, in the order sent; senders do not block.

Times are `time.time()` of the machine that produced them, as in `contracts.rollout`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contracts.records import SequenceRecord
from models.manifest import WeightsManifest


@dataclass(frozen=True, slots=True)
class TrainSession:
    """A training session and this trainer's rank in it. A change of members starts a new epoch."""

    session: int
    epoch: int
    members: tuple[str, ...]  # workers, the leader first
    rank: int  # this trainer's index in members
    store: str = ""  # host:port of the leader's rendezvous store; empty for one member

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.members):
            raise ValueError(f"rank {self.rank} is none of {len(self.members)} members")


@dataclass(frozen=True, slots=True)
class SetTarget:
    """A new version of the target's weights, cut to what a trainer needs by `drafter.training.cut.cut_head`."""

    manifest: WeightsManifest
    weights: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Start training, or continue with other members. Answer: TrainStarted."""

    session: TrainSession


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Train on these records. They are dropped if no session runs."""

    records: tuple[SequenceRecord, ...]


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Stop at the end of the current micro-step. Answer: TrainStopped."""

    at_s: float  # time.time() of the command


@dataclass(frozen=True, slots=True)
class PublishDrafter:
    """Publish the drafter weights. Answer: TrainedWeights, also while no session runs."""


@dataclass(frozen=True, slots=True)
class ContinueFrom:
    """Continue from these drafter weights: another member trained them, or they were rolled back."""

    manifest: WeightsManifest
    weights: NDArray[np.uint8]


SpotCommand = SetTarget | StartTraining | TrainOn | StopTraining | PublishDrafter | ContinueFrom


@dataclass(frozen=True, slots=True)
class TrainStarted:
    """The trainer joined this epoch and trains in it from the next micro-step boundary that all members reach."""

    session: int
    epoch: int
    store: str = ""  # host:port of its rendezvous store, if it leads


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One optimizer step. Accuracies compare the drafter's most probable token(s) with the target's own draw."""

    step: int  # micro-steps of this drafter since its first
    session: int
    epoch: int
    members: int
    loss: float
    accuracy: float  # top-1
    top3_accuracy: float
    tokens: int  # supervised positions of this member
    target_version: int
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class NeedData:
    """The trainer has fewer than two packs left."""

    tokens: int  # how many to request


@dataclass(frozen=True, slots=True)
class Skipped:
    """Records that were not trained on, and why: inconsistent in themselves or with the target, or too many."""

    records: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainStopped:
    """Training has stopped and the engine's memory is free. Sent once per `stop`, and when training ends by itself."""

    session: int
    step: int
    seconds: float  # since the command
    reason: str = ""
    cpu_s: float = 0.0  # of the trainer's process outside sessions, since the last of these: before, after, and saving


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """Drafter weights after `manifest.version` micro-steps are ready.

    Their bytes stay on the trainer's worker, which serves them (`RolloutWorker.drafter_weights`); `payload` is None
    elsewhere."""

    manifest: WeightsManifest
    payload: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class Checkpointed:
    step: int
    directory: str
    blocking_s: float  # how long training was blocked
    seconds: float  # until the checkpoint was durable


@dataclass(frozen=True, slots=True)
class TrainFailed:
    """The process ended or cannot continue; it must be restarted."""

    reason: str


TrainerEvent = (
    TrainStarted | MicroStep | NeedData | Skipped | TrainStopped | TrainedWeights | Checkpointed | TrainFailed
)
