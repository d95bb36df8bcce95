"""Importance weights for the gap between the sampling engine and the learner.

The same weights give other log-probs in another program (kernels, dtype, quantisation), so tokens are drawn from pi_s,
not from pi_old, whose gradient is taken. The weight w = pi_old / pi_s corrects for it. It is bounded, because one token
with too low a probability in the engine would outweigh all others.

Sources: truncated importance sampling (TIS), Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training"; masked (MIS), of sequences and by their geometric mean, Liu et al. 2025, "When speed kills
stability"; masked by token on both sides, Ling Team 2025 (IcePop); the geometric mean, bounded on both sides, QaRL
(TBPO), eq. 5. A masked token or response stays in the denominators of the aggregation, as in TRL and NeMo-RL, so
masking does not raise the weight of the others.
"""

from typing import assert_never

import torch
from torch import Tensor

from config.objective import Level, SamplerCorrectionOptions
from policies.kl import MAX_LOG_RATIO, difference, kl_values
from policies.objectives.ratios import segment_means, segment_sums, spread
from policies.objectives.types import LARGEST

PREFIX = "sampler_correction"
GAP = "logprob_gap"  # metrics of the difference itself


@torch.no_grad()
def gap_metrics(old_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, Tensor]:
    """Return the distance between sampler and learner, [R] each, whether or not it is corrected."""
    ratio = difference(old_logprobs, sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        # Tokens are drawn by the sampler: estimators of KL(pi_s || pi_old), whose log ratio is log pi_s - log pi_old.
        f"{GAP}/k1": difference(sampler_logprobs, old_logprobs),
        f"{GAP}/k3": kl_values(sampler_logprobs, old_logprobs, "k3"),
        f"{GAP}/ratio": ratio,
        f"{GAP}/ratio{LARGEST}": ratio,
    }


@torch.no_grad()
def sampler_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, segments: Tensor, options: SamplerCorrectionOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (weights [R], 0 where masked, metrics [R] each), detached."""
    weights = _ratios(old_logprobs, sampler_logprobs, segments, options.weights)
    metrics = {}
    if options.truncate is not None:
        metrics[f"{PREFIX}/truncated"] = weights > options.truncate
    if options.floor is not None:
        metrics[f"{PREFIX}/raised"] = weights < options.floor
    if options.truncate is not None or options.floor is not None:
        weights = weights.clamp(options.floor, options.truncate)
    if options.mask != "none":
        compared = _ratios(old_logprobs, sampler_logprobs, segments, options.mask)
        masked = torch.zeros_like(compared, dtype=torch.bool)
        if options.low is not None:
            masked |= compared < options.low
        if options.high is not None:
            masked |= compared > options.high
        metrics[f"{PREFIX}/masked"] = masked
        weights = weights.masked_fill(masked, 0.0)
    return weights, metrics | {f"{PREFIX}/weight": weights, f"{PREFIX}/weight_squared": weights * weights}


def _ratios(old_logprobs: Tensor, sampler_logprobs: Tensor, segments: Tensor, level: Level) -> Tensor:
    """Return pi_old / pi_s of every token [R], within e^+-MAX_LOG_RATIO; 1 for none."""
    logs = difference(old_logprobs, sampler_logprobs)
    match level:
        case "none":
            return torch.ones_like(logs)
        case "token":
            pass
        case "sequence":
            logs = spread(segment_sums(logs, segments), segments, len(logs))
        case "geometric":
            logs = spread(segment_means(logs, segments), segments, len(logs))
        case _:
            assert_never(level)
    return logs.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
