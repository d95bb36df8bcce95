"""The load and the outcome of an engine step: reported by engines, learned from by policies and cost models."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from config.strategy import Strategy

Int64Array = NDArray[np.int64]
NO_REQUESTS: Int64Array = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of an engine step, and those that wait."""

    running: int  # requests that decode, at least 1
    waiting: int  # requests without a slot in the running batch
    context_tokens: int  # known tokens of the decoding requests: what attention reads
    # [running] or empty, read-only; the same array while the batch is the same
    prompt_ids: Int64Array = field(default_factory=lambda: NO_REQUESTS, compare=False)


class StepKind(Enum):
    """The kind of an engine step, which decides what its time and tokens may be used for."""

    USUAL = "usual"  # only decoding and drafting
    CAUGHT_UP = "caught_up"  # the drafter first processed text that it had skipped: the cost of a switch
    DISTURBED = "disturbed"  # prompt chunks, copied blocks, a captured graph, new weights: not a strategy's time
    EVALUATION = "evaluation"  # other prompts at another temperature: not valid for RL steps


@dataclass(slots=True, kw_only=True)  # not frozen, which would cost 1 % of a small model's step
class StepOutcome:
    """The outcome of an engine step; treat it as immutable. Arrays [S] are per request that drew tokens, None if
    nothing was drafted."""

    kind: StepKind
    strategy: Strategy  # strategy of its drafts, if any
    load: Load
    prompt_tokens: int  # rows of prompt chunks
    drafted: int  # rows of drafts, over all requests
    accepted: int  # tokens beyond the one that each request gets, over all requests
    elapsed_s: float  # of the whole step
    draft_s: float  # of it, drafting
    prompt_ids: Int64Array | None = None
    reached: Int64Array | None = None  # depth of each request's draft; 0: its drafter offered none
    stood: Int64Array | None = None  # accepted depth of the draft, at most `reached`
    # [S] if a budget divided the drafts, even without drafts: each request's allowance.
    room: Int64Array | None = None
    alike: int = 1  # steps that this one stands for, itself among them

    @property
    def rows(self) -> int:
        """The rows that the target computed."""
        return self.load.running + self.drafted + self.prompt_tokens

    @property
    def is_usual(self) -> bool:
        return self.kind is StepKind.USUAL

    @property
    def caught_up(self) -> bool:
        return self.kind is StepKind.CAUGHT_UP
