"""Records of a run in one process, kept in memory without a folder: for tests, experiments and notebooks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from actors.engine.process import NO_SPECULATION
from config.speculation import SpeculationOptions
from launch.config import Config
from launch.local.job import initial_weights, open_job, threads_of
from launch.local.steps import run_steps
from launch.observe import Sample, Span, StepRecord
from launch.run.evaluate import evaluate_job


@dataclass(kw_only=True)
class RunRecord:
    """A run's reports; stands in for the Observer."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # by RL steps done
    responses: dict[int, list[Sample]] = field(default_factory=dict)  # of training, by RL step
    events: list[tuple[str, str]] = field(default_factory=list)
    keep_responses: bool = False
    current_step: int = 0
    cpu_s: float = 0.0  # of this process, within RL steps
    _since_s: float = 0.0

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)
        now_s = time.process_time()
        self.cpu_s, self._since_s = self.cpu_s + now_s - self._since_s, now_s

    def evaluation(
        self, step: int, metrics: Mapping[str, float], seconds: float = 0.0, *, printed: bool = True
    ) -> None:
        self.evaluations[step] = dict(metrics)
        self._since_s = time.process_time()

    def samples(self, step: int, samples: Sequence[Sample], *, held_out: bool = False) -> None:
        if self.keep_responses and not held_out:
            self.responses[step] = list(samples)

    def judged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def event(self, kind: str, message: str, **details: Any) -> None:
        self.events.append((kind, message))

    def span(self, span: Span) -> None:
        pass

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        pass

    def sync(self) -> None:
        pass


def record_run(config: Config, record: RunRecord, *, speculation: SpeculationOptions = NO_SPECULATION) -> None:
    """Do warm start (cached), RL steps and evaluations; the results are in `record`."""
    initial = initial_weights(config)
    with threads_of(config), open_job(config, cast(Any, record), initial, speculation=speculation) as job:
        for _ in run_steps(job):
            evaluate_job(job)
