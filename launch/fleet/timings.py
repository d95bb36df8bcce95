"""Measured times for fleet decisions: workers' speed, time of a start, and time between requests.

Times are passed in, in seconds of one clock; nothing is assumed before it was measured. Where a number varies, the one
that favours keeping a worker is taken: the shortest of the last waits, the longest of the last starts.
"""

from collections import defaultdict, deque

_LAST = 3  # of each are kept
_ENOUGH_S = 1.0  # time of a worker at full load, to measure its speed
_NEWEST = 0.5  # weight of the newest rollout in the speed


def _few() -> deque[float]:
    return deque(maxlen=_LAST)


class FleetTimings:
    """Durations of rollouts and waits of one run. Waits are kept per kind of the rollout before ("rollout", "refill",
    "eval")."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0  # of one worker at full load; 0: unknown
        self._starts = _few()
        self._kind = ""  # of the rollout in progress, or the last
        self._ended_s: float | None = None  # None: in progress, or none yet
        self._tail_s: float | None = None  # since when no request waits, in the one in progress
        self._gaps: defaultdict[str, deque[float]] = defaultdict(_few)  # from its end to the next one's begin
        self._tails: defaultdict[str, deque[float]] = defaultdict(_few)  # from when no request waited to its end
        self._tokens: dict[str, float] = {}  # of the last rollout of each kind
        self._full_tokens = self._full_s = self._any_tokens = self._any_s = 0.0

    @property
    def start_s(self) -> float | None:
        """The time from the wish for a worker until it can have requests; None if unknown."""
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
        """During a rollout: `waiting` requests wait for a worker."""
        if waiting:
            self._tail_s = None
        elif self._tail_s is None:
            self._tail_s = now_s

    def window(self, tokens: int, seconds: float, *, waiting: bool) -> None:
        """A worker with requests has sampled. `waiting`: others wait, so it ran at full load."""
        self._any_tokens, self._any_s = self._any_tokens + tokens, self._any_s + seconds
        if waiting:
            self._full_tokens, self._full_s = self._full_tokens + tokens, self._full_s + seconds
            if not self.tokens_per_s and self._full_s >= _ENOUGH_S:
                self.tokens_per_s = self._full_tokens / self._full_s

    def ends(self, tokens: int, now_s: float) -> None:
        """The rollout has ended. `tokens`: of its responses."""
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
        """The expected tokens of the next rollout."""
        return self._tokens.get("rollout", 0.0)

    @property
    def between_s(self) -> float:
        """The usual time from when no request waits until the next rollout begins."""
        return min(self._tails[self._kind], default=0.0) + min(self._gaps[self._kind], default=0.0)

    def next_in_s(self, now_s: float) -> float:
        """Return the time until the next rollout begins; 0 if unknown, and while requests wait."""
        gap_s = min(self._gaps[self._kind], default=0.0)
        if self._ended_s is not None:
            return max(gap_s - (now_s - self._ended_s), 0.0)
        if self._tail_s is None:
            return 0.0
        return max(min(self._tails[self._kind], default=0.0) - (now_s - self._tail_s), 0.0) + gap_s
