"""Engine windows to timeline spans: what a worker did, without one record per 0.2 s. Pure; the clock is theirs."""

from collections.abc import Callable
from dataclasses import dataclass

from actors.engine.types import EngineWindow

SpanSink = Callable[[str, str, float, float], None]  # (worker, kind, start_s, end_s), seconds since the epoch

_GAP_S = 0.1  # windows closer than this are one span


@dataclass(slots=True)
class _Open:
    start_s: float
    end_s: float


class WorkerSpans:
    """Merges the decode windows of one worker and fills what lies between them, inside a run, with `idle`."""

    def __init__(self, worker: str, sink: SpanSink) -> None:
        self._worker = worker
        self._sink = sink
        self._decode: _Open | None = None
        self._covered_s = 0.0  # everything before is accounted for
        self._in_run = False

    def begin(self, now_s: float) -> None:
        """A run starts: from now on the worker decodes or idles."""
        self._close_decode()
        self._covered_s = max(self._covered_s, now_s)
        self._in_run = True

    def window(self, window: EngineWindow) -> None:
        start_s = max(window.start_s, self._covered_s)  # the last window of a run may come after its end
        if window.engine_steps == 0 or window.end_s <= start_s:
            return
        if self._decode is not None and start_s - self._decode.end_s <= _GAP_S:
            self._decode.end_s = max(self._decode.end_s, window.end_s)
            return
        self._close_decode()
        self._idle_until(start_s)
        self._decode = _Open(start_s, window.end_s)

    def other(self, kind: str, start_s: float, end_s: float) -> None:
        """Something else than decoding, such as `restart` or `load_weights`."""
        self._close_decode()
        self._idle_until(start_s)
        self._sink(self._worker, kind, start_s, end_s)
        self._covered_s = max(self._covered_s, end_s)

    def end(self, now_s: float) -> None:
        """The run is over: write what is open."""
        self._close_decode()
        self._idle_until(now_s)
        self._in_run = False

    def _close_decode(self) -> None:
        if self._decode is not None:
            self._sink(self._worker, "decode", self._decode.start_s, self._decode.end_s)
            self._covered_s = max(self._covered_s, self._decode.end_s)
            self._decode = None

    def _idle_until(self, now_s: float) -> None:
        if self._in_run and now_s - self._covered_s > _GAP_S:
            self._sink(self._worker, "idle", self._covered_s, now_s)
        self._covered_s = max(self._covered_s, now_s)
