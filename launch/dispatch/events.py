"""Events of the dispatcher for the rest of the driver. Plain data; launch.run.reactions has the reactions."""

from dataclasses import dataclass

from ray.exceptions import RayError

from actors.spot_host import DrafterEvent
from contracts.rollout import EngineWindow, Finished, PassEvent
from launch.dispatch.seat import Seat, Weights, WorkerArrived


@dataclass(frozen=True, slots=True)
class RolloutProgressed:
    """The number of tokens so far of a watched request of the present run."""

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
    """A worker's engine is up. Its node is only known now, since it may have joined after the request for it."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What a worker sampled, measured, or did with its drafter. Weights are a drafter's new ones, which its trainer has
    published; they are stored where they outlive any worker."""

    worker: str
    news: EngineWindow | PassEvent | DrafterEvent | Weights


@dataclass(frozen=True, slots=True)
class WeightsGone:
    """The buffer of the weights was lost with its maker, and workers wait for it. React with `renew_weights`.

    `seat`: the worker whose answer, `error`, revealed it. It is lost (`give_up`) if no process makes another buffer."""

    seat: Seat | None = None
    error: RayError | None = None


# Finished: a request of the present run, once per request, in order of arrival.
DispatchEvent = Finished | RolloutProgressed | WorkerChanged | WorkerUp | WorkerNews | WeightsGone | WorkerArrived
