"""Speculate only while few requests run (TLT 5.1), with hysteresis."""


class ElasticSwitch:
    """Speculation with up to `max_running` requests. Once off, it stays off until an eighth fewer run, so that it does
    not flutter while requests come and go around the threshold."""

    def __init__(self, max_running: int) -> None:
        self._off_above = max_running
        self._on_below = max_running - max_running // 8
        self._on = True

    def on(self, running: int) -> bool:
        if self._on:
            self._on = running <= self._off_above
        else:
            self._on = running <= self._on_below
        return self._on
