"""The default choice of strategies: measured gain over plain decoding, per batch bucket, explored within an allowance.

Reward of a hold (a few consecutive steps of one arm): sum of A * t_plain(B) over sum of elapsed, with A the tokens per
request and step. It is the speed-up against plain decoding, so it compares across batch sizes; plain decoding is 1.
Deviations from TLT Algorithm 1: plain decoding is an arm everywhere; a bucket of batch sizes caps the tokens to verify
instead of naming them; exploration has an allowance of decode time, losing arms back off, and nothing is random.
No price is assumed: what a drafter costs and what switching it on costs are measured, in a first look at it in every
bucket that no allowance limits, and its weights change without setting back the clock of what waits.
"""

import math
from collections import deque
from collections.abc import Sequence

from policies.speculation.arms import FIRST_WAIT_STEPS, SURE_TRIES, Arm, ArmBelief, Bucket, Hold, speedup
from policies.speculation.costs import PlainCost
from policies.speculation.elastic import ElasticSwitch
from policies.speculation.policy import Load, Reason, StepCosts, StepKind, StepOutcome
from policies.speculation.profile import DrafterProfile
from policies.speculation.strategy import PLAIN, Strategy

HOLD_S = 8e-3  # a decision stands for about so long: reconsidering costs 40 us, a step of a small model 130 ...
HOLD_STEPS = 64  # ... and for at most so many steps
TRIAL_REQUESTS = 4  # decoded by a trial of an arm, at least ...
TRIAL_STEPS = 2  # ... and steps
PLAIN_STEPS = 8  # in which plain decoding is measured first ...
FIRST_LOOKS = 3  # at a drafter in a bucket, if the first ones measured nothing
PLAIN_HOLDS = 2  # ... and again before another arm stands in its place: the steps of a cold start are slow ones
GRANT_STEPS = 8  # plain steps' worth of exploration beyond the share of decode time, at the start or after a change ...
GRANT_EVERY_STEPS = 1 << 13  # ... at most once in so many steps
QUIET = 4  # a quarter of the allowance, and holds four times as long, while every arm has lost against plain decoding
LONGEST_WAIT_STEPS = 1 << 11
PLAIN_WAIT_STEPS = 1 << 9  # plain decoding is measured again after so many steps: every gain is relative to it
RECENT_STEPS = 1 << 11  # and what it cost longer ago than this is no base for seconds saved
DOUBT_EVERY_STEPS = 1 << 8  # it is measured at once where an arm's speed says that the machine has changed
KEPT_HOLDS = 8  # of a drafter whose weights are new
STALE_STEPS = 1 << 11  # holds older than this count no more, but for the last two
CLOSE = 0.75  # an arm above this share of the best is tried again soon: a few steps say little about it
HOPELESS = 0.85  # arms that promise less than this share of the best are tried late
HOPELESS_WAIT_STEPS = 1 << 11
PATIENCE_STEPS = 1 << 11  # an arm that has waited so long gets what the allowance has brought meanwhile
BUCKET_NODES = (64, 32, 16, 16, 12, 12)  # most tokens to verify at 1, 2, 3-4, 5-8, 9-16, 17 and more running requests


class AdaptivePolicy:
    """See the module docstring; implements StrategyPolicy. Deterministic: same records, same choices."""

    def __init__(
        self,
        arms: Sequence[Strategy],
        *,
        max_running: int,
        exploration: float,
        window: int,
        lag: int = 0,
        costs: StepCosts | None = None,
    ) -> None:
        """`lag`: an arm is used so many steps after it was chosen. Steps of others' are not recorded as its own."""
        self._exploration, self._window, self._lag = exploration, window, lag
        self._switch_s: dict[str, dict[int, float]] = {}  # by drafter and bucket: measured, of switching it on
        self._switch = ElasticSwitch(max_running)
        self._cost, self._costs = PlainCost(), costs
        self._profiles = {arm.drafter: DrafterProfile() for arm in arms}
        self._max_nodes = max((arm.tokens_to_verify for arm in arms), default=0)
        self._buckets = [self._bucket(number, arms) for number in range(len(BUCKET_NODES))]
        self._of = [
            self._buckets[min((max(b, 1) - 1).bit_length(), len(BUCKET_NODES) - 1)] for b in range(max_running + 1)
        ]
        self._off = self._bucket(len(BUCKET_NODES), ())  # more requests than speculation is for
        self._gone: list[tuple[Bucket, Arm]] = []  # of drafters that failed
        self._step = 0
        self._credit_s = 0.0
        self._fresh, self._next_grant_step = True, 0  # much is unknown: exploration is worth a grant
        # The present decision, and what its steps brought: lists, so that a step costs an append.
        self._left = 0  # steps for which it stands
        self._held = self._buckets[0]
        self._arm = self._held.plain
        self._strategy = PLAIN
        self._exploring = False  # another arm than the best
        self._charged = False  # and the allowance pays
        self._next_doubt_step = 0
        self._running = 0
        self._times_s: list[float] = []
        self._drafted = self._accepted = 0
        # (running, times, drafted, accepted) before `running` changed
        self._segments: list[tuple[int, list[float], int, int]] = []

    def _bucket(self, number: int, arms: Sequence[Strategy]) -> Bucket:
        chosen = [arm for arm in arms if arm.tokens_to_verify <= BUCKET_NODES[number]]
        return Bucket(
            number,
            Arm(strategy=PLAIN, holds=deque(maxlen=self._window), value=1.0),
            [Arm(strategy=arm, holds=deque(maxlen=self._window)) for arm in chosen],
            {arm.drafter: 0 for arm in chosen},
        )

    @property
    def max_nodes(self) -> int:
        return self._max_nodes

    def arms_at(self, running: int) -> Sequence[Strategy]:
        if running >= len(self._of):
            return ()
        return [arm.strategy for arm in self._of[running].arms]

    def choose(self, load: Load) -> Strategy:
        left = self._left
        if left and load.running == self._running:
            self._left = left - 1
            return self._strategy
        return self._choose(load.running)

    def _choose(self, running: int) -> Strategy:
        if self._times_s:
            self._segments.append((self._running, self._times_s, self._drafted, self._accepted))
            self._times_s, self._drafted, self._accepted = [], 0, 0
        self._running = running
        bucket = self._of[running] if self._switch.on(running) else self._off
        if self._left > 0 and bucket is self._held:
            self._left -= 1
            return self._strategy
        self._close()
        if bucket is self._off:
            self._hold(bucket, bucket.plain, HOLD_STEPS, exploring=False)
        else:
            self._decide(bucket, running)
        self._strategy = self._arm.strategy
        return self._strategy

    def record(self, outcome: StepOutcome) -> None:
        if self._costs is not None:
            self._costs.observe(outcome)
        if outcome.kind is StepKind.USUAL:
            if outcome.strategy is self._strategy:
                self._times_s.append(outcome.elapsed_s)
                self._drafted += outcome.drafted
                self._accepted += outcome.accepted
        elif outcome.kind is StepKind.CAUGHT_UP:
            self._caught_up(outcome.strategy, outcome.load.running, outcome.elapsed_s)

    def _caught_up(self, strategy: Strategy, running: int, elapsed_s: float) -> None:
        plain_s = self._cost.at(running) or elapsed_s
        drafting_s = self._profiles[strategy.drafter].extra_s(strategy, running) or 0.0
        late_s = max(0.0, elapsed_s - plain_s - drafting_s)
        measured = self._switch_s.setdefault(strategy.drafter, {})
        measured[self._held.number] = (measured.get(self._held.number, late_s) + late_s) / 2
        if self._exploring and strategy is self._strategy:
            self._credit_s -= late_s if self._charged else 0.0
            self._left += 1  # the trial has still to be made

    def unavailable(self, drafter: str) -> None:
        for bucket in self._buckets:
            self._gone += [(bucket, arm) for arm in bucket.arms if arm.strategy.drafter == drafter]
            bucket.arms = [arm for arm in bucket.arms if arm.strategy.drafter != drafter]
        if self._arm.strategy.drafter == drafter:
            self._left, self._arm, self._strategy = 0, self._held.plain, PLAIN
            self._times_s, self._drafted, self._accepted, self._segments = [], 0, 0, []

    def renewed(self, drafter: str) -> None:
        """All its arms are worth a trial. New weights are mostly the old ones moved a little: what was measured lately
        is still what to expect, until the next holds say otherwise."""
        for bucket, arm in self._gone:
            if arm.strategy.drafter == drafter:
                bucket.arms.append(arm)
        self._gone = [(bucket, arm) for bucket, arm in self._gone if arm.strategy.drafter != drafter]
        if drafter in self._profiles:
            self._profiles[drafter].fade()
        for bucket in self._buckets:
            for arm in bucket.arms:
                if arm.strategy.drafter == drafter:
                    arm.wait_steps, arm.due_step = FIRST_WAIT_STEPS, min(arm.due_step, self._step)
                    arm.holds = deque(list(arm.holds)[-KEPT_HOLDS:], arm.holds.maxlen)

    @property
    def reason(self) -> Reason:
        if self._held is self._off:
            return Reason.TOO_MANY
        if self._strategy is not PLAIN:
            return Reason.TRIAL if self._exploring else Reason.PAYS_MOST
        if not self._held.arms:
            return Reason.NO_DRAFTER
        return Reason.UNMEASURED if self._cost.at(self._running) is None else Reason.PLAIN_IS_FASTER

    def expected_s(self, outcome: StepOutcome) -> float | None:
        return None if self._costs is None else self._costs.expected_s(outcome)

    def plain_s(self, load: Load) -> float | None:
        return self._cost.at(load.running) if self._cost.measured_since(self._step - RECENT_STEPS) else None

    def beliefs(self) -> tuple[ArmBelief, ...]:
        """Every arm in every bucket, for reports and tests."""
        last = len(self._of) - 1
        edges = [(1, 1), *(((1 << n) // 2 + 1, 1 << n) for n in range(1, len(BUCKET_NODES)))]
        return tuple(
            ArmBelief(arm.strategy, first, last if bucket is self._buckets[-1] else until, arm.tries, arm.value)
            for bucket, (first, until) in zip(self._buckets, edges, strict=True)
            for arm in (bucket.plain, *bucket.arms)
            if first <= last
        )

    # Decisions.

    def _close(self) -> None:
        """Judge the hold that ends."""
        segments, self._segments = self._segments, []
        if not segments:
            if self._exploring:  # Every step was skipped, as in an evaluation: this trial is not made again and again.
                self._arm.due_step = self._step + self._arm.wait_steps
            return
        arm, bucket, plain = self._arm, self._held, self._held.plain
        steps = requests = drafted = accepted = 0
        elapsed_s = raw_s = plain_s = 0.0
        parts = []
        for running, times_s, offered, taken in segments:
            middle_s = sorted(times_s)[len(times_s) // 2 if len(times_s) > 2 else 0]
            count = len(times_s)
            # A step that the machine interrupted says nothing about the arm, nor does its very first step.
            limit_s = 2 * middle_s if arm.tries else middle_s
            elapsed_s += sum(min(time_s, limit_s) for time_s in times_s)
            raw_s += sum(times_s)
            if arm is plain:
                self._cost.add(running, middle_s, self._step + count, sure=count >= PLAIN_STEPS)
            parts.append((running, count + taken / running))
            plain_s += count * (self._cost.at(running) or 0.0)
            steps, requests = steps + count, requests + count * running
            drafted, accepted = drafted + offered, accepted + taken
        self._step += steps
        rival = bucket.best()
        self._credit_s += self._exploration * raw_s / (QUIET if bucket.quiet() else 1)
        hold: Hold = (tuple(parts), max(elapsed_s, 1e-9), self._step)
        if self._charged:
            spent_s = min(raw_s, 2 * elapsed_s)
            self._credit_s -= max(0.0, spent_s - hold[1] * speedup((hold,), self._cost) / (rival.value or 1.0))
        arm.tries += 1
        arm.seen_steps += steps
        if arm is plain:
            for other in bucket.arms:
                other.judge(self._cost)
            arm.due_step = self._step + arm.wait_steps
            arm.wait_steps = min(2 * arm.wait_steps, PLAIN_WAIT_STEPS)
            return
        arm.holds.append(hold)
        while len(arm.holds) > 2 and arm.holds[0][2] < self._step - STALE_STEPS:
            arm.holds.popleft()
        arm.judge(self._cost)
        self._profiles[arm.strategy.drafter].learn(
            arm.strategy, requests, steps, drafted, accepted, elapsed_s - plain_s
        )
        before = arm.value or 0.0
        if arm.changed(self._cost) and not self._exploring:
            self._cost.doubt()  # Or is it the machine? Then plain decoding has changed as well.
            if (arm.value or 0.0) < before:
                self._start_over(arm)
                return
        best = bucket.best()
        if arm.tries < SURE_TRIES or self._promise(arm, segments[-1][0]) > CLOSE * (best.value or 1.0):
            arm.wait_steps = FIRST_WAIT_STEPS
        else:
            arm.wait_steps = min(2 * arm.wait_steps, LONGEST_WAIT_STEPS)
        arm.due_step = self._step + arm.wait_steps

    def _start_over(self, fallen: Arm) -> None:
        """What was measured of its drafter does not hold any more: it, and what lost against it, is worth a trial."""
        drafter = fallen.strategy.drafter
        self._fresh, self._profiles[drafter] = True, DrafterProfile()
        for bucket in self._buckets:
            for arm in (bucket.plain, *bucket.arms):
                arm.wait_steps, arm.due_step = FIRST_WAIT_STEPS, self._step
                if arm.strategy.drafter == drafter and arm is not fallen:
                    arm.forget()

    def _decide(self, bucket: Bucket, running: int) -> None:
        plain_s = self._cost.at(running)
        if plain_s is None:  # Nothing compares before plain decoding is known; it costs what 'off' costs.
            self._hold(bucket, bucket.plain, PLAIN_STEPS, exploring=False)
            return
        trial_steps = max(TRIAL_STEPS, -(-TRIAL_REQUESTS // running))
        if self._fresh and self._step >= self._next_grant_step:
            self._fresh, self._next_grant_step = False, self._step + GRANT_EVERY_STEPS
            self._credit_s = max(self._credit_s, 0.0) + GRANT_STEPS * plain_s
        best = bucket.best()
        if self._cost.doubted and best is not bucket.plain and self._step >= self._next_doubt_step:
            self._next_doubt_step = self._step + DOUBT_EVERY_STEPS
            self._hold(bucket, bucket.plain, PLAIN_STEPS, exploring=True, charged=False)
            return
        newcomer = self._newcomer(bucket, best, running) if bucket.newcomers else None
        if newcomer is not None:
            self._hold(bucket, newcomer, trial_steps, exploring=True, charged=False)
            return
        candidate = self._candidate(bucket, best, running, trial_steps) if self._credit_s > 0 else None
        if candidate is not None and self._credit_s >= self._stake_s(bucket, candidate, running, trial_steps):
            self._hold(bucket, candidate, trial_steps, exploring=True)
            return
        if best is not bucket.plain and bucket.plain.tries < PLAIN_HOLDS:
            self._hold(bucket, bucket.plain, PLAIN_STEPS, exploring=False)
            return
        steps = min(max(int(HOLD_S / plain_s), 1), HOLD_STEPS)
        if best is not bucket.plain:
            steps = min(steps, best.seen_steps)  # The luck of a short trial is followed no further than it reaches.
        elif bucket.quiet():
            steps *= QUIET
        self._hold(bucket, best, steps, exploring=False)

    def _hold(self, bucket: Bucket, arm: Arm, steps: int, *, exploring: bool, charged: bool = True) -> None:
        self._held, self._arm, self._exploring = bucket, arm, exploring
        self._charged = exploring and charged
        self._left = steps - 1 + self._lag

    def _newcomer(self, bucket: Bucket, best: Arm, running: int) -> Arm | None:
        """With what to look at a drafter that was never tried here, unless elsewhere it has promised too little.

        These looks are few (drafters x buckets) and not charged: a price that was only assumed must keep no drafter
        from being measured.
        """
        for drafter, looks in list(bucket.newcomers.items()):
            own = [arm for arm in bucket.arms if arm.strategy.drafter == drafter]
            if not own or looks >= FIRST_LOOKS or any(arm.tries for arm in own):
                del bucket.newcomers[drafter]
                continue
            # Of those of which nothing is known, the smallest: it says what the others promise, and costs least.
            arm = max(own, key=lambda arm: (self._promise(arm, running), -arm.strategy.tokens_to_verify))
            if self._promise(arm, running) >= HOPELESS * (best.value or 1.0):
                bucket.newcomers[drafter] = looks + 1
                return arm
        return None

    def _candidate(self, bucket: Bucket, best: Arm, running: int, trial_steps: int) -> Arm | None:
        """The arm most worth a trial now, or worth saving for, if any."""
        plain, step = bucket.plain, self._step
        if best is not plain and step >= plain.due_step and not self._cost.measured_near(running):
            return plain  # What plain decoding costs here was only inferred.
        saved_s = self._exploration * (self._cost.at(running) or 0.0)  # per step that an arm has waited
        chosen, most = None, 0.0  # by promise and by how long it has waited: else those that come close starve the rest
        for arm in bucket.arms:
            if arm is best or step < arm.due_step:
                continue
            promise = self._promise(arm, running)
            if arm.value is None and promise < HOPELESS * (best.value or 1.0) and step < HOPELESS_WAIT_STEPS:
                continue
            urgency = promise * (1 + (step - arm.due_step) / arm.wait_steps)
            if urgency <= most:
                continue
            stake_s = self._stake_s(bucket, arm, running, trial_steps)
            # What is too dear now waits for cheaper ones; for what has waited long, the allowance is saved up.
            waited = step - arm.due_step
            if stake_s <= self._credit_s or (waited >= PATIENCE_STEPS and stake_s <= saved_s * waited):
                chosen, most = arm, urgency
        if chosen is None and best is not plain and step >= plain.due_step:
            return plain  # It may have become slower or faster: every reward is relative to it.
        return chosen

    def _stake_s(self, bucket: Bucket, arm: Arm, running: int, steps: int) -> float:
        """What a trial may lose against the best arm, if it keeps no more than one token per step."""
        plain_s, drafter = self._cost.at(running) or 0.0, arm.strategy.drafter
        gain, switch_s = 1.0, 0.0
        if arm is not bucket.plain:
            gain = self._promise(arm, running)
            if gain == math.inf:
                gain = 1 / (1 + arm.strategy.tokens_to_verify)
            if drafter != self._arm.strategy.drafter and (measured := self._switch_s.get(drafter)):
                switch_s = measured[min(measured, key=lambda number: abs(number - bucket.number))]
        return switch_s + steps * plain_s * max(0.0, 1 / gain - 1 / (bucket.best().value or 1.0))

    def _promise(self, arm: Arm, running: int) -> float:
        """What to expect of an arm: its own value or, if that is more, what its drafter's profile says, because a short
        trial may be bad luck; a drafter never tried comes first."""
        predicted = self._profiles[arm.strategy.drafter].predict(arm.strategy, running, self._cost.at(running) or 0.0)
        if arm.value is None:
            return math.inf if predicted is None else predicted
        return arm.value if predicted is None else max(arm.value, predicted)
