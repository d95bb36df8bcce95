"""Who holds a shared GPU's memory when: engines asleep while the learner works, the optimizer's state on the host while
engines decode. Owns what is done before each phase; the learner and the engines know how."""

from dataclasses import dataclass

from launch.config import Config
from launch.config.memory import device_of, phase_fits
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher
from launch.failover import FailoverLearner

SLEEP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class MemoryPhases:
    engines_sleep: bool  # without their KV cache, while the learner works
    optimizer_away: bool  # on the host, while engines decode


EVERYBODY_STAYS = MemoryPhases(engines_sleep=False, optimizer_away=False)
_CAREFUL = MemoryPhases(engines_sleep=True, optimizer_away=True)


def memory_phases(config: Config, device_bytes: int | None) -> MemoryPhases:
    """By `cluster.offload`; auto: the least that makes all phases fit a GPU that learner and engines share, by the
    memory plan. `device_bytes`: of such a GPU; None, not known: all of it."""
    match config.cluster.offload:
        case "never":
            return EVERYBODY_STAYS
        case "always":
            return _CAREFUL
    if config.cluster.layout != "colocated" or "cpu" in (config.learner.device, config.rollout.engine.device):
        return EVERYBODY_STAYS
    for engines_sleep, optimizer_away in ((False, False), (True, False), (False, True)):
        if device_bytes is not None and phase_fits(
            config, device_bytes, engines_sleep=engines_sleep, optimizer_away=optimizer_away
        ):
            return MemoryPhases(engines_sleep, optimizer_away)
    return _CAREFUL


class SharedMemory:
    """For the driver's thread. What fails here costs memory, not the run: it is said, and the phase begins."""

    def __init__(self, learner: FailoverLearner, dispatcher: RolloutDispatcher, context: RunContext) -> None:
        config = context.config
        device = device_of(config)
        self._phases = memory_phases(config, None if device is None else device.memory_bytes)
        self._learner, self._dispatcher, self._observer = learner, dispatcher, context.observer
        moves = [
            *(["engines sleep while the learner works"] if self._phases.engines_sleep else []),
            *(["the optimizer's state is on the host while engines decode"] if self._phases.optimizer_away else []),
        ]
        if moves:
            context.observer.event("memory_phases", f"{'; '.join(moves)} (cluster.offload: {config.cluster.offload})")

    def decode(self) -> None:
        """Engines are about to get work, which wakes them."""
        if self._phases != EVERYBODY_STAYS:
            self._learner.rest(optimizer=self._phases.optimizer_away)

    def learn(self) -> None:
        """The learner is about to work, and engines have none."""
        if self._phases.engines_sleep:
            for name, reason in self._dispatcher.sleep(SLEEP_TIMEOUT_S).items():
                self._observer.event("engine_awake", f"{name} keeps its KV cache while the learner works: {reason}")

    def renew(self) -> bool:
        """A worker that comes later finds the weights' buffer lost: see `FailoverLearner.renew`. Where memory is shared
        nobody makes another while engines decode, since a learner that is made again needs their devices; who waits for
        it asks again."""
        return self._wanted or self._learner.renew()

    def look(self) -> None:
        """Often, whatever the driver waits for: a learner that is lost meanwhile is made again at once, unless engines
        have its memory; then before its next work."""
        if self._learner.to_mend and not self._wanted:
            self._learner.mend()

    @property
    def _wanted(self) -> bool:
        """Engines decode in memory that a learner would want."""
        return self._phases != EVERYBODY_STAYS and any(now.running for now in self._dispatcher.workers().values())
