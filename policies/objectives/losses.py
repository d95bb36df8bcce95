"""The surrogate losses, one function each, and the table for `objective.loss`. It can also name a user's own function
(policies.objectives.own).

r is the probability ratio of a token, exp(logprobs - old_logprobs); A its advantage. At r = 1 all of them have the
gradient of -A log pi, the policy gradient. `compose` has the common parts (KL, entropy, importance weights).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from config.objective import ObjectiveOptions
from policies.kl import difference, finite
from policies.objectives.own import own_loss
from policies.objectives.ratios import log_ratio, segment_means, spread
from policies.objectives.types import LossInputs, TokenLosses

Function = Callable[[LossInputs, ObjectiveOptions], TokenLosses]


def clip(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """PPO, GRPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    If A < 0 it is at most -clip_dual A. Without this bound it grows with r, and one token that became likely may
    outweigh all others. Source: Schulman et al. 2017 (PPO), eq. 7; Shao et al. 2024 (GRPO), eq. 3; asymmetric clip: Yu
    et al. 2025 (DAPO), eq. 10; dual clip: Ye et al. 2020, eq. 4, 3 as in verl.
    """
    return _clipped(log_ratio(inputs.logprobs, inputs.old_logprobs).exp(), inputs.advantages, options)


def sequence_clip(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """GSPO: `clip` with the ratio of the whole response, s = exp(mean_t log r_t), instead of each token's.

    Implemented as GSPO-token: s_t = sg(s) pi_t / sg(pi_t). Its value is s, and its gradient reaches each token with its
    own advantage. With equal advantages it is GSPO. Source: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 to 7, 13,
    14. Meant for `seq_mean_token_mean`, which makes a sequence's loss min(s A, clip(s) A).
    """
    return _clipped(_sequence_ratio(inputs), inputs.advantages, options)


def sequence_band(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """TBPO: if A > 0, -min(s A, (1 + clip_high) A) with the ratio s of the response. If A < 0, -s A while s is within 1
    - band_low to 1 + band_high, else nothing: the response is left out, but stays in the denominators.

    So a response whose probability was already lowered in this RL step is not pushed further. One whose probability was
    raised, as happens to bursts of unlikely tokens by updates for others, does not outweigh the rest. Source: QaRL,
    section 3.2, appendices B and E; its mismatch weight is `sampler_correction.weights: geometric`. Implemented as
    GSPO-token, like `sequence_clip`: each token has its own advantage, whose sign decides.
    """
    ratio, advantages = _sequence_ratio(inputs), inputs.advantages
    if options.clip_high is None or options.band_low is None or options.band_high is None:
        raise ValueError("objective.clip_high, band_low and band_high are needed by loss sequence_band")
    high, fixed, negative = 1.0 + options.clip_high, ratio.detach(), advantages < 0
    below, above = (fixed < 1.0 - options.band_low) & negative, (fixed > 1.0 + options.band_high) & negative
    left_out, cut = below | above, (fixed > high) & (advantages > 0)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(max=high) * advantages)
    return TokenLosses(
        loss.masked_fill(left_out, 0.0),
        {
            "clip_fraction": left_out | cut,  # tokens without gradient, of all three kinds
            "clip_fraction/high": cut,
            "clip_fraction/band_low": below,
            "clip_fraction/band_high": above,
        },
    )


def cispo(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi. No token loses its gradient; its weight is bounded.

    Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5; as there, no lower bound unless clip_low is set.
    """
    ratio = log_ratio(inputs.logprobs.detach(), inputs.old_logprobs).exp()
    low, high = _bounds(options)
    loss = -ratio.clamp(low, high) * inputs.advantages * finite(inputs.logprobs)
    cut_low, cut_high = ratio < low, ratio > high
    return TokenLosses(
        loss,
        {
            "clip_fraction": cut_low | cut_high,
            "clip_fraction/low": cut_low,
            "clip_fraction/high": cut_high,
        },
    )


def policy_gradient(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
    """REINFORCE: -A log pi. With several mini-batches the later ones are off-policy, without correction.

    Source: Williams 1992; with a leave-one-out baseline RLOO (Ahmadian et al. 2024, arXiv 2402.14740, section 3.3).
    """
    return TokenLosses(-inputs.advantages * finite(inputs.logprobs), {})


LOSSES: Mapping[str, Function] = {
    "clip": clip,
    "sequence_clip": sequence_clip,
    "sequence_band": sequence_band,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}


def loss_of(options: ObjectiveOptions) -> Function:
    """Return the function that `objective.loss` names: one of LOSSES, or the user's own. Raises OwnCodeError."""
    return own_loss(options.loss) if options.own_loss else LOSSES[options.loss]


def _sequence_ratio(inputs: LossInputs) -> Tensor:
    """Return sg(s) pi_t / sg(pi_t) of every token [R]: the value of s = exp(mean_t log r_t), with log
    pi_t's gradient."""
    ratios = log_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
    sequence = spread(segment_means(ratios, inputs.segments), inputs.segments, len(ratios)).exp()
    own = difference(inputs.logprobs, inputs.logprobs.detach()).exp()  # 1, with the gradient of log pi
    return sequence * own


def _clipped(ratio: Tensor, advantages: Tensor, options: ObjectiveOptions) -> TokenLosses:
    low, high = _bounds(options)
    clipped = ratio.clamp(low, high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    fixed = ratio.detach()
    metrics = {
        "clip_fraction/low": (fixed < low) & (advantages < 0),  # tokens without gradient, of all three kinds
        "clip_fraction/high": (fixed > high) & (advantages > 0),
    }
    if options.clip_dual is not None:
        dual = (fixed > options.clip_dual) & (advantages < 0)
        loss = torch.where(dual, -options.clip_dual * advantages, loss)
        metrics["clip_fraction/dual"] = dual
    return TokenLosses(loss, {"clip_fraction": torch.stack(tuple(metrics.values())).any(0), **metrics})


def _bounds(options: ObjectiveOptions) -> tuple[float, float]:
    low = 0.0 if options.clip_low is None else 1.0 - options.clip_low
    return low, math.inf if options.clip_high is None else 1.0 + options.clip_high
