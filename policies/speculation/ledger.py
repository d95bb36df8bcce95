"""Accounts of each drafter: seconds saved beside plain decoding and beside the best choice without it, and pauses.

It knows no costs and makes no choice. Beside plain decoding a drafter may lose what it earned, and all losers together
EVER of what was decoded so far (or `exploration`, if more): a first rollout begins with nothing to lose. The caller
estimates what a step may lose, so a sum can exceed that by one step's error.

A drafter that lost its allowance beside the best choice without it is not used for REST times the loss. Each further
pause is LONGER times as long, until the drafter has earned its loss back. So one burst of a disturbed machine costs a
few seconds, and a drafter that always loses is tried ever more rarely. After a pause that account is empty.
"""

from collections.abc import Iterable
from dataclasses import dataclass

PAST_STEPS = 4096  # what was decoded so many steps ago counts for half
IDLE_STEPS = 512  # what was late of a drafter, in so many steps of others
LOSSES = 1.0  # times `exploration`: of the decode time since it came back, what a drafter may lose
REST, LONGER, LONGEST = 8.0, 2.0, 4096.0  # times what it lost: its first rest, each further one, at most
EVER = 0.015  # of all that an engine decoded: what drafters may have lost, or `exploration` if that is more
WORST = 4.0  # times what was expected: a pardoned step counts as no longer, so that one pause rules no drafter out
TOGETHER, PARDON = 2, 256  # usual steps between late ones of one burst; steps of its own between two pardoned bursts


@dataclass(slots=True, kw_only=True)
class _Account:
    """Seconds of one drafter."""

    expected_s: float = 0.0  # its steps, with drafts as predicted
    took_s: float = 0.0
    saved_s: float = 0.0  # since it came back; of gains no more than it may lose, or lost in one step
    earned_s: float = 0.0  # since it came back, all of it
    decoded_s: float = 0.0  # by anyone, since it came back
    rest_s: float = 0.0  # of others' decoding, until it comes back
    longer: float = REST  # the next rest, times what was lost
    owed_s: float = 0.0  # that it lost before it rested, until it is earned back
    ever_s: float = 0.0  # saved beside plain decoding since the engine began; gains fade
    steps: int = 0  # of its own
    late_at: int = -PARDON  # the last late one
    pardon_at: int = 0  # from which step on the next burst of late ones is pardoned
    pardoned: bool = False  # the last burst
    worst_s: float = 0.0  # that one step lost: so much of its gains is kept for another


class DrafterLedger:
    """The accounts of one engine's drafters."""

    def __init__(self, drafters: Iterable[str], exploration: float) -> None:
        self._accounts = {drafter: _Account() for drafter in drafters}
        self._exploration, self._granted_s = exploration, 0.0
        self.share = max(EVER, exploration)  # of decode time: what all losers together may have lost
        self._decoded_s = 0.0  # by anyone, since the engine began

    def grant(self, seconds: float) -> None:
        """Set the seconds that each drafter may lose before anything was decoded."""
        self._granted_s = seconds

    def decoded(self, steps: int, seconds: float, drafted: Iterable[str]) -> None:
        """Add engine steps and their seconds; `drafted`: the drafters used in them."""
        self._decoded_s += seconds
        keep, idle, busy = 0.5 ** (steps / PAST_STEPS), 0.5 ** (steps / IDLE_STEPS), set(drafted)
        for drafter, one in self._accounts.items():
            late = keep if drafter in busy else idle
            one.expected_s, one.took_s = late * one.expected_s, late * one.took_s
            one.saved_s, one.decoded_s = keep * one.saved_s, keep * one.decoded_s + seconds
            one.worst_s *= keep
            one.ever_s = min(one.ever_s, keep * one.ever_s)
            if one.rest_s > 0.0:
                one.rest_s -= seconds
                if one.rest_s <= 0.0:
                    one.expected_s = one.took_s = one.saved_s = one.earned_s = one.decoded_s = one.rest_s = 0.0

    def took(self, drafter: str, seconds: float, expected_s: float) -> float:
        """Add a step of `drafter` that took `seconds`, predicted `expected_s`. Return the seconds that count.

        A late step in a burst counts WORST times `expected_s` at most, unless such bursts are frequent."""
        one, counted_s = self._accounts[drafter], seconds
        one.steps += 1
        if seconds > WORST * expected_s:
            if one.steps - one.late_at > TOGETHER:
                one.pardoned = one.steps >= one.pardon_at
                one.pardon_at = one.steps + PARDON if one.pardoned else one.pardon_at
            one.late_at = one.steps
            counted_s = WORST * expected_s if one.pardoned else seconds
            one.worst_s = max(one.worst_s, counted_s - expected_s)
        one.expected_s, one.took_s = one.expected_s + expected_s, one.took_s + counted_s
        return counted_s

    def gained(self, drafter: str, seconds: float) -> None:
        """Add seconds saved beside plain decoding; negative: lost."""
        self._accounts[drafter].ever_s += seconds

    def net_s(self, drafter: str) -> float:
        """Return the seconds that it saved beside plain decoding; gains fade."""
        return self._accounts[drafter].ever_s

    def spare_s(self, drafter: str) -> float:
        """Return the seconds >= 0 that a step of `drafter` may lose beside plain decoding."""
        lost_s = sum(min(one.ever_s, 0.0) for one in self._accounts.values())
        return max(self._accounts[drafter].ever_s, 0.0) + max(self.share * self._decoded_s + lost_s, 0.0)

    def saved(self, drafter: str, seconds: float, once_s: float) -> None:
        """Add seconds saved compared with the best choice without `drafter`; negative: lost.

        once_s: seconds of making it ready. They count as lost only when it has not earned them back."""
        one = self._accounts[drafter]
        one.earned_s += seconds
        one.saved_s = min(one.saved_s + seconds, max(self._may_lose_s(one), one.worst_s))
        if one.owed_s and one.earned_s >= one.owed_s:
            one.owed_s, one.longer = 0.0, REST
        if one.rest_s <= 0.0 and -one.saved_s > self._may_lose_s(one) + once_s:
            one.owed_s, one.rest_s = -one.saved_s, -one.saved_s * one.longer
            one.longer = min(LONGER * one.longer, LONGEST)

    def rests(self, drafter: str) -> bool:
        return self._accounts[drafter].rest_s > 0.0

    def lateness(self, drafter: str) -> float:
        """Return measured over predicted seconds of its steps, >= 1.

        The usual price of drafts that are sometimes very late is below their mean. The allowance is added to both sums,
        so the ratio tends to 1 while other drafters decode, and the drafter is tried again."""
        one = self._accounts[drafter]
        doubt_s = self._may_lose_s(one)
        return max((one.took_s + doubt_s) / (one.expected_s + doubt_s), 1.0) if doubt_s else 1.0

    def _may_lose_s(self, one: _Account) -> float:
        return self._granted_s + LOSSES * self._exploration * one.decoded_s
