"""The time of an engine step by part: timers around calls inside an engine in this process.

Owns the timers, which are instance attributes in front of methods, not their interpretation. Each adds about 0.5 us to
its call, so reported speeds come from runs without them.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np


class Parts:
    """Own time of named parts: time of parts nested inside one counts for those."""

    def __init__(self, step: tuple[Any, str], kind: Callable[[], str]) -> None:
        """step: the call that is one step; its time outside all parts is "the rest". kind: of the step that ended."""
        self._restore: list[tuple[Any, str, Any]] = []  # None: the method belongs to its class
        self._inside_s: list[float] = []  # time of nested parts in each open part
        self._own_s: dict[str, float] = {}  # of the present step
        self._steps: dict[str, list[dict[str, float]]] = {}  # by kind
        self._kind = kind
        self.around("the rest", *step, ends_step=True)

    def around(self, part: str, owner: Any, name: str, *, ends_step: bool = False) -> None:
        """Count the calls of `owner.name` as `part`."""
        method: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = perf_counter()
            self._inside_s.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                took_s = perf_counter() - start_s
                own_s = took_s - self._inside_s.pop()
                self._own_s[part] = self._own_s.get(part, 0.0) + own_s
                if self._inside_s:
                    self._inside_s[-1] += took_s
                if ends_step:
                    self._steps.setdefault(self._kind(), []).append(self._own_s)
                    self._own_s = {}

        self._restore.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, call)

    def per_step_us(self) -> dict[str, dict[str, float]]:
        """Return by kind of step the medians by part, and "step", their sum. Removes the timers."""
        for owner, name, before in reversed(self._restore):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._restore.clear()
        return {kind: _medians_us(steps) for kind, steps in self._steps.items()}

    def _vllm(self, core: Any) -> None:
        """Time vLLM's own parts, which both kinds of engine have."""
        executor = core.model_executor
        runner = executor.driver_worker.worker.model_runner
        self.around("vLLM: schedule", core.scheduler, "schedule")
        self.around("vLLM: update_from_output", core.scheduler, "update_from_output")
        self.around("vLLM: prepare and dispatch", executor, "execute_model")
        self.around("vLLM: forward", runner, "_model_forward")
        self.around("vLLM: logits", runner.model, "compute_logits")
        self.around("vLLM: sample", runner, "_sample")
        self.around("vLLM: bookkeeping", executor, "sample_tokens")

    @classmethod
    def of_stock(cls, core: Any) -> "Parts":
        parts = cls((core, "step_fn"), lambda: "plain")
        parts._vllm(core)
        parts.around("vLLM: post_step", core, "post_step")
        return parts

    @classmethod
    def of_paceline(cls, engine: Any, core: Any) -> "Parts":
        """Time a VllmEngine around that core."""
        speculator = engine._speculator
        parts = cls((engine, "step"), lambda: "paceline, drafting" if speculator.draft_s else "paceline")
        parts._vllm(core)
        parts.around("Paceline: before scheduling", engine, "before_schedule")
        parts.around("Paceline: choose", speculator, "choose")
        parts.around("Paceline: draft", speculator, "draft")
        parts.around("Paceline: read and settle", engine, "sampled")
        parts.around("Paceline: account and report", engine, "_settle")
        return parts


def _medians_us(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: 1e6 * float(np.median([step.get(name, 0.0) for step in steps])) for name in names}
    return {name: round(us, 1) for name, us in found.items()} | {"step": round(sum(found.values()), 1)}
