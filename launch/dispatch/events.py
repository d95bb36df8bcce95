"""What the dispatcher has to say to the rest of the driver. Plain data; the reactions are in
launch.run.reactions."""

from dataclasses import dataclass

from ray.exceptions import RayError

from actors.spot_host import DrafterEvent
from contracts.rollout import EngineWindow, PassEvent, Rollout
from launch.dispatch.seat import Seat, Weights, WorkerArrived


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """End of a request of the present run: each request's once, in order of arrival."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class RolloutProgressed:
    """A request of the present run that is watched has so many tokens by now."""

    request_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """`kind`: worker_joined, worker_left, worker_lost, worker_restarted, worker_dead."""

    kind: str
    worker: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """Its engine is up. Where that is, nobody knew before: its node may have joined since it was asked for."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class WorkerSampled:
    worker: str
    window: EngineWindow


@dataclass(frozen=True, slots=True)
class WorkerMeasured:
    worker: str
    passed: PassEvent


@dataclass(frozen=True, slots=True)
class DrafterNews:
    worker: str
    event: DrafterEvent


@dataclass(frozen=True, slots=True)
class DrafterPublished:
    """A trainer has made new weights, which are where no worker's end reaches them."""

    worker: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class WeightsGone:
    """The buffer that was set went with its maker, and workers wait for it: `renew_weights` with another one.

    `seat`: whose answer said so just now, with `error`; it is lost (`give_up`) if nobody makes another buffer."""

    seat: Seat | None = None
    error: RayError | None = None


DispatchEvent = (
    RolloutEnded
    | RolloutProgressed
    | WorkerChanged
    | WorkerUp
    | WorkerSampled
    | WorkerMeasured
    | DrafterNews
    | DrafterPublished
    | WeightsGone
    | WorkerArrived
)
