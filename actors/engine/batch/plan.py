"""What passes between whoever schedules and whoever keeps count of the running batch. Owns shapes; decides nothing."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.rollout import Request, Sampled

Int64Array = NDArray[np.int64]
PromptKey = tuple[int, bytes]


@dataclass(slots=True, kw_only=True)
class PromptEntry:
    """One prompt. `ready` once the writer has computed every token that others reuse; or what a turn of an episode left
    for the next one."""

    blocks: list[int]  # of tokens 0 .. reusable - 1
    reusable_tokens: int  # prompt length - 1
    writer: int  # request id
    ready: bool = False
    waiting_slots: list[int] = field(default_factory=list)  # admitted requests that start when it is ready
    rows: object = None  # what the watcher keeps of its tokens
    handed_on: bool = False  # left by a turn: the next one goes on in the blocks themselves


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A request from submit to finish."""

    request: Request
    prefix: Sampled | None  # response tokens known when it is next admitted
    reported_tokens: int  # of them, how many the driver knows
    limit: int  # sequence length at which it ends
    submitted_tokens: int  # tokens known when it was submitted
    spared_steps: int = 0  # tokens that came in one engine step with another, before its last preemption
    slot: int = -1  # -1: waiting
    admission: int = -1  # the larger, the younger
    weights_version: int = -1
    reused_tokens: int = 0  # of the prompt, when it was admitted last
    started_s: float = 0.0

    @property
    def key(self) -> PromptKey:
        return self.request.prompt_id, self.request.prompt_tokens.tobytes()

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt_tokens) + (0 if self.prefix is None else len(self.prefix.tokens))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: request i computes the next rows[i] >= 1 of its known tokens. R requests."""

    slots: Int64Array  # [R]
    rows: Int64Array  # [R]
    samples: NDArray[np.bool_]  # [R], the rows reach the last known token, so the next one is drawn
    copies: list[tuple[int, int]] = field(default_factory=list)  # KV blocks (from, to) to copy before the step
    prefill_tokens: int = 0

    @property
    def decoding(self) -> Int64Array:
        """The slots of requests that are past their prompt."""
        return self.slots[(self.rows == 1) & self.samples] if self.prefill_tokens else self.slots


class SlotWatcher(Protocol):
    """Told of every request that takes or leaves a slot, while the slot holds its tokens."""

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """The request computes its prompt itself (None: alone), or starts behind prompt.reusable_tokens of it."""

    def end(self, slot: int, finished: bool) -> None: ...
