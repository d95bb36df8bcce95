"""The seam between an engine and what chooses its strategies: called in its loop, before and after each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from policies.speculation.strategy import PLAIN, Strategy


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine step decodes, and what waits behind it."""

    running: int  # requests that decode, at least 1
    waiting: int  # requests without a place in the running batch
    context_tokens: int  # known tokens of those that decode: what attention reads


class StrategyPolicy(Protocol):
    """Chooses per engine step. Both calls together cost at most 50 us, and about 1 us while nothing is reconsidered.

    Picklable before its first call; clock-free and random only through its own seed.
    """

    @property
    def max_nodes(self) -> int:
        """The most drafted tokens per request of any strategy it may choose."""

    def arms_at(self, running: int) -> Sequence[Strategy]:
        """Every strategy that it may choose for `running` >= 1 requests; plain decoding may be missing."""

    def choose(self, load: Load) -> Strategy:
        """The strategy of the step at hand."""

    def record(self, strategy: Strategy, load: Load, drafted: int, accepted: int, elapsed_s: float) -> None:
        """What a step brought: of `drafted` tokens `accepted` beyond the one token that each request gets, summed over
        its requests; or `skip`."""

    def skip(self, strategy: Strategy, load: Load, elapsed_s: float) -> None:
        """A step whose time says nothing about the strategy: it held prompt chunks or copied blocks, captured a graph,
        or was the first with new weights."""

    def caught_up(self, strategy: Strategy, load: Load, elapsed_s: float) -> None:
        """A step in which the drafter worked through text that it had not followed: what switching to it costs."""

    def unavailable(self, drafter: str) -> None:
        """The drafter failed: do not choose it until it is `renewed`."""

    def renewed(self, drafter: str) -> None:
        """The drafter has new weights: what was measured of it is past."""

    def plain_s(self, load: Load) -> float | None:
        """Seconds of a plain decoding step of that load; None: never measured, or not lately."""


class FixedPolicy:
    """Always the same strategy while at most `max_running` requests decode; `PLAIN` is 'off'."""

    def __init__(self, strategy: Strategy, max_running: int = 1 << 30) -> None:
        self._strategy, self._max_running = strategy, max_running
        self._failed = False

    @property
    def max_nodes(self) -> int:
        return self._strategy.tokens_to_verify

    def arms_at(self, running: int) -> Sequence[Strategy]:
        return () if running > self._max_running else (self._strategy,)

    def choose(self, load: Load) -> Strategy:
        return PLAIN if self._failed or load.running > self._max_running else self._strategy

    def record(self, strategy: Strategy, load: Load, drafted: int, accepted: int, elapsed_s: float) -> None:
        pass

    def skip(self, strategy: Strategy, load: Load, elapsed_s: float) -> None:
        pass

    def caught_up(self, strategy: Strategy, load: Load, elapsed_s: float) -> None:
        pass

    def unavailable(self, drafter: str) -> None:
        self._failed = self._failed or drafter == self._strategy.drafter

    def renewed(self, drafter: str) -> None:
        self._failed = self._failed and drafter != self._strategy.drafter

    def plain_s(self, load: Load) -> float | None:
        return None
