"""Commands to a rollout engine, and the event that answers each. Data only; engines execute them.

A command is plain data and crosses every boundary unchanged: driver, worker (`tell`, `ask`), `RolloutEngine.send`, the
loop of the child, `BatchEngine.apply`. Each layer forwards commands that do not concern it. A new command thus needs a
class here, a case in `BatchEngine.apply`, an implementation where engines differ, and a sender.

Bulk data (weights, rollouts) travels beside its command as memory: flat bytes, copied once, into memory that the child
maps.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.handoff import Offer
from contracts.rollout import DrafterLoaded, DraftersSaved, IntArray, Request, Slept, WeightsLoaded
from models.manifest import WeightsManifest

A = TypeVar("A")


class Command:
    """A command, applied between two engine steps, in the order sent."""

    __slots__ = ()


class Answered(Command, Generic[A]):
    """A command answered by one event of type A. Answers have the order of their commands."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Submit(Command):
    """Add requests. Each ends with one Finished or Rejected event."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """End these requests now, as Finished with reason ABORT and the tokens so far. Unknown ids are ignored."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateWeights(Answered[WeightsLoaded]):
    """Load the target's weights from memory. Running requests continue with them. Damaged weights or weights that do
    not fit end the engine, with the reason."""

    manifest: WeightsManifest


@dataclass(frozen=True, slots=True)
class ReceiveWeights(Answered[WeightsLoaded]):
    """Receive the target's weights piece by piece from the learner's devices (`actors.handoff`).

    If that fails, the answer says why. The engine then has its earlier weights. If those are half overwritten, it does
    nothing until UpdateWeights."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Sleep(Answered[Slept]):
    """Release the KV cache's memory; refused while there are requests."""


@dataclass(frozen=True, slots=True)
class Wake(Command):
    """Allocate the memory again. No effect if the engine does not sleep."""


@dataclass(frozen=True, slots=True)
class Remember(Command):
    """Give finished rollouts to the drafters, as memory (`actors.engine.shared_rollouts`). Those of worker `own_index`
    are skipped, because its engine has already seen them."""

    own_index: int


@dataclass(frozen=True, slots=True)
class SiblingText:
    """Tokens from number `first` on of a response that another worker samples, of a prompt that is sampled here too."""

    prompt_id: int
    request_id: int
    first: int
    tokens: IntArray
    reported_s: float  # wall clock at which the driver had them


@dataclass(frozen=True, slots=True)
class Hear(Command):
    """Give texts under way on other workers to the drafters. Those of prompts without a request here are dropped at the
    next weights."""

    texts: tuple[SiblingText, ...]


@dataclass(frozen=True, slots=True)
class RecordStates(Command):
    """Record hidden states of requests that begin from now on, or stop. An engine that was not started to record, or
    has none, ignores it."""

    on: bool


@dataclass(frozen=True, slots=True)
class SaveDrafters(Answered[DraftersSaved]):
    """Save the drafter state that would be lost with the process."""

    directory: str


@dataclass(frozen=True, slots=True)
class LoadDrafters(Command):
    """Restore what SaveDrafters wrote. State without a file stays unchanged."""

    directory: str


@dataclass(frozen=True, slots=True)
class UpdateDrafter(Answered[DrafterLoaded]):
    """Load new weights of the drafter `name` from memory. A drafter that cannot load them keeps its own."""

    name: str
    manifest: WeightsManifest


EngineCommand = (
    Submit
    | Abort
    | UpdateWeights
    | ReceiveWeights
    | Sleep
    | Wake
    | Remember
    | Hear
    | RecordStates
    | SaveDrafters
    | LoadDrafters
    | UpdateDrafter
)  # every command that an engine executes
