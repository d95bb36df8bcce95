"""The known state of the run: updated by the Observer, drawn by the live view. No I/O, no clock, no locks."""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from launch.observe.records import StepRecord

STEADY = ("warm start",)


@dataclass(slots=True)
class WorkerState:
    state: str  # "decode", "idle", "restart", ...
    since_s: float
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class RunState:
    """Mutable state, guarded by the Observer's lock."""

    name: str
    steps: int
    started_s: float
    precision: str = ""  # of low-bit rollouts; empty: rollouts are in model.dtype
    step: int = 0  # last complete RL step
    phase: str = "starting"
    phase_since_s: float = 0.0
    stopping: str = ""  # the signal that requested it
    done: int = 0  # of the phase's units, e.g. finished rollouts
    total: int = 0
    rewards: deque[float] = field(default_factory=partial(deque, maxlen=40))
    eval_reward: float | None = None
    first_eval_reward: float | None = None
    evaluations: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)  # signs that nothing is learned (launch.observe.symptoms)
    _step_s: deque[float] = field(default_factory=partial(deque, maxlen=10))

    def take(self, record: StepRecord, metrics: dict[str, float]) -> None:
        self.step = max(self.step, record.step)
        self.metrics = dict(
            metrics
        )  # a step that trained no group has no entropy, and that of an older step would mislead
        self.seconds = dict(record.seconds)
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "step" in record.seconds:
            self._step_s.append(record.seconds["step"])
        self.take_eval(metrics)

    def take_eval(self, metrics: dict[str, float]) -> None:
        if "eval/reward" in metrics:
            self.eval_reward = metrics["eval/reward"]
            if self.first_eval_reward is None:
                self.first_eval_reward = self.eval_reward
            self.evaluations += 1

    def enter(self, phase: str, done: int, total: int, now_s: float) -> None:
        if phase != self.phase or done < self.done:
            self.phase_since_s = now_s
        self.phase, self.done, self.total = phase, done, total

    def phase_left_s(self, now_s: float) -> float | None:
        """Return the seconds left of a phase with units of equal time. A rollout has none: its longest response
        decides."""
        if self.phase not in STEADY or not 0 < self.done < self.total:
            return None
        return (now_s - self.phase_since_s) / self.done * (self.total - self.done)

    @property
    def eta_s(self) -> float | None:
        """Return the median of the last ten steps times the remaining steps; None before the first step."""
        return median(self._step_s) * (self.steps - self.step) if self._step_s else None
