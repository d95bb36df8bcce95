"""Data between the scheduler and the slot table of the running batch. Types only."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.rollout import Request, Sampled

Int64Array = NDArray[np.int64]
PromptKey = tuple[int, bytes]


@dataclass(slots=True, kw_only=True)
class PromptEntry:
    """One prompt in the KV cache. `ready` once its writer has computed all reusable tokens. Also holds the tokens that
    a turn of an episode left for the next one."""

    blocks: list[int]  # of tokens 0 .. reusable - 1
    reusable_tokens: int  # prompt length - 1
    writer: int  # request id
    ready: bool = False
    waiting_slots: list[int] = field(default_factory=list)  # admitted requests that start once it is ready
    rows: object = None  # the watcher's data about its tokens
    handed_on: bool = False  # left by a turn: the next turn continues in the same blocks


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A request from submit to finish."""

    request: Request
    prefix: Sampled | None  # response tokens known when it is next admitted
    reported_tokens: int  # how many of them the driver has received
    limit: int  # sequence length at which the request ends
    submitted_tokens: int  # tokens known when it was submitted
    spared_steps: int = 0  # tokens that shared an engine step with an earlier one, before its last preemption
    slot: int = -1  # -1: waiting
    admission: int = -1  # larger is younger
    weights_version: int = -1
    reused_tokens: int = 0  # prompt tokens with cached K/V at its last admission
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
    samples: NDArray[np.bool_]  # [R], the rows reach the last known token, so the next token is drawn
    copies: list[tuple[int, int]] = field(default_factory=list)  # KV blocks (from, to) to copy before the step
    prefill_tokens: int = 0

    @property
    def decoding(self) -> Int64Array:
        """Slots of the requests that are past their prompt."""
        return self.slots[(self.rows == 1) & self.samples] if self.prefill_tokens else self.slots


class SlotWatcher(Protocol):
    """Notified of every request that takes or leaves a slot, while the slot holds its tokens."""

    def begin(self, slot: int, prompt: PromptEntry | None) -> None:
        """A request took a slot. It starts behind prompt.reusable_tokens of the prompt; None: it computes the prompt
        itself."""

    def end(self, slot: int, finished: bool) -> None: ...
