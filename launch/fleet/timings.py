"""What a fleet is decided from, as it was measured: how fast workers are, how long one takes to come, and when requests
come again. Times are given, in seconds of one clock; nothing is guessed before it was seen.

Where a number varies the one is taken that makes less of letting a worker go: the shortest of the last waits, the
longest of the last starts.
"""

from collections import defaultdict, deque

_LAST = 3  # of each are remembered
_ENOUGH_S = 1.0  # of a worker at full work, for its speed
_NEWEST = 0.5  # weight of a rollout in the speed


def _few() -> deque[float]:
    return deque(maxlen=_LAST)


class FleetTimings:
    """Durations of rollouts and waits of one run. Kinds of rollouts ("rollout", "refill", "eval") are followed by waits
    of their own."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of one worker with all the requests it can run; 0: not known
        self._starts = _few()
        self._kind = ""  # of the rollout that is under way, or was last
        self._ended_s: float | None = None  # None: it is under way, or there was none
        self._tail_s: float | None = None  # since when nothing waits in the one that is under way
        self._gaps: defaultdict[str, deque[float]] = defaultdict(_few)  # from its end to the next one's begin
        self._tails: defaultdict[str, deque[float]] = defaultdict(_few)  # from when nothing waited to its end
        self._tokens: dict[str, float] = {}  # of the last rollout of each kind
        self._full_tokens = self._full_s = self._any_tokens = self._any_s = 0.0

    @property
    def start_s(self) -> float | None:
        """From the wish for a worker until it can have requests; None: not known."""
        return max(self._starts, default=None)

    def started(self, seconds: float) -> None:
        """A worker has come up."""
        self._starts.append(seconds)

    def begins(self, kind: str, now_s: float) -> None:
        if self._ended_s is not None:
            self._gaps[self._kind].append(now_s - self._ended_s)
        self._kind, self._ended_s, self._tail_s = kind, None, None
        self._full_tokens = self._full_s = self._any_tokens = self._any_s = 0.0

    def looked(self, waiting: int, now_s: float) -> None:
        """While one is under way: so many requests wait for a worker."""
        if waiting:
            self._tail_s = None
        elif self._tail_s is None:
            self._tail_s = now_s

    def window(self, tokens: int, seconds: float, *, waiting: bool) -> None:
        """A worker with requests has sampled; `waiting`: others wait, so it had all it can run."""
        self._any_tokens, self._any_s = self._any_tokens + tokens, self._any_s + seconds
        if waiting:
            self._full_tokens, self._full_s = self._full_tokens + tokens, self._full_s + seconds
            if not self.tokens_per_s and self._full_s >= _ENOUGH_S:
                self.tokens_per_s = self._full_tokens / self._full_s

    def ends(self, tokens: int, now_s: float) -> None:
        """`tokens`: of its responses."""
        self._tails[self._kind].append(0.0 if self._tail_s is None else now_s - self._tail_s)
        self._ended_s, self._tail_s = now_s, None
        self._tokens[self._kind] = float(tokens)
        full = self._full_s >= _ENOUGH_S
        sampled, seconds = (self._full_tokens, self._full_s) if full else (self._any_tokens, self._any_s)
        if sampled and seconds:
            rate = sampled / seconds
            self.tokens_per_s += (rate - self.tokens_per_s) * (_NEWEST if self.tokens_per_s else 1.0)

    @property
    def next_tokens(self) -> float:
        """Expected tokens of the next rollout."""
        return self._tokens.get("rollout", 0.0)

    @property
    def between_s(self) -> float:
        """Usually, from when nothing waits any more until the next rollout begins."""
        return min(self._tails[self._kind], default=0.0) + min(self._gaps[self._kind], default=0.0)

    def next_in_s(self, now_s: float) -> float:
        """Until the next rollout begins; 0 where that is not known, and while requests wait."""
        gap_s = min(self._gaps[self._kind], default=0.0)
        if self._ended_s is not None:
            return max(gap_s - (now_s - self._ended_s), 0.0)
        if self._tail_s is None:
            return 0.0
        return max(min(self._tails[self._kind], default=0.0) - (now_s - self._tail_s), 0.0) + gap_s
