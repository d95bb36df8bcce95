"""What people and the driver ask of a simulated cluster, and whether it is obeyed whichever coordinator was told."""

from contracts.coordinator import Drain, Pause, Resume, State, Train, Undrain
from coordinator.machine import Machine
from coordinator.member import Identity
from coordinator.roster import Phase
from tests.coordinator.world.simulated import BrokenTruthError


class Wishes:
    """latest_s: how long a message may be on its way."""

    def __init__(self, latest_s: float) -> None:
        self._latest_s = latest_s
        self._drained: dict[str, float] = {}  # workers and nodes, and since when
        self._paused_s: float | None = None  # since then

    def told(self, event: Drain | Undrain | Pause | Resume, now_s: float) -> None:
        """A coordinator has accepted it."""
        if isinstance(event, Pause | Resume):
            self._paused_s = now_s if isinstance(event, Pause) else None
        elif isinstance(event, Drain):
            self._drained.setdefault(event.worker or event.node, now_s)
        else:
            self._drained.pop(event.worker or event.node, None)

    def check(self, machine: Machine, now_s: float) -> None:
        """The books. Raises BrokenTruthError."""
        if machine.paused is not (self._paused_s is not None):
            raise BrokenTruthError(f"{now_s:.3f}: {machine.paused=}, but it was asked for since {self._paused_s}")
        for worker in machine.roster.workers.values() if self._drained else ():
            drained = not self._drained.keys().isdisjoint((worker.name, worker.node, worker.node_id))
            if drained and worker.state is State.TRAINING and worker.phase is not Phase.STOPPING:
                raise BrokenTruthError(f"{now_s:.3f}: {worker} is to train, but it is drained")

    def check_command(self, who: Identity, command: Train, now_s: float) -> None:
        """The truth: a command to train may have been on its way when its worker was drained, or all were paused; no
        longer than messages are. Raises BrokenTruthError."""
        since_s = [self._drained[name] for name in (who.name, who.node, who.node_id) if name in self._drained]
        since_s += [self._paused_s] if self._paused_s is not None else []
        if since_s and now_s > min(since_s) + self._latest_s:
            raise BrokenTruthError(f"{now_s:.3f}: {who.name} obeys {command}, drained or paused since {min(since_s)}")
