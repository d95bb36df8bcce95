"""When to train the drafter: if acceptance has fallen from its best, with a minimum of RL steps in between. Pure.

TLT 6.4: training at every RL step is not needed; once in ten steps kept the accuracy. Here the measured acceptance
decides.
"""

from typing import Any

from policies.drafter.acceptance import AcceptanceTally

MIN_DRAFTED = 256  # drafted tokens of the first measurement
HARDLY = 64  # drafted tokens; a drafter with fewer since its training is not being chosen
SURE_SIGMAS = 4.0  # of a fall: a long run tests hundreds of times
BLOCK_SIGMAS = 4.0  # size of a fall by `drift` in a complete measurement


class DriftMonitor:
    """Takes one drafter's counts as engines report them. `due` decides whether an RL step's idle time is for training.

    - drift: train when acceptance has fallen significantly, to at most (1 - drift) of its best since the last training;
      0: always.
    - every_steps: minimum of RL steps from one training to the next.

    A drafter that was never trained is due. So is one that has hardly drafted since its last training, once
    `every_steps` and one more RL step have passed: the chooser has found it bad.

    A measurement is compared with the best earlier one at MIN_DRAFTED tokens, and at each doubling. It is complete when
    a fall by `drift` would be BLOCK_SIGMAS standard errors. Until then only a fall of SURE_SIGMAS counts. A measurement
    with as many tokens as the best is merged into it, since a best of few tokens may be luck.
    """

    def __init__(self, drift: float, every_steps: int, *, min_drafted: int = MIN_DRAFTED) -> None:
        if not 0 <= drift <= 1 or every_steps < 1:
            raise ValueError(f"drift must be in [0, 1] and every_steps at least 1, got {drift} and {every_steps}")
        self._drift, self._every, self._min_drafted = drift, every_steps, min_drafted
        self._trained_at: int | None = None
        self._demanded = False
        self._forget()

    def _forget(self) -> None:
        self._best = AcceptanceTally()  # since the last training
        self._tally = AcceptanceTally()  # since the last conclusive comparison
        self._look_at = self._min_drafted
        self._level: float | None = None
        self._fallen = False

    @property
    def level(self) -> float | None:
        """Acceptance as last measured, as a share of its best since the last training; None: not measured."""
        return self._level

    def observe(self, strategy: str, drafted: int, accepted: int) -> None:
        """Add the counts of `strategy` since the last call."""
        self._tally.add(strategy, drafted, accepted)
        if self._tally.drafted >= self._look_at:
            self._look()

    def _look(self) -> None:
        found = self._tally.against(self._best)
        if found is None and self._best.counts.keys() & self._tally.counts.keys():
            self._level, self._fallen = 0.0, True  # nothing was ever accepted
            return
        if found is None:  # nothing to compare with
            self._level = 1.0 if self._level is None else self._level
            self._settle(self._best.with_(self._tally))
            return
        complete = BLOCK_SIGMAS * found.error <= self._drift
        self._level = min(found.level, 1.0)
        self._fallen = found.level <= 1 - self._drift and (complete or found.sigmas <= -SURE_SIGMAS)
        if complete:
            self._settle(self._tally if found.level > 1 else self._best)
        elif not self._fallen and self._tally.drafted >= self._best.drafted:
            self._settle(self._best.with_(self._tally))
        else:
            self._look_at = 2 * self._tally.drafted

    def _settle(self, best: AcceptanceTally) -> None:
        self._best, self._tally, self._look_at = best, AcceptanceTally(), self._min_drafted

    def demand(self) -> None:
        """Make training due regardless of measurements and time, since the drafter has collapsed."""
        self._demanded = True

    def due(self, step: int) -> bool:
        """Whether idle workers train during RL step `step`."""
        if self._trained_at is None or self._demanded:
            return True
        steps = step - self._trained_at
        if steps < self._every or self._drift == 0:
            return steps >= self._every
        hardly = self._best.drafted + self._tally.drafted < HARDLY
        return self._fallen or (hardly and steps > self._every)

    def trained(self, step: int) -> None:
        """Note that the drafter was trained during RL step `step`. Its best is measured anew."""
        self._trained_at, self._demanded = step, False
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "trained_at": self._trained_at,
            "demanded": self._demanded,
            "best": self._best.to_json(),
            "since": self._tally.to_json(),
            "look_at": self._look_at,
            "level": self._level,
            "fallen": self._fallen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained_at, self._demanded = state["trained_at"], bool(state["demanded"])
        self._best, self._tally = AcceptanceTally.from_json(state["best"]), AcceptanceTally.from_json(state["since"])
        self._look_at, self._level, self._fallen = int(state["look_at"]), state["level"], bool(state["fallen"])
