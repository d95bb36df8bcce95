"""Decides from measured seconds whether training the drafter pays, and stops it where it does not. Pure.

Training begins once a worker has been without requests for BEGINS_S of an RL step's spare time. Less has no room for
the start of a trainer, whose imports would take a core from engines and the learner, and little for its work. Until
then there is no trainer, and only the first RL step is recorded.

RL steps are judged in blocks. The change of acceptance from one block to the next, strategy by strategy
(`policies.drafter.acceptance`), is what training brought, or what the target's drift cost without it. One RL step of
training is worth

    (change with training - change without) x LASTS x the seconds that its accepted tokens take

and costs what was measured of recording and, where trainers share the cores of what they hold up, of their processors
outside idle time. A change within its standard error counts as none. After a block that was not worth its cost idle
workers rest, and nothing is recorded. They train again once the drafter is measured to age, or for a probe after each
pause, which doubles. A drafter that still learns, by its accuracy on new sequences before an update, is not stopped in
its first LEARNS blocks: engines do not use a fresh one.

Until training was worth its cost it may take ADVANCE of the RL steps' time. After an RL step that took more it waits
until the others have made up for it; those count in no block.
"""

from dataclasses import dataclass, field
from typing import Any

from policies.drafter.acceptance import AcceptanceTally

BEGINS_S = 2.0  # without requests; a trainer starts in about that time
LASTS = 8  # RL steps that a gain in acceptance is assumed to last
BLOCK = 4  # RL steps
LEARNS = 8  # blocks
RISES = 0.01  # of its first guesses more, from one block to the next: it still learns
ADVANCE = 0.01  # of the RL steps' time, for training that has not paid yet
MEASURED = 8  # blocks of training, after which a drift of the target is measured again
_FIRST_PAUSE, _LONGEST_PAUSE = 2, 16  # blocks


@dataclass(slots=True, kw_only=True)
class TrainingPayoff:
    """Choice for the next RL step: `trains`. Call `observe` once per RL step."""

    worth_s: float | None = None  # of one RL step of training, as last judged; None: not yet
    cost_s: float = 0.0  # of one RL step of training
    begun: bool = False  # there was spare time enough for a trainer, once
    _wants: bool = True  # to train, as last judged
    _owed_s: float = 0.0  # beyond ADVANCE; it waits while there are any
    _waited: bool = False  # ever
    _rising: float = 0.0  # change of acceptance per RL step with training
    _fading: float = 0.0  # without
    _before: AcceptanceTally | None = None  # of the block before; in a rest, of the last one with training
    _accuracy: float | None = None  # in that block
    _since: int = 0  # blocks in this mode
    _trained: int = 0  # blocks, ever
    _pause: int = _FIRST_PAUSE
    _aged: bool = False  # why the last rest ended
    _rested_before: bool = False  # there was one
    _left: int = 0  # blocks of this rest at most
    _steps: int = 0  # of this block, as all below
    _tally: AcceptanceTally = field(default_factory=AcceptanceTally)
    _stake_s: float = 0.0
    _spent_s: float = 0.0
    _right: list[float] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """Whether idle workers may train in the next RL step."""
        return self.begun and self._wants and self._owed_s <= 0

    def idle(self, seconds: float) -> str:
        """Note that a worker has had no requests for so long in spare time. Return why training begins, else ""."""
        if self.begun or seconds < BEGINS_S:
            return ""
        self.begun = True
        return f"begins: a worker was out of work for {seconds:.1f} s"

    def observe(
        self, *, stake_s: float, cost_s: float, step_s: float, accuracy: float | None, acceptance: AcceptanceTally
    ) -> str:
        """Add an RL step of `step_s` seconds. Return why training stops, waits or begins again, else "".

        stake_s: seconds of the engine steps that drafted with it, times the accepted share of their tokens.
        cost_s: of recording and training. accuracy: share of first guesses before each update; None: there was none."""
        if not self.begun:
            return ""
        waits = self._wants and self._owed_s > 0
        proven = self.worth_s is not None and self.worth_s > self.cost_s
        self._owed_s = 0.0 if proven else max(self._owed_s + cost_s - ADVANCE * step_s, 0.0)
        self._spent_s += cost_s
        if waits:
            return ""
        self._steps, self._stake_s = self._steps + 1, self._stake_s + stake_s
        self._tally = self._tally.with_(acceptance)
        if accuracy is not None:
            self._right.append(accuracy)
        said = self._judge() if self._steps >= BLOCK else ""
        if said or self.trains or self._waited or not self._wants:
            return said
        self._waited = True
        return (
            f"waits: it took {cost_s:.2g} of the RL step's {step_s:.2g} s, and may take {ADVANCE:.0%} until it has paid"
        )

    def demand(self) -> None:
        """Train again: the drafter has collapsed."""
        self._owed_s = 0.0
        if not self._wants:
            self._wants, self._since = True, 0
            self._clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON. A block that has not ended begins again."""
        return {
            "begun": self.begun,
            "trains": self._wants,
            "owed": [self._owed_s, self._waited],
            "cost_s": self.cost_s,
            "rates": [self._rising, self._fading],
            "before": None if self._before is None else self._before.to_json(),
            "accuracy": self._accuracy,
            "blocks": [self._since, self._trained, self._pause, self._left],
            "rested": [self._rested_before, self._aged],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = bool(state.get("begun", True))  # a run of before has none
        self._wants, self.cost_s = bool(state["trains"]), float(state["cost_s"])
        owed = state.get("owed", (0.0, False))  # a run of before has none
        self._owed_s, self._waited = float(owed[0]), bool(owed[1])
        self._rising, self._fading = map(float, state["rates"])
        self._before = None if state["before"] is None else AcceptanceTally.from_json(state["before"])
        self._accuracy = state["accuracy"]
        self._since, self._trained, self._pause, self._left = map(int, state["blocks"])
        self._rested_before, self._aged = map(bool, state["rested"])
        self._clear()

    def _clear(self) -> None:
        self._steps, self._tally, self._stake_s, self._spent_s, self._right = 0, AcceptanceTally(), 0.0, 0.0, []

    def _judge(self) -> str:
        self._since += 1
        stake_s, known = self._stake_s / self._steps, self._change()
        accuracy = sum(self._right) / len(self._right) if self._right else None
        learns = accuracy is not None and (self._accuracy is None or accuracy >= self._accuracy + RISES)
        if self._wants:
            self._trained += 1
            self.cost_s, self._rising = self._spent_s / self._steps, known or 0.0
        elif known is not None:
            self._fading = min(known, 0.0)
        self.worth_s = LASTS * stake_s * (self._rising - self._fading)
        tally, first = self._tally, self._before is None
        self._clear()
        if not self._wants:
            said = self._rested()
            self._before = tally if said and tally.drafted else self._before  # said: it trains again
            return said
        self._before, self._accuracy = tally, self._accuracy if accuracy is None else accuracy
        ages = self._aged and self._since == 1  # it has had no time yet to recover
        if first or ages or (learns and self._trained < LEARNS):
            return ""
        if self.worth_s <= self.cost_s:
            return self._rests(self._pause, f"worth {self.worth_s:.2g} s an RL step, it takes {self.cost_s:.2g} s")
        self._pause = _FIRST_PAUSE
        if self._since >= MEASURED and LASTS * stake_s * self._rising <= self.cost_s:
            return self._rests(1, "to measure how the drafter ages without")
        return ""

    def _change(self) -> float | None:
        """Return the relative change of acceptance per RL step; None without two blocks to compare. A rest is compared
        with the training before it. Block means lie half a block behind a change of mode."""
        found = None if self._before is None else self._tally.against(self._before)
        if found is None:
            return None
        gain = min(found.level - 1.0, 1.0)  # a drafter that nobody used before has no level to compare with
        rate = 0.0 if abs(gain) <= found.error else gain / BLOCK
        if not self._wants:
            return rate / (self._since - 0.5)
        return rate - self._fading / 2 if self._rested_before and self._since == 1 else rate

    def _rests(self, blocks: int, why: str) -> str:
        self._wants, self._since, self._left = False, 0, blocks
        return f"stops for {blocks * BLOCK} RL steps at most: {why}"

    def _rested(self) -> str:
        ages = self.worth_s is not None and self.worth_s > self.cost_s
        if not ages and self._since < self._left:
            return ""
        self._wants, self._since, self._aged, self._rested_before = True, 0, ages, True
        if ages:
            return f"goes on: without it acceptance falls by {-self._fading:.2%} an RL step, worth {self.worth_s:.2g} s"
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return f"a probe of {BLOCK} RL steps"
