"""Measured seconds of a plain decoding step by batch size. Owns the estimate; reads no clock."""

from collections import deque

_SAMPLES = 15  # steps remembered per batch size: recent enough to follow longer contexts and a busier machine
_ENOUGH = 3
_REFRESH = 8  # steps between two medians: a plain step must not pay for one


class PlainCost:
    """Median of recent plain steps per batch size; sizes between measured ones are interpolated."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._added: dict[int, int] = {}
        self._known: dict[int, float] = {}  # medians, by measured size
        self._cache: dict[int, float | None] = {}

    def add(self, running: int, elapsed_s: float) -> None:
        """A plain step of `running` requests took elapsed_s."""
        samples = self._samples.get(running)
        if samples is None:
            samples = self._samples[running] = deque(maxlen=_SAMPLES)
            self._added[running] = 0
        samples.append(elapsed_s)
        added = self._added[running] = self._added[running] + 1
        if added >= _ENOUGH and (added < _REFRESH or added % _REFRESH == 0):
            self._known[running] = sorted(samples)[len(samples) // 2]
            self._cache.clear()

    def at(self, running: int) -> float | None:
        """Seconds of a plain step; None before anything was measured."""
        try:
            return self._cache[running]
        except KeyError:
            value = self._cache[running] = self._estimate(running)
            return value

    def measured_near(self, running: int) -> bool:
        """A size at most a quarter away was measured: more than an inference."""
        return any(4 * abs(size - running) <= running for size in self._known)

    def _estimate(self, running: int) -> float | None:
        known = self._known
        if running in known:
            return known[running]
        if not known:
            return None
        below = max((size for size in known if size < running), default=None)
        above = min((size for size in known if size > running), default=None)
        if below is not None and above is not None:
            part = (running - below) / (above - below)
            return known[below] + part * (known[above] - known[below])
        nearest = below if below is not None else above
        assert nearest is not None
        # A step has a fixed part: beyond what was measured, cost grows or falls less than the batch does.
        return known[nearest] * (1 + 0.5 * (running - nearest) / max(running, nearest))
