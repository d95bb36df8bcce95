"""Objectives on tensors written into a test: one response unless it says otherwise, the sampler exact."""

import torch
from torch import Tensor

from config.objective import ObjectiveOptions
from policies.objectives import LossInputs, TokenLosses, token_losses


def inputs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    lengths: list[int] | None = None,
    sampler_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        sampler_logprobs=old_logprobs if sampler_logprobs is None else sampler_logprobs,
        advantages=advantages,
        segments=torch.tensor([0, *(lengths or [logprobs.numel()])]).cumsum(0),
        reference_logprobs=reference_logprobs,
        entropy=entropy,
    )


def grpo_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    options: ObjectiveOptions,
    reference_logprobs: Tensor | None = None,
) -> TokenLosses:
    return token_losses(inputs(logprobs, old_logprobs, advantages, reference_logprobs=reference_logprobs), options)
