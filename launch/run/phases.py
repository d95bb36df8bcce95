"""Sharing of a GPU's memory: engines sleep while the learner works, the optimizer's state is on the host while engines
decode. Owns what happens before each phase; the learner and the engines implement it.
"""

from launch.config import Config
from launch.config.memory import device_of, phase_fits
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher
from launch.failover import FailoverLearner

SLEEP_TIMEOUT_S = 30.0


def memory_phases(config: Config, device_bytes: int | None) -> tuple[bool, bool]:
    """Return whether engines sleep, without their KV cache, while the learner works; and whether the optimizer's state
    is away, on the host, while engines decode.

    By `cluster.offload`; auto: the least offloading with which all phases fit a shared GPU, by the memory plan.
    `device_bytes`: memory of such a GPU; None (unknown): offload everything."""
    match config.cluster.offload:
        case "never":
            return False, False
        case "always":
            return True, True
    if config.cluster.layout != "colocated" or "cpu" in (config.learner.device, config.rollout.engine.device):
        return False, False
    for engines_sleep, optimizer_away in ((False, False), (True, False), (False, True)):
        if device_bytes is not None and phase_fits(
            config, device_bytes, engines_sleep=engines_sleep, optimizer_away=optimizer_away
        ):
            return engines_sleep, optimizer_away
    return True, True


class SharedMemory:
    """The switch between phases, for the driver's thread. A failure here costs memory, not the run: it is reported, and
    the phase begins."""

    def __init__(self, learner: FailoverLearner, dispatcher: RolloutDispatcher, context: RunContext) -> None:
        config = context.config
        device = device_of(config)
        device_bytes = None if device is None else device.memory_bytes
        self._engines_sleep, self._optimizer_away = memory_phases(config, device_bytes)
        self._shares = self._engines_sleep or self._optimizer_away
        self._learner, self._dispatcher, self._observer = learner, dispatcher, context.observer
        moves = [
            *(["engines sleep while the learner works"] if self._engines_sleep else []),
            *(["the optimizer's state is on the host while engines decode"] if self._optimizer_away else []),
        ]
        if moves:
            context.observer.event("memory_phases", f"{'; '.join(moves)} (cluster.offload: {config.cluster.offload})")

    def decode(self) -> None:
        """Prepare for engines to decode; their first work wakes them."""
        if self._shares:
            self._learner.rest(optimizer=self._optimizer_away)

    def learn(self) -> None:
        """Prepare for the learner to work, while engines are idle."""
        if self._engines_sleep:
            for name, reason in self._dispatcher.sleep(SLEEP_TIMEOUT_S).items():
                self._observer.event("engine_awake", f"{name} keeps its KV cache while the learner works: {reason}")

    def renew(self) -> bool:
        """Replace the weights' buffer that a late worker found lost: see `FailoverLearner.renew`. While engines decode
        in shared memory it is postponed, since a restarted learner needs their devices. The waiting worker asks again.
        """
        return self._wanted or self._learner.renew()

    def look(self) -> None:
        """Restart a lost learner at once, unless engines use its memory; then before its next work. Called often."""
        if self._learner.to_mend and not self._wanted:
            self._learner.mend()

    @property
    def _wanted(self) -> bool:
        """Whether engines decode in memory that a learner would need."""
        return self._shares and any(now.running for now in self._dispatcher.workers().values())
