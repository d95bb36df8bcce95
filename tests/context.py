"""What a part of a run is given, for a part on its own."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.loop import EventLoop
from actors.observer import RunObserver
from launch.context import RunContext
from launch.interrupt import Interrupt


def nothing(*_: Any) -> None: ...


class Heard(list[tuple[str, str]], RunObserver):
    """Keeps the events."""

    def event(self, kind: str, message: str) -> None:
        self.append((kind, message))


def run_context(
    config: Any = None,
    *,
    on_event: Callable[[str, str], object] = nothing,
    progress: Callable[..., object] = nothing,
    observer: Any = None,
    interrupt: Interrupt | None = None,
    react: Callable[[Any], None] = nothing,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    **more: Any,
) -> RunContext:
    """`config`: as much of one as the part reads. `more`: further attributes of the observer."""
    said = {"event": on_event, "progress": progress, "span": nothing, "worked": nothing, "current_step": 1} | more
    loop = EventLoop(clock)
    loop.react_with(react)
    return RunContext(
        config=config,
        observer=observer or SimpleNamespace(**said),
        interrupt=Interrupt() if interrupt is None else interrupt,
        run_dir=Path("r"),
        loop=loop,
        wall=wall,
    )
