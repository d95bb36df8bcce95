"""When the drafter is trained: acceptance has fallen from its best, at most once in so many RL steps. Pure.

TLT 6.4: training at every RL step is not needed, once in ten kept the accuracy. Here the measured acceptance decides.
"""

from typing import Any

from policies.drafter.acceptance import Tally

MIN_DRAFTED = 256  # drafted tokens that make one measurement


class DriftMonitor:
    """Counts of one drafter go in as engines report them; `due` says whether idle time of an RL step is for training.

    drift: train when acceptance is at most (1 - drift) of its best since the last training; 0: always.
    every_steps: RL steps from one training to the next, at least.
    A drafter that was never trained is due, and so is one that a whole RL step after `every_steps` has not been
    measured since its last training: a chooser that no longer asks it has found it bad.
    """

    def __init__(self, drift: float, every_steps: int, *, min_drafted: int = MIN_DRAFTED) -> None:
        if not 0 <= drift <= 1 or every_steps < 1:
            raise ValueError(f"drift must be in [0, 1] and every_steps at least 1, got {drift} and {every_steps}")
        self._drift, self._every, self._min_drafted = drift, every_steps, min_drafted
        self._trained_at: int | None = None
        self._tally = Tally()
        self._best: dict[str, float] = {}  # by strategy, since the last training
        self._level: float | None = None  # the last measurement as a share of the best

    @property
    def level(self) -> float | None:
        """Acceptance as last measured, as a share of its best since the last training; None: not measured."""
        return self._level

    def observe(self, strategy: str, drafted: int, accepted: int) -> None:
        """What `strategy` did since the last call; measured as soon as MIN_DRAFTED tokens were drafted."""
        self._tally.add(strategy, drafted, accepted)
        if self._tally.drafted < self._min_drafted:
            return
        compared, accepted_then, best = self._tally.against(self._best)
        if best > 0:
            self._level = min(accepted_then / best, 1.0)
        else:  # nothing to compare with, or nothing was ever accepted
            self._level = 0.0 if compared else 1.0
        for name, rate in self._tally.rates().items():
            self._best[name] = max(rate, self._best.get(name, 0.0))
        self._tally = Tally()

    def due(self, step: int) -> bool:
        """Whether idle workers train during RL step `step`."""
        if self._trained_at is None:
            return True
        steps = step - self._trained_at
        if steps < self._every or self._drift == 0:
            return steps >= self._every
        return steps > self._every if self._level is None else self._level <= 1 - self._drift

    def trained(self, step: int) -> None:
        """The drafter learned something during RL step `step`: its best is measured anew."""
        self._trained_at = step
        self._tally, self._best, self._level = Tally(), {}, None

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, JSON."""
        return {
            "trained_at": self._trained_at,
            "counts": {name: list(counts) for name, counts in self._tally.counts.items()},
            "best": self._best,
            "level": self._level,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained_at, self._level = state["trained_at"], state["level"]
        self._tally = Tally({name: (int(d), int(a)) for name, (d, a) in state["counts"].items()})
        self._best = dict(state["best"])
