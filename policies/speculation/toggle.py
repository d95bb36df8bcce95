"""Mode roofline: EfficientRollout's toggle (4.2) and its ladder of draft lengths (4.3), alone, by a cost model.

Owns the toggle's state and what it knows of acceptance; knows no device (`policies.calibration.costs`). Drafting goes
on where it is predicted to bring more than 1 + margin times the tokens of plain decoding (eq. 3), and stays on while
requests only leave, once drafts were timed at about its load; beyond the paper, the plain price is checked now and
then. A rollout ends with new weights of the target; before the first ones, where requests come after none waited, for
turns come and go within a rollout. At its end the ladder moves by a rung, after the same verdict in `patience` rollouts
that drafted.

Where the paper leaves it open: every draft counts as accepted until some were verified. Verified counts keep three
quarters of their weight in each further rollout, so that a drafter that was once too bad is tried again. Moving up
needs a block efficiency near its ceiling and, beyond the paper, a better prediction: where drafts cost as much as they
save, every rung is near its ceiling. Moving down needs only the better prediction. Predictions for another rung keep
the acceptance per token (E.2).
"""

from collections.abc import Sequence

from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.check import PlainCheck
from policies.speculation.policy import Reason
from policies.steps import Load, StepKind, StepOutcome

_FULL = 16.0  # prior request-steps in which every draft was accepted
_KEPT = 0.75  # weight of earlier rollouts' counts, per rollout
_ENOUGH = 64  # verified drafts that a rollout needs for a verdict


class RooflinePolicy:
    """See the module docstring; implements StrategyPolicy.

    ladder: chains of one drafter. Raises ValueError for others.
    """

    def __init__(
        self,
        ladder: Sequence[Strategy],
        *,
        margin: float,
        near_ceiling: float,
        patience: int,
        max_running: int,
        costs: CostModel | None = None,
    ) -> None:
        self._ladder = sorted(ladder, key=lambda strategy: strategy.depth)
        if (
            not ladder
            or len({one.drafter for one in ladder}) > 1
            or any(one.is_tree or not one.depth for one in ladder)
        ):
            raise ValueError("rollout.speculation.mode: roofline needs chains of one drafter in strategies")
        self._margin, self._near_ceiling, self._patience = margin, near_ceiling, patience
        self._max_running, self._costs = max_running, costs or CostModel()
        self._check = PlainCheck(self._costs)
        self._rung = self._streak = 0  # streak: verdicts up, or down if negative
        self._acceptance = 1.0  # of a token whose predecessors were accepted, at the last change of rung
        self._drafts = self._tokens = 0.0  # verified on this rung in earlier rollouts, faded
        self._new_drafts = self._new_tokens = 0  # in this rollout
        self._loads = self._running_sum = self._context_sum = 0  # over its steps that drafted
        self._running = self._waiting = 0  # of the last step
        self._left = False  # requests have ended since the rollout began
        self._on = self._failed = False
        self._by_weights = False  # new weights have come: they end rollouts
        self._measured = False  # what drafts of the rung cost at about this load, when the choice was made
        self._calibrated: bool | None = None  # drafts were timed before the first choice; None: nobody asked yet
        self._looked: set[int] = set()  # loads, in octaves, at which drafts were timed by ourselves
        self._reason = Reason.UNMEASURED
        self._advantage: float | None = None

    @property
    def max_nodes(self) -> int:
        return self._ladder[-1].depth

    def arms_at(self, running: int) -> Sequence[Strategy]:
        return () if running > self._max_running else self._ladder

    @property
    def reason(self) -> Reason:
        return self._reason

    @property
    def advantage(self) -> float | None:
        """The predicted speed-up of the last choice with a prediction."""
        return self._advantage

    @property
    def efficiency(self) -> float:
        """Tokens per request and step with drafts of this rung: tau."""
        tokens = _FULL * _efficiency(self._acceptance, self._ladder[self._rung].depth) + self._tokens + self._new_tokens
        return tokens / (_FULL + self._drafts + self._new_drafts)

    def choose(self, load: Load) -> Strategy:
        running = load.running
        if running > self._running:
            self._on = False
            # Else its requests begin one after the other, or it ends with new weights.
            if not self._waiting and self._left and not self._by_weights:
                self._left = False
                self._end_rollout()
        elif running < self._running:
            self._left = True
        self._running, self._waiting = running, load.waiting
        if self._failed:
            self._reason = Reason.NO_DRAFTER
        elif running > self._max_running:
            self._on, self._reason = False, Reason.TOO_MANY
        elif self._on and self._measured:
            if not self._check.due(self._advantage or 1.0):
                return self._ladder[self._rung]
            self._on, self._reason = False, Reason.TRIAL  # and chosen again
        else:
            self._measured = self._draft_s(self._rung, running) is not None
            speedup = self._advantage = self._speedup(self._rung, running, load.context_tokens, self.efficiency)
            self._on = speedup is not None and speedup > 1 + self._margin
            if self._on:
                self._reason = Reason.PAYS_MOST
                return self._ladder[self._rung]
            self._reason = Reason.UNMEASURED if speedup is None else Reason.PLAIN_IS_FASTER
        return PLAIN

    def record(self, outcome: StepOutcome) -> None:
        self._costs.observe(outcome)
        self._check.saw(outcome)
        if outcome.strategy != self._ladder[self._rung] or outcome.kind is StepKind.EVALUATION:
            return
        load = outcome.load
        if outcome.is_usual:
            self._looked.add(load.running.bit_length())
        self._new_drafts += load.running
        self._new_tokens += load.running + outcome.accepted
        self._loads += 1
        self._running_sum += load.running
        self._context_sum += load.context_tokens

    def unavailable(self, drafter: str) -> None:
        self._failed = self._failed or drafter == self._ladder[0].drafter

    def renewed(self, drafter: str) -> None:
        self._failed = self._failed and drafter != self._ladder[0].drafter

    def new_target(self) -> None:
        """The rollout with the old weights has ended."""
        self._by_weights = True
        self._end_rollout()

    def plain_s(self, load: Load) -> float | None:
        return self._costs.known_s(load.running, load.running, load.context_tokens)

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return self._costs.expected_s(outcome)

    def _speedup(self, rung: int, running: int, context_tokens: int, efficiency: float) -> float | None:
        """Return the tokens per second on that rung relative to plain decoding (eq. 1); None if a step's cost is
        unknown. Drafts never timed at about this load cost nothing here. They are timed next, and the choice is made
        again."""
        strategy, costs = self._ladder[rung], self._costs
        plain_s = costs.step_s(running, running, context_tokens)
        verify_s = costs.step_s(running, running * (1 + strategy.depth), context_tokens)
        if plain_s is None or verify_s is None:
            return None
        return efficiency * plain_s / ((self._draft_s(rung, running) or 0.0) + verify_s)

    def _draft_s(self, rung: int, running: int) -> float | None:
        """Return the draft seconds; None if never measured near that load. One measurement at another load does not
        show which part grows with the requests: a first look at a full batch would exclude drafts from the tail for
        good. A calibration covers all loads."""
        seconds = self._costs.draft_s(self._ladder[rung], running)
        if self._calibrated is None:
            self._calibrated = seconds is not None
        return seconds if self._calibrated or running.bit_length() in self._looked else None

    def _end_rollout(self) -> None:
        """Judge the rung by the ended rollout, and fade its counts."""
        if self._new_drafts >= _ENOUGH:
            verdict = self._verdict()
            self._streak = verdict if verdict * self._streak <= 0 else self._streak + verdict
        self._drafts = _KEPT * (self._drafts + self._new_drafts)
        self._tokens = _KEPT * (self._tokens + self._new_tokens)
        self._new_drafts = self._new_tokens = self._loads = self._running_sum = self._context_sum = 0
        if abs(self._streak) >= self._patience:
            self._acceptance = _acceptance(self.efficiency, self._ladder[self._rung].depth)
            self._rung += 1 if self._streak > 0 else -1
            self._streak, self._drafts, self._tokens = 0, 0.0, 0.0

    def _verdict(self) -> int:
        """Return 1 if a longer draft was better, -1 if a shorter one, else 0."""
        rung, depth = self._rung, self._ladder[self._rung].depth
        running, context = round(self._running_sum / self._loads), round(self._context_sum / self._loads)
        efficiency = self._new_tokens / self._new_drafts
        acceptance = _acceptance(efficiency, depth)

        def predicted(other: int) -> float:
            if not 0 <= other < len(self._ladder):
                return 0.0
            tokens = efficiency if other == rung else _efficiency(acceptance, self._ladder[other].depth)
            return self._speedup(other, running, context, tokens) or 0.0

        here = predicted(rung)
        if efficiency >= self._near_ceiling * (depth + 1) and predicted(rung + 1) > here:
            return 1
        return -1 if predicted(rung - 1) > here else 0


def _efficiency(acceptance: float, depth: int) -> float:
    """Return the expected tokens of a step of `depth` drafted tokens, each with this acceptance if all before were
    accepted."""
    return sum(acceptance**i for i in range(depth + 1))


def _acceptance(efficiency: float, depth: int) -> float:
    """Return the inverse of `_efficiency`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _efficiency(middle, depth) < efficiency else (low, middle)
    return (low + high) / 2
