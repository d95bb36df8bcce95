"""What a rollout engine can be told. Owns the list of commands, and which event answers which; obeys none of them.

A command is plain data and crosses every boundary as it is: driver, worker (`tell`, `ask`), `RolloutEngine.send`, the
loop of the child, `BatchEngine.apply`. Nothing on the way looks inside one that does not concern it. So a new command
is a class here, a case in `BatchEngine.apply`, the engine that does it where engines differ, and whoever sends it.

Bulk (weights, rollouts) travels beside its command as memory: flat bytes, copied once, into memory that the child maps.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.handoff import Offer
from contracts.rollout import DrafterLoaded, DraftersSaved, Request, Slept, WeightsLoaded
from models.manifest import WeightsManifest

A = TypeVar("A")


class Command:
    """Applied between two engine steps, in the order in which commands were sent."""

    __slots__ = ()


class Answered(Command, Generic[A]):
    """A command that is answered with one event of that type, in the order in which such commands were sent."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Submit(Command):
    """Each request ends with one Finished or Rejected event."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """Each of them ends now, as Finished with reason ABORT and the tokens that it has. Unknown ids are ignored."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateWeights(Answered[WeightsLoaded]):
    """The target's weights, as memory. Running requests go on with them. Weights that are damaged or do not fit end the
    engine, with the reason."""

    manifest: WeightsManifest


@dataclass(frozen=True, slots=True)
class ReceiveWeights(Answered[WeightsLoaded]):
    """The target's weights piece by piece from the learner's devices (`actors.handoff`). Where that fails the answer
    says why: the engine has the weights it had, or, if they are half overwritten, does nothing until UpdateWeights."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Sleep(Answered[Slept]):
    """Release the KV cache's memory; refused while there are requests."""


@dataclass(frozen=True, slots=True)
class Wake(Command):
    """Take the memory back. Harmless where the engine does not sleep."""


@dataclass(frozen=True, slots=True)
class Remember(Command):
    """Finished rollouts for the drafters, as memory (`actors.engine.shared_rollouts`). Those that worker `own_index`
    made are left out: its engine has seen them."""

    own_index: int


@dataclass(frozen=True, slots=True)
class SaveDrafters(Answered[DraftersSaved]):
    """Write what the drafters would lose with the process."""

    directory: str


@dataclass(frozen=True, slots=True)
class LoadDrafters(Command):
    """Restore what SaveDrafters wrote; what is missing stays as it is."""

    directory: str


@dataclass(frozen=True, slots=True)
class UpdateDrafter(Answered[DrafterLoaded]):
    """New weights of the drafter `name`, as memory. One that cannot take them keeps what it has."""

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
    | SaveDrafters
    | LoadDrafters
    | UpdateDrafter
)  # every one that an engine obeys
