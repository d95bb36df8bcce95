"""Rounds by length: which prompts an RL step samples, which groups it trains on, and which it postpones.

Pure: no clock, no I/O. Everything depends on token counts, so it is the same on any worker and in any order.

A *short round* samples more prompts than it trains on. It trains on the groups with the shortest longest responses and
postpones the others. Those with at least the *mark* of tokens are long and wait for a long round. The rest come first
in the next short round. A *long round* samples the oldest long prompts and trains on all of them. The mark is a
quantile of the longest responses of groups trained on in earlier rounds.

The data order is cut into windows of one epoch, and at the run's last pick. A round takes picks of the next window only
when it trains on all that is left of the window before. So a run trains on exactly the picks of a run without rounds,
permuted within windows.

Source: Gao et al., RollPacker (arXiv 2509.21009), section 4.1, tail batching. There the fastest responses by the clock
win, so that the training data depends on the machines; here the shortest in tokens do.
"""

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.token_budget.window import LengthWindow

BIAS = (
    "rollout.rounds, biased: order: short prompts are learned from before long ones; over an epoch each as often as "
    "without it"
)

Turn = tuple[int, int]  # (epoch, index of the prompt), from the data order


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The prompts of one round, and how many of them train."""

    turns: tuple[Turn, ...]
    keep: int  # number of groups to train on
    long: bool  # a round of long prompts
    mark: int | None  # tokens; None: nothing was trained on yet

    @property
    def races(self) -> bool:
        return self.keep < len(self.turns)


class Rounds:
    """The choice of prompts for each round. State is plain JSON."""

    def __init__(
        self, *, factor: float, quantile: float, window: int, prompts: int, prompts_per_step: int, steps: int
    ) -> None:
        """`factor`, `quantile`, `window`: of rollout.rounds. `prompts`: in the training set. `steps`: of the run."""
        self._sampled = math.ceil(factor * prompts_per_step)  # in a short round
        self._quantile, self._prompts, self._keep = quantile, prompts, prompts_per_step
        self._last = steps * prompts_per_step
        self._lengths = LengthWindow(window)
        self._taken = 0  # picks of the data order
        self._long: list[Turn] = []  # oldest first
        self._short: list[Turn] = []  # likewise: postponed, and below the mark

    @property
    def put_off(self) -> tuple[Turn, ...]:
        return (*self._long, *self._short)

    @property
    def mark(self) -> int | None:
        """The mark in tokens; None before the first round."""
        return self._lengths.quantile(self._quantile)

    @property
    def needs(self) -> int:
        """How many picks of the data order the next round needs."""
        if len(self._long) >= self._keep:
            return 0
        here = min(max(self._wanted - len(self._short), 0), self._left)
        if len(self._short) + here >= self._keep:
            return here
        return here + max(self._keep - len(self.put_off) - here, 0)  # the window ends: some are of the next one

    def plan(self, picks: Sequence[Turn]) -> RoundPlan:
        """Return the next round; call `settle` before planning another. `picks`: the next `needs` of the data order."""
        keep, mark = self._keep, self.mark
        if len(self._long) >= keep:
            turns, self._long = self._long[:keep], self._long[keep:]
            return RoundPlan(turns=tuple(turns), keep=keep, long=True, mark=mark)
        wanted = self._wanted
        here = min(max(wanted - len(self._short), 0), self._left)
        self._taken += len(picks)
        self._short += picks[:here]
        if len(self._short) >= keep:
            turns, self._short = self._short[:wanted], self._short[wanted:]
            return RoundPlan(turns=tuple(turns), keep=keep, long=False, mark=mark)
        # The window ends: take all that is left of it first, and only then prompts of the next.
        left = [*self._long, *self._short]
        turns, rest, long = left[:keep], left[keep:], set(self._long)
        self._long, self._short = [t for t in rest if t in long], [t for t in rest if t not in long]
        return RoundPlan(turns=(*turns, *picks[here:]), keep=keep, long=True, mark=mark)

    @property
    def _wanted(self) -> int:
        """The prompts sampled in a short round; the first round has no mark, and trains on all of them."""
        return self._keep if self.mark is None else self._sampled

    def settle(self, plan: RoundPlan, chosen: Mapping[int, int], long: Sequence[int]) -> None:
        """Take the outcome of a round. `chosen`: indices of the turns to train on, with the tokens of each longest
        response (0 without any). `long`: indices of the others that have reached the mark."""
        for tokens in chosen.values():
            if tokens:
                self._lengths.add(tokens, 1.0)
        others = [index for index in range(len(plan.turns)) if index not in chosen]
        self._long += [plan.turns[index] for index in others if index in long]
        self._short = [plan.turns[index] for index in others if index not in long] + self._short

    @property
    def _left(self) -> int:
        """The picks left in the present window and the run. A new window begins when nothing is postponed."""
        within = -self._taken % self._prompts
        if not within and not self.put_off:
            within = self._prompts
        return max(min(within, self._last - self._taken), 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": self._taken,
            "long": [list(turn) for turn in self._long],
            "short": [list(turn) for turn in self._short],
            "lengths": self._lengths.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; {} is that of a run without rounds so far."""
        if not state:
            return
        self._taken = int(state["taken"])
        self._long = [(int(epoch), int(index)) for epoch, index in state["long"]]
        self._short = [(int(epoch), int(index)) for epoch, index in state["short"]]
        self._lengths.load_state_dict(state["lengths"])


class Race:
    """One short round while it is sampled: finds groups that cannot be among the shortest any more.

    Its results do not depend on when it is asked, only how early it finds them. A group that is out would not have been
    chosen if sampled to its end, and is long either way.
    """

    def __init__(self, counts: Sequence[int], keep: int, mark: int) -> None:
        """`counts`: responses of each group. `keep`: groups to choose. `mark`: tokens from which a group is long."""
        self._open, self._keep, self._mark = list(counts), keep, mark
        self.longest = [0] * len(counts)  # tokens of each group's longest response so far
        self.out = set[int]()  # groups
        self._complete: list[tuple[int, int]] = []  # (tokens, group), ascending
        self._passed = set[int]()  # groups that are long, but not complete

    def reached(self, group: int, tokens: int) -> list[int]:
        """Note that a response of the group has `tokens` tokens. Returns the groups that are now out."""
        if tokens > self.longest[group]:
            self.longest[group] = tokens
            if tokens >= self._mark and self._open[group]:
                self._passed.add(group)
            return self._found([group])
        return []

    def ended(self, group: int, tokens: int) -> list[int]:
        """Note that a response of the group has ended with `tokens` tokens. Returns the groups that are now out."""
        out = self.reached(group, tokens)
        self._open[group] -= 1
        if self._open[group] or group in self.out:
            return out
        self._passed.discard(group)
        insort(self._complete, (self.longest[group], group))
        return [*out, *self._found(sorted(self._passed))]

    def _found(self, groups: Sequence[int]) -> list[int]:
        if len(self._complete) < self._keep:
            return []
        last = self._complete[self._keep - 1]
        out = [g for g in groups if g in self._passed and (self.longest[g], g) > last]
        self.out.update(out)
        self._passed.difference_update(out)
        return out

    def chosen(self) -> list[int]:
        """The groups to train on, ascending, once all have ended or are out. A group with missing responses counts by
        those that it has."""
        ranked = sorted((tokens, group) for group, tokens in enumerate(self.longest) if group not in self.out)
        return sorted(group for _, group in ranked[: self._keep])

    def long(self) -> list[int]:
        """The groups that have reached the mark, once all have ended or are out."""
        return [group for group, tokens in enumerate(self.longest) if tokens >= self._mark]
