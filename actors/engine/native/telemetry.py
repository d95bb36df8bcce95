"""Counts of engine steps, cut into windows. Owns the running window; reads no clock."""

from dataclasses import dataclass

from actors.engine.native.scheduler import Scheduler
from actors.engine.types import EngineWindow
from policies.speculation.strategy import Strategy

WINDOW_S = 0.2


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step."""

    at_s: float  # its start
    running: int  # requests that decoded
    strategy: Strategy
    drafted: int
    accepted: int
    emitted: int  # new tokens, also of requests whose prompt ended in this step
    elapsed_s: float  # of the whole step
    draft_s: float  # of it, drafting
    prefill_tokens: int


@dataclass(slots=True)
class WindowMeter:
    """Adds up steps; `cut` turns them into an EngineWindow. A window starts with its first step."""

    start_s: float = 0.0
    engine_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted_before: int = 0

    def count(self, now_s: float, prefill_tokens: int, decode_tokens: int) -> None:
        if self.engine_steps == 0:
            self.start_s = now_s
        self.engine_steps += 1
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens

    def due(self, now_s: float) -> bool:
        return self.engine_steps > 0 and now_s - self.start_s >= WINDOW_S

    def cut(self, now_s: float, scheduler: Scheduler) -> EngineWindow:
        window = EngineWindow(
            start_s=self.start_s,
            end_s=now_s,
            engine_steps=self.engine_steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_tokens_used=scheduler.kv_tokens_used,
            preempted=scheduler.preempted - self.preempted_before,
        )
        self.engine_steps = self.prefill_tokens = self.decode_tokens = 0
        self.preempted_before = scheduler.preempted
        return window
