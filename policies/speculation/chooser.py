"""The default choice of strategies: the most tokens per second by a cost model and an acceptance model.

For every arm, including plain decoding, running * (1 + accepted) / (a step of those rows + its drafting) predicts the
speed at this load. The fastest arm decodes. Trials correct the models. They are made only where they can change the
choice: for an arm that would win under an optimistic estimate. They are paid from an allowance of decode time.

Beside plain decoding drafts may lose what `ledger` says: no step is drafted whose stake exceeds it. The stake is what
the step loses if all that was not measured goes wrong, by estimate. Evaluations draft by what training taught; they
teach what steps cost and book nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from config.catalogue import CATALOGUE
from config.strategy import PLAIN, Strategy
from policies.calibration.costs import CostModel
from policies.speculation.acceptance import AcceptanceModel, Expected
from policies.speculation.check import PlainCheck
from policies.speculation.ledger import DrafterLedger
from policies.speculation.policy import Reason
from policies.speculation.preparation import Preparation
from policies.steps import Load, StepKind, StepOutcome

HOLD_S = 8e-3  # a decision stands for about so long: to decide costs as much as a step of a small model ...
CONFIRMED = 16  # ... and one that is confirmed for twice as long each time, up to so many times
LONG_STEPS = 4  # ... or, for no drafts, for so many steps: where steps are long, seconds bring little that is new
MARGIN = 0.02  # what an arm must promise beyond another: the largest of several estimates is too large
MOST_S = 0.2  # of an allowance that was not spent: what other loads saved up buys no storm of trials
GRANT_S = 4e-3  # of what drafts save first, for trials; or a plain step, and one more of few requests
LOOK_UP_S = 1e-4  # of a drafter without passes whose drafts were never timed
FEW = 4  # request-steps, or timed drafts of a network, below which a drafter is hardly seen
DEAR, PART = 3.0, 0.4  # so often must the allowance hold the stake of a trial that may lose such a part of a step:
# acceptance does not depend on the load, and where fewer requests run it is learned for less
GUESSED = 3.0  # times the price of making a drafter ready must be earned back where its drafts were never timed
INTERRUPTED = 2.0  # times its usual seconds: a pass of the target that takes longer is the machine's
UNSEEN = 3  # steps that a copy, once made, drafts until its cost is seen
STAY_STEPS = 64  # over which the price of switching a drafter on is spread
BUCKET_NODES = (64, 32, 16, 16, 12, 12)  # most tokens to verify at 1, 2, 3-4, 5-8, 9-16, 17 and more: CUDA graphs
PAID_FOR = 4.0  # or so many rows a batch, in those that the device computes for free, where that is more


@dataclass(slots=True, kw_only=True)
class _Hold:
    """The decision for a bucket of batch sizes. It stays while other sizes are decoded in between."""

    left: int = 0  # steps left until it is reconsidered
    strategy: Strategy = PLAIN
    reason: Reason = Reason.UNMEASURED
    advantage: float | None = None
    best: Strategy = PLAIN  # which a trial was not
    others: float = 1.0  # tokens per second of the best without `best`'s drafter, beside plain decoding's
    seconds: float = HOLD_S
    plain_s: float = 0.0  # of a plain step
    spare_s: float = 0.0  # that `strategy` may lose beside plain decoding, and what it lost, since it was decided
    lost_s: float = 0.0


class AdaptivePolicy:
    """See the module docstring; implements StrategyPolicy. Deterministic: same records, same choices."""

    def __init__(
        self,
        arms: Sequence[Strategy],
        *,
        costs: CostModel | None = None,
        acceptance: AcceptanceModel | None = None,
        max_running: int,
        exploration: float,
        lag: int = 0,
    ) -> None:
        """`costs`: with a calibration, or learned from steps. `lag`: steps from a choice to its use."""
        self._arms = tuple(arm for arm in arms if arm.depth)
        self.costs = CostModel() if costs is None else costs
        self.acceptance = AcceptanceModel(self._arms) if acceptance is None else acceptance
        self._max_running, self._exploration, self._lag = max_running, exploration, lag
        self._gone: set[str] = set()  # drafters that failed
        self._credit_s, self._granted_s = 0.0, 0.0
        self._grant_s = 0.0  # of it, what drafts have not saved yet
        self._preparation = Preparation()
        self._ledger = DrafterLedger({arm.drafter for arm in self._arms}, exploration)
        self._stake: tuple[Strategy, float, float] | None = None  # of the trial at hand: arm, seconds, best tokens/s
        self._evaluating = False
        self._running, self._last = 0, PLAIN
        self._holds: dict[int, _Hold] = {}  # by bucket; -1: more than max_running
        self._hold = _Hold()
        self._outcomes: list[StepOutcome] = []  # not learned from yet: so that a step costs an append
        self._wait_s = math.inf  # of decoding, until what a decision denied can be paid
        self._check = PlainCheck(self.costs)

    @property
    def max_nodes(self) -> int:
        return max((arm.tokens_to_verify for arm in self._arms), default=0)

    def arms_at(self, running: int) -> Sequence[Strategy]:
        return [self._arms[i] for i in self._candidates(running)]

    def _candidates(self, running: int) -> list[int]:
        if running > self._max_running:
            return []
        most = most_nodes(running, self.costs.free_rows)
        return [
            i
            for i, arm in enumerate(self._arms)
            if arm.tokens_to_verify <= most and not (self._gone and arm.drafter in self._gone)
        ]

    @property
    def reason(self) -> Reason:
        return self._hold.reason

    @property
    def advantage(self) -> float | None:
        return self._hold.advantage

    def choose(self, load: Load) -> Strategy:
        if load.running != self._running:
            self._running = load.running
            too_many = self._running > self._max_running
            bucket = -1 if too_many else _bucket(self._running)
            self._hold = self._holds.get(bucket) or self._holds.setdefault(bucket, _Hold())
        hold = self._hold
        if hold.left <= 0 or hold.lost_s > hold.spare_s:
            self._digest()
            self._decide(load, hold)
        hold.left -= 1
        # A trial is one step. After it the best arm decodes until the trial's outcome arrives.
        waits = hold.reason is Reason.TRIAL and hold.left < self._lag
        self._last = hold.best if waits else hold.strategy
        return self._last

    def record(self, outcome: StepOutcome) -> None:
        self.costs.observe(outcome)
        self._check.saw(outcome)
        if outcome.reached is not None:
            self._preparation.drafted(outcome.strategy.drafter)
        self._evaluating = outcome.kind is StepKind.EVALUATION
        if not self._evaluating:
            self._outcomes.append(outcome)
            running = outcome.load.running
            hold = self._holds.get(_bucket(running)) if running else None
            # What making a drafter ready took is paid: it is no reason to stop before its drafts were seen.
            if hold is not None and outcome.strategy.depth and outcome.kind is StepKind.USUAL:
                hold.lost_s += outcome.elapsed_s - hold.plain_s * (1 + outcome.accepted / running)

    def unavailable(self, drafter: str) -> None:
        self._gone.add(drafter)
        for hold in self._holds.values():
            if hold.strategy.drafter == drafter:
                hold.left, hold.strategy = 0, PLAIN

    def renewed(self, drafter: str) -> None:
        self._gone.discard(drafter)
        self._digest()
        self.acceptance.renewed(drafter)
        for hold in self._holds.values():
            hold.left = 0

    def new_target(self) -> None:
        """Retrieval knows more with new weights, which come with the texts finished under the old ones."""
        self._digest()
        self._preparation.new_target()
        for drafter in {arm.drafter for arm in self._arms}:
            if _retrieves(drafter):
                self.acceptance.grown(drafter)
        for hold in self._holds.values():
            if _prepares(hold.strategy.drafter):
                hold.left = 0

    def plain_s(self, load: Load) -> float | None:
        return self.costs.known_s(load.running, load.running, load.context_tokens)

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return self.costs.expected_s(outcome)

    def _digest(self) -> None:
        """Learn from the steps of the hold that ends."""
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return
        decoded_s = 0.0
        drafted: dict[Strategy, list[StepOutcome]] = {}
        plainly = 0
        for outcome in outcomes:
            usual, took_s = outcome.kind is StepKind.USUAL, outcome.elapsed_s * outcome.alike
            if usual:
                earned_s = self._exploration * took_s
                self._credit_s = min(self._credit_s + earned_s, max(MOST_S, self._credit_s))
            if outcome.load.running:
                decoded_s += took_s
                self._preparation.decoded(took_s)
            if outcome.strategy.depth and (usual or outcome.reached is not None):
                drafted.setdefault(outcome.strategy, []).append(outcome)
            else:
                plainly += outcome.alike
        together = sum(outcome.alike for outcome in outcomes)
        self._ledger.decoded(together, decoded_s, {strategy.drafter for strategy in drafted})
        tried = None
        if self._stake is not None:
            tried = self._stake[0]
            self._settle(drafted)
        for strategy, steps in drafted.items():
            self.acceptance.learn(strategy, steps)
            self._balance(strategy, steps, strategy is tried)
        if plainly:
            self.acceptance.passed(plainly)

    def _balance(self, strategy: Strategy, steps: list[StepOutcome], trial: bool) -> None:
        """Book what they took beside what was predicted, what they saved beside plain decoding, and beside what would
        have decoded without the drafter: there the allowance has paid for a trial."""
        drafter, ledger, costs = strategy.drafter, self._ledger, self.costs
        gained_s = saved_s = 0.0
        for outcome in steps:
            load, running, took_s = outcome.load, outcome.load.running, outcome.elapsed_s
            plain_s, draft_s = self.plain_s(load), costs.draft_s(strategy, running)
            if plain_s is None:
                continue
            tokens_s = plain_s * (1 + outcome.accepted / running)
            if outcome.kind is StepKind.DISTURBED:  # as predicted
                rows_s = costs.known_s(running, outcome.rows, load.context_tokens) or 0.0
                rows_s -= costs.known_s(running, outcome.rows - outcome.drafted, load.context_tokens) or 0.0
                gained_s += tokens_s - plain_s - rows_s - (draft_s or 0.0)
                continue
            usual_s = plain_s * outcome.rows / running  # as several plain steps, at most
            if costs.seen(running, outcome.rows, FEW):
                usual_s = costs.known_s(running, outcome.rows, load.context_tokens) or usual_s
            if took_s - outcome.draft_s > INTERRUPTED * usual_s:
                continue  # the machine did something else: no fault of the drafter
            gained_s += tokens_s - took_s
            if outcome.kind is StepKind.USUAL and draft_s is not None:
                took_s = ledger.took(drafter, took_s, took_s - outcome.draft_s + draft_s)
            hold = self._holds.get(_bucket(running))
            others = hold.others if hold is not None and hold.best.drafter == drafter else 1.0
            saved_s += tokens_s / others - took_s
        ledger.gained(drafter, gained_s)
        earned_s = min(max(gained_s, 0.0), self._grant_s)
        self._grant_s -= earned_s
        self._credit_s += earned_s
        if not trial:
            ledger.saved(drafter, saved_s, self._once_s(drafter))

    def _once_s(self, drafter: str) -> float:
        """Seconds of preparing it, or of its catching up: an investment to be earned back."""
        seconds = self.costs.switch_s(drafter)
        if seconds is None and _prepares(drafter):
            return CATALOGUE[drafter].prepares * (self.costs.step_s(1, 1, 1) or 0.0)
        return seconds or 0.0

    def _settle(self, drafted: dict[Strategy, list[StepOutcome]]) -> None:
        """Charge a trial's actual loss against the best arm instead of its stake; without a result, the whole stake."""
        assert self._stake is not None
        strategy, stake_s, rate = self._stake
        self._stake = None
        lost_s = 0.0
        steps = drafted.get(strategy) or drafted.get(strategy.chain, [])  # beside early text a tree is its chain
        for outcome in steps:
            if outcome.kind is StepKind.DISTURBED:  # Time of prompts or a captured graph is not the arm's.
                continue
            took_s = outcome.elapsed_s
            # Neither is an interruption by the machine. A copy of the target is late when it is made again.
            if outcome.kind is not StepKind.CAUGHT_UP or _prepares(strategy.drafter):
                took_s = min(took_s, 2 * (self.expected_s(outcome) or took_s))
            lost_s += took_s - (outcome.load.running + outcome.accepted) / rate
        if steps:
            self._credit_s += stake_s - max(lost_s, 0.0)

    def _decide(self, load: Load, hold: _Hold) -> None:
        running = load.running
        hold.strategy, hold.left, hold.advantage = PLAIN, 1 << 10, None
        hold.spare_s = hold.lost_s = 0.0
        if running > self._max_running:
            hold.reason = Reason.TOO_MANY
            return
        candidates = self._candidates(running)
        if not candidates:
            hold.reason = Reason.NO_DRAFTER
            return
        plain_s = self.costs.step_s(running, running, load.context_tokens)
        if plain_s is None:
            hold.reason, hold.left = Reason.UNMEASURED, 1
            return
        hold.plain_s = plain_s
        if not self._granted_s:
            self._granted_s = self._grant_s = max(GRANT_S, (1 + 1 / math.sqrt(running)) * plain_s)
            self._ledger.grant(self._granted_s)
        candidates = [i for i in candidates if not self._ledger.rests(self._arms[i].drafter)]
        if not candidates:
            hold.reason, hold.left = Reason.PLAIN_IS_FASTER, max(int(hold.seconds / plain_s), 1)
            return
        expected = self.acceptance.expected(load.prompt_ids)
        rates = [self._rate(load, i, float(expected.rows[i]), float(expected.accepted[i])) for i in candidates]
        best, rate, step_s, self._wait_s = PLAIN, running / plain_s, plain_s, math.inf
        hold.advantage = max(rates) / rate
        for drafting, i in sorted(zip(rates, candidates, strict=True), key=lambda one: (-one[0], one[1])):
            if drafting <= (1 + MARGIN) * rate:
                break
            over_s = self._over_s(load, i, expected, plain_s)
            if over_s <= 0.0:
                best, rate = self._arms[i], drafting
                hold.spare_s = self._ledger.spare_s(best.drafter)
                step_s = running * (1 + float(expected.accepted[i])) / rate
                break
            self._wait_s = min(self._wait_s, over_s / self._ledger.share)
        alone = [one for i, one in zip(candidates, rates, strict=True) if self._arms[i].drafter != best.drafter]
        hold.others = max([1.0, *(one * plain_s / running for one in alone)])
        waits = self._wait_s < math.inf
        if not self._evaluating:
            trial = self._trial(load, candidates, expected, best, rate, plain_s)
            if trial is not None:
                hold.strategy, stake_s = trial
                hold.reason, hold.left = Reason.TRIAL, 1 + self._lag
                if best is not hold.best:
                    hold.best, hold.seconds = best, HOLD_S
                self._credit_s -= stake_s
                self._stake = hold.strategy, stake_s, rate
                return
        if best is not PLAIN:
            lost_s = plain_s - running / rate + self._catch_up_s(best.drafter)
            if lost_s <= self._credit_s and self._check.due(rate * plain_s / running):
                self._credit_s -= lost_s
                # With a lag the step before the next strategy is not usual: it takes two of them to see one.
                hold.best, hold.reason, hold.left = best, Reason.TRIAL, 1 + 2 * self._lag
                return
        hold.seconds = min(2 * hold.seconds, CONFIRMED * HOLD_S) if best is hold.best else HOLD_S
        hold.strategy = hold.best = best
        hold.reason = Reason.PAYS_MOST
        hold.left = int(hold.seconds / step_s)
        if best is PLAIN:
            hold.left = max(hold.left, int(LONG_STEPS * hold.seconds / (CONFIRMED * HOLD_S)))
            hold.reason = Reason.UNMEASURED if waits else Reason.PLAIN_IS_FASTER
        hold.left = int(min(hold.left, max(self._wait_s, HOLD_S) / step_s))
        if best is not PLAIN:  # Follow its promise no longer than it was observed.
            hold.left = min(hold.left, int(self.acceptance.seen(best) / running))
        # The step that prepares a drafter does not show its drafts' cost, nor does one with prompts; a later one does.
        unseen = _prepares(best.drafter) and self.costs.draft_s(best, running) is None
        hold.left = max(hold.left, 1 + UNSEEN * unseen)

    def _over_s(self, load: Load, arm: int, expected: Expected, plain_s: float) -> float:
        """Return the seconds by which its step may lose more than its drafter may.

        Where plain steps were hardly measured, a drafter that has earned nothing waits for some. One that lost more
        than making it ready took waits until there is something to lose."""
        drafter, running, ledger = self._arms[arm].drafter, load.running, self._ledger
        net_s, spare_s = ledger.net_s(drafter), ledger.spare_s(drafter)
        if net_s <= 0.0 and not self.costs.seen(running, running, FEW):
            return ledger.share * plain_s
        stake_s = self._stake_s(load, arm, expected, plain_s)
        if not spare_s and net_s < -(self.costs.switch_s(drafter) or 0.0):
            stake_s = max(stake_s, ledger.share * plain_s)
        return stake_s - spare_s

    def _stake_s(self, load: Load, arm: int, expected: Expected, plain_s: float) -> float:
        """Return the seconds that its step may lose beside plain decoding: as far as nothing was seen of it, it drafts
        all it may, nothing is accepted, and rows are dear."""
        strategy, running = self._arms[arm], load.running
        seen = self.acceptance.seen(strategy)
        known = seen / (seen + FEW)
        rows = known * float(expected.rows[arm]) + (1 - known) * strategy.tokens_to_verify
        pass_s = self.costs.most_s(running, _rounded(running * (1 + rows)), load.context_tokens)
        draft_s = self.costs.most_draft_s(strategy, running)
        assert pass_s is not None
        if draft_s is None:
            entry = CATALOGUE.get(strategy.drafter)
            draft_s = max(LOOK_UP_S, (0.0 if entry is None else entry.level) * strategy.depth * plain_s)
        once_s = (1 - known) * self._switch_s(strategy) + self._prepare_s(strategy.drafter)
        seconds = (pass_s + draft_s) * self._ledger.lateness(strategy.drafter) + once_s
        return seconds - plain_s * (1 + known * float(expected.accepted[arm]))

    def _rate(self, load: Load, arm: int, rows: float, accepted: float) -> float:
        """Return the tokens per second of an arm with `rows` draft rows per request, `accepted` of them accepted."""
        strategy = self._arms[arm]
        seconds = self._seconds(load, strategy, rows) * self._ledger.lateness(strategy.drafter)
        return load.running * (1 + accepted) / (seconds + self._joining_s(load, strategy, seconds))

    def _seconds(self, load: Load, strategy: Strategy, rows: float, *, hoping: bool = False) -> float:
        """A step of it. Drafting whose cost nobody knows costs what such a drafter's passes do, so nothing of one that
        has none; nor, to an optimist, does one hardly seen: first drafts read an index, or were disturbed."""
        running = load.running
        step_s = self.costs.step_s(running, _rounded(running * (1 + rows)), load.context_tokens)
        assert step_s is not None
        entry = CATALOGUE.get(strategy.drafter)
        level = 0.0 if entry is None else entry.level
        if hoping and not level and self.acceptance.seen(strategy) < FEW:
            return step_s
        draft_s = self.costs.draft_s(strategy, running)
        if level and (draft_s is None or (hoping and self.costs.timed(strategy.drafter) < FEW)):
            plain_s = self.costs.step_s(running, running, load.context_tokens)
            assert plain_s is not None
            guessed_s = level * strategy.depth * plain_s
            draft_s = guessed_s if draft_s is None else min(draft_s, guessed_s)
        return step_s + (draft_s or 0.0)

    def _joining_s(self, load: Load, strategy: Strategy, seconds: float) -> float:
        """Return the cost of starting the drafter per step of `seconds`, spread over the steps for which it
        may stay."""
        if price_s := self._prepare_s(strategy.drafter):
            plain_s = self.costs.step_s(load.running, load.running, load.context_tokens)
            assert plain_s is not None
            known = self.costs.draft_s(strategy, load.running) is not None
            remaining_s = self._preparation.remaining_s(price_s, plain_s, known=known)
            return (price_s if known else GUESSED * price_s) / max(remaining_s / seconds, 1.0)
        return self._switch_s(strategy) / STAY_STEPS

    def _prepare_s(self, drafter: str) -> float:
        """Return the seconds until it can draft for the target's weights."""
        return 0.0 if not _prepares(drafter) or self._preparation.ready(drafter) else self._once_s(drafter)

    def _switch_s(self, strategy: Strategy) -> float:
        """Return the cost of catching up if it drafts next."""
        return 0.0 if strategy.drafter == self._last.drafter else self._catch_up_s(strategy.drafter)

    def _catch_up_s(self, drafter: str) -> float:
        """Return the cost of catching up; 0 for a drafter that is prepared instead."""
        return 0.0 if _prepares(drafter) else self._once_s(drafter)

    def _trial(
        self,
        load: Load,
        candidates: list[int],
        expected: Expected,
        best: Strategy,
        rate: float,
        plain_s: float,
    ) -> tuple[Strategy, float] | None:
        """Return the arm with the largest possible gain per possible loss of its trial, and that loss. None if no
        affordable trial could change the choice."""
        chosen, most = None, 0.0
        step_s = load.running / rate
        for i in candidates:
            arm = self._arms[i]
            if arm is best:
                continue
            hoped = float(expected.hoped[i])
            seconds = self._seconds(load, arm, max(float(expected.rows[i]), hoped), hoping=True)
            seconds *= self._ledger.lateness(arm.drafter)
            gain = load.running * (1 + hoped) / (seconds + self._joining_s(load, arm, seconds)) / rate - 1
            if gain <= MARGIN:
                continue
            # Worst case: it drafts all it may, and nothing is accepted. Then the best arm is switched on again.
            lost_s = self._seconds(load, arm, arm.tokens_to_verify, hoping=True) - step_s
            again_s = 0.0 if arm.drafter == best.drafter else self._catch_up_s(best.drafter)
            stake_s = max(lost_s, 0.0) + self._switch_s(arm) + self._prepare_s(arm.drafter) + again_s
            needed_s = min(DEAR * stake_s, max(stake_s, MOST_S)) if lost_s > PART * step_s else stake_s
            if gain <= most * max(stake_s, 1e-9):
                continue
            if not self.acceptance.seen(arm):  # a first look is paid by what drafters may lose together
                needed_s = 0.0
            over_s = self._over_s(load, i, expected, plain_s)
            if (needed_s <= self._credit_s or not needed_s) and over_s <= 0.0:
                chosen, most = (arm, stake_s), gain / max(stake_s, 1e-9)
            elif self._exploration:
                waits_s = (needed_s - self._credit_s) / self._exploration, over_s / self._ledger.share
                self._wait_s = min(self._wait_s, max(waits_s))
        return chosen


def _prepares(drafter: str) -> bool:
    entry = CATALOGUE.get(drafter)
    return entry is not None and entry.prepares > 0


def _retrieves(drafter: str) -> bool:
    entry = CATALOGUE.get(drafter)
    return entry is not None and not entry.is_network and not entry.prepares


def most_nodes(running: int, free_rows: float) -> int:
    """Tokens to verify per request that an arm may have; beyond, rows cost more than drafts bring."""
    bucket = _bucket(running)
    return max(BUCKET_NODES[min(bucket, len(BUCKET_NODES) - 1)], int(PAID_FOR * free_rows) >> bucket)


def _bucket(running: int) -> int:
    return (running - 1).bit_length()


def _rounded(rows: float) -> int:
    """Round to 1 in 32, so that the cost model's cache has most of the queries."""
    count = round(rows)
    shift = max(count.bit_length() - 6, 0)
    return (count + (1 << shift >> 1)) >> shift << shift
