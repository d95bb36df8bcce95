"""Inputs and results of the learner. Plain data; no Ray."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One rollout as the learner's input. The driver fixes the order in a batch (prompt, sample), independent of
    arrival."""

    prompt_tokens: NDArray[np.int32]  # [L]
    response_tokens: NDArray[np.int32]  # [R]
    sampler_logprobs: NDArray[np.float32]  # [T], of the sampling distribution
    # [T], of softmax(logits), compared with the learner's pass. None: `sampler_logprobs` is compared, and must be of
    # softmax(logits / temperature)
    sampler_logprobs_t1: NDArray[np.float32] | None
    advantage: float | NDArray[np.float64]  # one value for every token of the response, or [T]
    sampler: str = ""  # the rollout worker that drew it: log-prob gaps are reported per worker
    weight: float = 1.0  # factor of the sequence's loss; not 1 if responses per prompt were unequal, or given up
    # [R], True for the T response tokens that the model drew. The others (observations) were inserted between its
    # turns: they are context, excluded from loss and statistics. None: the model drew all, T is R
    drawn: NDArray[np.bool_] | None = None

    @property
    def drawn_tokens(self) -> int:
        """Return T."""
        return len(self.response_tokens) if self.drawn is None else int(np.count_nonzero(self.drawn))


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One supervised example: cross-entropy on the response, none on the prompt or on observations."""

    prompt_tokens: NDArray[np.int32]
    response_tokens: NDArray[np.int32]
    drawn: NDArray[np.bool_] | None = None  # as in TrainSequence

    @property
    def drawn_tokens(self) -> int:
        return len(self.response_tokens) if self.drawn is None else int(np.count_nonzero(self.drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one learner step. Means are over response tokens of the whole batch, across ranks."""

    losses: tuple[float, ...]  # one per optimizer step
    grad_norms: tuple[float, ...]  # before clipping, one per optimizer step
    metrics: dict[str, float]  # "logprob_gap/mean", "logprob_gap/max", "clip_fraction", "entropy", "kl", "lr", ...
    tokens: int  # all tokens of the forward pass
    seconds: dict[str, float]  # per phase, one after another: "logprobs", "train"
    started_s: float = 0.0  # time.time() on rank 0's machine
