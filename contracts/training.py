"""What crosses the boundary of the learner. Plain data; no Ray."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One rollout as the learner sees it. Order in a batch is fixed by the driver (prompt, sample), not by arrival."""

    prompt_tokens: NDArray[np.int32]  # [L]
    response_tokens: NDArray[np.int32]  # [R]
    sampler_logprobs: NDArray[np.float32]  # [T], of the sampling distribution
    # [T], of softmax(logits): what the learner's pass is compared with; None: `sampler_logprobs` is, which then must be
    # those of softmax(logits / temperature)
    sampler_logprobs_t1: NDArray[np.float32] | None
    advantage: float | NDArray[np.float64]  # of every token of the response, or of each, [T]
    sampler: str = ""  # the rollout worker that drew it: a log-prob gap is reported per worker
    weight: float = 1.0  # multiplies the sequence's loss; 1 unless responses were shared out unequally, or given up
    # [R], T of them true: response tokens that the model drew. The others were put between its turns (observations):
    # they are context, and part of no loss and no statistic. None: it drew all, T is R
    drawn: NDArray[np.bool_] | None = None

    @property
    def drawn_tokens(self) -> int:
        """T."""
        return len(self.response_tokens) if self.drawn is None else int(np.count_nonzero(self.drawn))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One supervised example: cross-entropy on the response, none on the prompt, nor on what was observed."""

    prompt_tokens: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    drawn: NDArray[np.bool_] | None = None  # as in TrainSequence

    @property
    def drawn_tokens(self) -> int:
        return len(self.response_tokens) if self.drawn is None else int(np.count_nonzero(self.drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one learner step did. Means are over response tokens of the whole batch, across ranks."""

    losses: tuple[float, ...]  # one per optimizer step
    grad_norms: tuple[float, ...]  # before clipping, one per optimizer step
    metrics: dict[str, float]  # "logprob_gap/mean", "logprob_gap/max", "clip_fraction", "entropy", "kl", "lr", ...
    tokens: int  # all tokens that went through the forward pass
    seconds: dict[str, float]  # per phase, one after the other: "logprobs", "train"
    started_s: float = 0.0  # time.time() on rank 0's machine
