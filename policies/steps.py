"""What an engine step decodes and what it did: what engines report, and what policies and cost models learn from."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy

Int64Array = NDArray[np.int64]
NO_REQUESTS: Int64Array = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine step decodes, and what waits behind it."""

    running: int  # requests that decode, at least 1
    waiting: int  # requests without a place in the running batch
    context_tokens: int  # known tokens of those that decode: what attention reads
    # [running] or empty, read-only; the same array while the batch is the same
    prompt_ids: Int64Array = field(default_factory=lambda: NO_REQUESTS, compare=False)


class StepKind(Enum):
    """What the time and the tokens of an engine step say."""

    USUAL = "usual"  # nothing but decoding and drafting
    CAUGHT_UP = "caught_up"  # the drafter first worked through text that it had not followed: the price of switching
    DISTURBED = "disturbed"  # prompt chunks, copied blocks, a captured graph, new weights: no time of a strategy
    EVALUATION = "evaluation"  # other prompts at another temperature: says nothing about RL steps


@dataclass(slots=True, kw_only=True)  # not frozen: that would cost a small model's step one percent
class StepOutcome:
    """What an engine step did; nobody changes it. Per request of those S that drew tokens: arrays [S], None where
    nothing was drafted."""

    kind: StepKind
    strategy: Strategy  # by which it drafted, if anything
    load: Load
    prompt_tokens: int  # rows of prompt chunks
    drafted: int  # rows of drafts, over all requests
    accepted: int  # tokens beyond the one that each request gets, over all requests
    elapsed_s: float  # of the whole step
    draft_s: float  # of it, drafting
    prompt_ids: Int64Array | None = None
    reached: Int64Array | None = None  # depth of each request's draft; 0: its drafter had nothing to say
    stood: Int64Array | None = None  # depth to which the draft was accepted, at most `reached`
    # [S] where a budget divided the drafts, also where nothing was drafted: what each request was allowed.
    room: Int64Array | None = None

    @property
    def rows(self) -> int:
        """That the target computed."""
        return self.load.running + self.drafted + self.prompt_tokens

    @property
    def is_usual(self) -> bool:
        return self.kind is StepKind.USUAL

    @property
    def caught_up(self) -> bool:
        return self.kind is StepKind.CAUGHT_UP
