"""Per-token estimators of KL(target || reference) from log-probs of sampled tokens. Owns the three formulas.

Source: J. Schulman, "Approximating KL Divergence" (2020). With d = log pi(x) - log pi_ref(x) and x ~ pi:
k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, >= 0), k3 = exp(-d) - 1 + d (unbiased, >= 0).

As a *loss term* they differ from their values, because x is not differentiated through. The expected gradient of k1 is
zero. For k2 it is exactly the gradient of KL(pi || pi_ref), for k3 the gradient of KL(pi_ref || pi). So `kl_penalty`
gives k1 the gradient of k2: the value is unbiased and the gradient is right.

k3 grows like exp(-d): one token at d = -25 would weigh 7e10, and clipping by the norm would suppress the rest. It is
bounded as in verl, SkyRL, NeMo-RL and OpenRLHF: d to +-MAX_LOG_RATIO, the value to MAX_K3. Beyond the bound (d < -2.61
or d > 11) it has no gradient. k1 and k2 are not bounded: their gradient, d, is largest for the tokens that drifted
farthest.
"""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: larger differences are cut before exp so that nothing becomes inf
MAX_K3 = 10.0
LEAST_LOGPROB = -1e4  # instead of -inf, so that no difference is infinite and 0 * log 0 is 0. NaN stays NaN


def finite(logprobs: Tensor) -> Tensor:
    """Clamp to LEAST_LOGPROB from below; clamped values have no gradient."""
    return logprobs.clamp(min=LEAST_LOGPROB)


def difference(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return log pi - log pi', never infinite: 0 if both are impossible."""
    return finite(logprobs) - finite(others)


def kl_values(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return the estimator per token, with the gradient of its formula. Any shape; both in the same shape, float."""
    d = difference(logprobs, reference_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d * d
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (torch.expm1(-d) + d).clamp(max=MAX_K3)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return the loss term per token: `kl_values`, except that k1 has the gradient of k2 (see above)."""
    values = kl_values(logprobs, reference_logprobs, estimator)
    if estimator != "k1":
        return values
    k2 = kl_values(logprobs, reference_logprobs, "k2")
    return values.detach() + (k2 - k2.detach())
