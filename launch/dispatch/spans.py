"""Merge engine windows into timeline spans of a worker, to avoid one record per 0.2 s. Pure; callers pass the time."""

from collections.abc import Callable

from actors.spans import Joiner, Stretch
from contracts.rollout import EngineWindow

SpanSink = Callable[[str, str, float, float], None]  # (worker, kind, start_s, end_s), seconds since the epoch

_GAP_S = 0.1  # windows closer than this are one span


class WorkerSpans:
    """Merges the decode windows of one worker. Inside a run, gaps between them become `idle`."""

    def __init__(self, worker: str, sink: SpanSink) -> None:
        self._worker = worker
        self._sink = sink
        self._decoding: Joiner[str, str] = Joiner(_GAP_S)
        self._covered_s = 0.0  # everything before is accounted for
        self._in_run = False

    def begin(self, now_s: float) -> None:
        """Start a run: from now on the worker decodes or idles."""
        self._write(self._decoding.take(self._worker))
        self._covered_s = max(self._covered_s, now_s)
        self._in_run = True

    def window(self, window: EngineWindow, kind: str = "decode") -> None:
        """Add a window. `kind`: what its steps did."""
        start_s = max(window.start_s, self._covered_s)  # the last window of a run may come after its end
        if window.engine_steps == 0 or window.end_s <= start_s:
            return
        self._write(self._decoding.add(self._worker, kind, start_s, window.end_s))

    def other(self, kind: str, start_s: float, end_s: float) -> None:
        """Add a span of another kind than decoding, such as `restart` or `load_weights`."""
        self._write(self._decoding.take(self._worker))
        self._idle_until(start_s)
        self._sink(self._worker, kind, start_s, end_s)
        self._covered_s = max(self._covered_s, end_s)

    def end(self, now_s: float) -> None:
        """End the run and write the open span."""
        self._write(self._decoding.take(self._worker))
        self._idle_until(now_s)
        self._in_run = False

    def _write(self, over: Stretch[str] | None) -> None:
        if over is not None:
            self._idle_until(over.start_s)
            self._sink(self._worker, over.label, over.start_s, over.end_s)
            self._covered_s = max(self._covered_s, over.end_s)

    def _idle_until(self, now_s: float) -> None:
        if self._in_run and now_s - self._covered_s > _GAP_S:
            self._sink(self._worker, "idle", self._covered_s, now_s)
        self._covered_s = max(self._covered_s, now_s)
