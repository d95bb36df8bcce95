"""Inputs and outputs of an objective: plain tensors of one micro-batch on one device."""

from dataclasses import dataclass

from torch import Tensor

LARGEST = "_max"  # a metric with this suffix is the maximum over its tokens (none is negative), not their mean
SMALLEST = "_min"  # likewise the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a token loss. [R]: one entry per response token, sequence after sequence. All log-probs are of
    softmax(logits / temperature). `logprobs` carries gradient, and `entropy` if the objective rewards it."""

    logprobs: Tensor  # [R], under the current weights
    old_logprobs: Tensor  # [R], the learner's under the weights at the start of the RL step
    sampler_logprobs: Tensor  # [R], the engine's, of the distribution it drew from
    advantages: Tensor  # [R]; equal within a sequence unless tokens have rewards
    segments: Tensor  # int64 [S + 1], from 0 to R: the tokens of sequence s are segments[s]:segments[s + 1]
    reference_logprobs: Tensor | None = None  # [R], if the loss has a KL term
    entropy: Tensor | None = None  # [R], of softmax(logits / temperature), if the objective rewards it


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses of the tokens, and their metrics."""

    loss: Tensor  # [R], differentiable: to be multiplied by the sequence coefficients and summed
    metrics: dict[str, Tensor]  # [R] each, detached: a step's metric is the mean over its tokens (LARGEST,
    # SMALLEST: their largest, smallest). Names depend on the options only, never on the data: ranks add up in order
