"""The complete token loss: the surrogate, weighted for the sampler, plus KL, minus entropy. Owns their order."""

import torch

from config.objective import ObjectiveOptions
from policies.kl import kl_penalty, kl_values
from policies.objectives.correction import PREFIX, gap_metrics, sampler_weights
from policies.objectives.losses import loss_of
from policies.objectives.ratios import log_ratio, ratio_metrics
from policies.objectives.types import LossInputs, TokenLosses


def token_losses(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """Return w * surrogate + kl_coef * KL - entropy_coef * entropy, per token, and the metrics of all parts.

    Importance weights multiply the surrogate only: KL and entropy are those of the learner's policy.
    """
    surrogate = loss_of(options)(inputs, options)
    loss, metrics = surrogate.loss, {**surrogate.metrics, **gap_metrics(inputs.old_logprobs, inputs.sampler_logprobs)}
    if options.sampler_correction.active:
        weights, about = sampler_weights(
            inputs.old_logprobs, inputs.sampler_logprobs, inputs.segments, options.sampler_correction
        )
        loss = loss * weights
        metrics |= about
    with torch.no_grad():
        # Tokens are drawn from pi_old, so the unbiased k3 of KL(pi_old || pi) is r - 1 - log r.
        moved = log_ratio(inputs.logprobs, inputs.old_logprobs)
        metrics["kl_old"] = torch.expm1(moved) - moved
        metrics |= ratio_metrics(moved, inputs.segments)
    if options.needs_reference_in_loss:
        if inputs.reference_logprobs is None or options.kl == "none":
            raise ValueError(f"objective.kl is {options.kl}: reference log-probs are needed")
        metrics["kl"] = kl_values(inputs.logprobs.detach(), inputs.reference_logprobs, options.kl)
        loss = loss + options.kl_coef * kl_penalty(inputs.logprobs, inputs.reference_logprobs, options.kl)
    if options.entropy_coef > 0:
        if inputs.entropy is None:
            raise ValueError(f"objective.entropy_coef is {options.entropy_coef:g}: entropies are needed")
        loss = loss - options.entropy_coef * inputs.entropy
    return TokenLosses(loss, metrics)


def derived_metrics(means: dict[str, float]) -> dict[str, float]:
    """Return a step's metrics from the means over its tokens. Metrics that are no means are derived here."""
    metrics = dict(means)
    squared = metrics.pop(f"{PREFIX}/weight_squared", None)
    if squared is not None:  # (sum w)^2 / (n sum w^2): share of equally weighted tokens with the same effect
        mean = metrics[f"{PREFIX}/weight"]
        metrics[f"{PREFIX}/effective_share"] = mean * mean / squared if squared > 0 else 0.0
    return metrics
