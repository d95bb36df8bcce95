"""The context that every part of a run receives, besides the parts that it uses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.context import Context
from launch.config import Config
from launch.interrupt import Interrupt
from launch.observe import Observer, Span
from policies.roofline.pace import Pace


@dataclass(frozen=True, kw_only=True)
class RunContext(Context):
    config: Config
    observer: Observer
    interrupt: Interrupt
    run_dir: Path
    pace: Pace | None = None  # of experiments

    def check(self) -> None:
        """Raise Interrupted if the run was asked to stop."""
        self.interrupt.check()

    @contextmanager
    def learner_span(self, kind: str) -> Iterator[None]:
        """Record the block on the timeline as what the learner does."""
        begin_s, step = time.time(), self.observer.current_step
        yield
        self.observer.span(Span("learner", kind, begin_s, time.time(), step))
