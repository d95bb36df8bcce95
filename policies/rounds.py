"""Rounds by length: which prompts an RL step samples, which of them it learns from, and which are put off. Pure: no
clock, no I/O. Everything follows from token counts, so it is the same whoever samples, and in whatever order.

A *short round* samples more prompts than it learns from. It learns from the groups whose longest responses are the
shortest. The others are put off: those of at least the *mark* of tokens are long and wait for a long round, the rest
come first in the next short round. A *long round* learns from the oldest long prompts, all that it samples. The mark is
a quantile of the longest responses of groups that were learned from, in earlier rounds.

The order of the data is cut into windows of as many picks as there are prompts (an epoch), and at the run's last pick.
A round takes picks of the next window only when it learns from all that is left of the one before. So a run learns from
exactly the picks that it would learn from without rounds, permuted within windows.

Source: Gao et al., RollPacker (arXiv 2509.21009), section 4.1, tail batching. There the fastest responses by the clock
win, so that what is learned depends on machines; here the shortest in tokens do.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.token_budget.window import LengthWindow

BIAS = (
    "rollout.rounds, biased: order: short prompts are learned from before long ones; over an epoch each as often as "
    "without it"
)

Turn = tuple[int, int]  # (epoch, index of the prompt), as the data order gives it


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What one round samples."""

    turns: tuple[Turn, ...]
    keep: int  # so many of them are learned from
    long: bool  # a round of long prompts
    mark: int | None  # tokens; None: nothing was learned from yet

    @property
    def races(self) -> bool:
        return self.keep < len(self.turns)


class Rounds:
    """Whose turn it is. State is plain JSON."""

    def __init__(
        self, *, factor: float, quantile: float, window: int, prompts: int, prompts_per_step: int, steps: int
    ) -> None:
        """`factor`, `quantile`, `window`: of rollout.rounds. `prompts`: in the training set. `steps`: of the run."""
        self._sampled = math.ceil(factor * prompts_per_step)  # by a short round
        self._quantile, self._prompts, self._keep = quantile, prompts, prompts_per_step
        self._last = steps * prompts_per_step
        self._lengths = LengthWindow(window)
        self._taken = 0  # of the order
        self._long: list[Turn] = []  # oldest first
        self._short: list[Turn] = []  # likewise: put off, and below the mark

    @property
    def put_off(self) -> tuple[Turn, ...]:
        return (*self._long, *self._short)

    @property
    def mark(self) -> int | None:
        """Tokens; None before the first round."""
        return self._lengths.quantile(self._quantile)

    def plan(self, take: Callable[[int], list[Turn]]) -> RoundPlan:
        """The next round; `settle` comes before another one. `take(n)`: the next n of the data order."""
        keep, mark = self._keep, self.mark
        if len(self._long) >= keep:
            turns, self._long = self._long[:keep], self._long[keep:]
            return RoundPlan(turns=tuple(turns), keep=keep, long=True, mark=mark)
        wanted = keep if mark is None else self._sampled
        self._short += self._take(take, min(max(wanted - len(self._short), 0), self._left))
        if len(self._short) >= keep:
            turns, self._short = self._short[:wanted], self._short[wanted:]
            return RoundPlan(turns=tuple(turns), keep=keep, long=False, mark=mark)
        # The window ends: all that is left of it, and only then prompts of the next.
        left = [*self._long, *self._short]
        turns, rest, long = left[:keep], left[keep:], set(self._long)
        self._long, self._short = [t for t in rest if t in long], [t for t in rest if t not in long]
        turns += self._take(take, keep - len(turns))
        return RoundPlan(turns=tuple(turns), keep=keep, long=True, mark=mark)

    def settle(self, plan: RoundPlan, chosen: Mapping[int, int], long: Sequence[int]) -> None:
        """What became of a round. `chosen`: indices of its turns that are learned from, each with the tokens of its
        longest response, 0 without any. `long`: those of the others that have reached the mark."""
        for tokens in chosen.values():
            if tokens:
                self._lengths.add(tokens, 1.0)
        others = [index for index in range(len(plan.turns)) if index not in chosen]
        self._long += [plan.turns[index] for index in others if index in long]
        self._short = [plan.turns[index] for index in others if index not in long] + self._short

    @property
    def _left(self) -> int:
        """Picks that the present window and the run still have. A new window begins when nothing is put off."""
        within = -self._taken % self._prompts
        if not within and not self.put_off:
            within = self._prompts
        return max(min(within, self._last - self._taken), 0)

    def _take(self, take: Callable[[int], list[Turn]], count: int) -> list[Turn]:
        self._taken += count
        return take(count)

    def state_dict(self) -> dict[str, Any]:
        return {
            "taken": self._taken,
            "long": [list(turn) for turn in self._long],
            "short": [list(turn) for turn in self._short],
            "lengths": self._lengths.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """{}: of a run that had no rounds so far."""
        if not state:
            return
        self._taken = int(state["taken"])
        self._long = [(int(epoch), int(index)) for epoch, index in state["long"]]
        self._short = [(int(epoch), int(index)) for epoch, index in state["short"]]
        self._lengths.load_state_dict(state["lengths"])


class Race:
    """One short round while it is sampled: which groups cannot be among the shortest any more.

    What it says does not depend on when it is asked, only how early it says so: a group that is out would not have been
    chosen had it been sampled to its end, and is long either way.
    """

    def __init__(self, counts: Sequence[int], keep: int, mark: int) -> None:
        """`counts`: responses of each group. `keep`: groups to be chosen. `mark`: tokens from which a group is long."""
        self._open, self._keep, self._mark = list(counts), keep, mark
        self.longest = [0] * len(counts)  # tokens of each group's longest response so far
        self.out = set[int]()  # groups
        self._complete: list[tuple[int, int]] = []  # (tokens, group), ascending
        self._passed = set[int]()  # groups that are long, and not complete

    def reached(self, group: int, tokens: int) -> list[int]:
        """A response of the group has so many tokens. Returns groups that are out from now on."""
        if tokens > self.longest[group]:
            self.longest[group] = tokens
            if tokens >= self._mark and self._open[group]:
                self._passed.add(group)
            return self._found([group])
        return []

    def ended(self, group: int, tokens: int) -> list[int]:
        """A response of the group has ended with so many tokens. Returns groups that are out from now on."""
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
        """The groups to learn from, ascending, once all have ended or are out. One that lacks a response counts with
        those that it has."""
        ranked = sorted((tokens, group) for group, tokens in enumerate(self.longest) if group not in self.out)
        return sorted(group for _, group in ranked[: self._keep])

    def long(self) -> list[int]:
        """The groups that have reached the mark, once all have ended or are out."""
        return [group for group, tokens in enumerate(self.longest) if tokens >= self._mark]
