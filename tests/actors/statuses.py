"""What the workers of a dispatcher say of themselves."""

import ray

from actors.rollout_worker import SupervisorStatus
from launch.dispatch import RolloutDispatcher
from launch.dispatch.seat import SeatState


def statuses(dispatcher: RolloutDispatcher) -> dict[str, SupervisorStatus]:
    """By name, of those that are not dead."""
    seats = [seat for seat in dispatcher._seats.by_name.values() if seat.state is not SeatState.DEAD]
    return {seat.name: ray.get(seat.handle.status.remote(), timeout=60) for seat in seats}
