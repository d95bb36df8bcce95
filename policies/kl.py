"""Per-token estimators of KL(target || reference) from log-probs of sampled tokens. Owns the three formulas.

Source: J. Schulman, "Approximating KL Divergence" (2020). With d = log pi(x) - log pi_ref(x) and x ~ pi:
k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, >= 0), k3 = exp(-d) - 1 + d (unbiased, >= 0).

As a *loss term* they differ from what their values suggest, because x is not differentiated through. The expected
gradient of k1 is zero, that of k2 is exactly the gradient of KL(pi || pi_ref), that of k3 is the gradient of
KL(pi_ref || pi). So `kl_penalty` gives k1 the gradient of k2: its value is unbiased and its gradient is right.
"""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: larger differences are cut so that one absurd token cannot make the loss inf


def kl_values(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """The estimator itself, per token, with the gradient of its formula. Any shape; both in the same shape, float."""
    d = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    return torch.expm1(-d) + d


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """What the loss adds, per token: `kl_values`, except that k1 carries the gradient of k2 (see above)."""
    values = kl_values(logprobs, reference_logprobs, estimator)
    if estimator != "k1":
        return values
    k2 = kl_values(logprobs, reference_logprobs, "k2")
    return values.detach() + (k2 - k2.detach())
