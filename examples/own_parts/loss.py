"""An own loss, to copy from: tapered REINFORCE (TOPR, Le Roux et al. 2025, arXiv 2503.14286).

Good responses have full weight. Bad ones have at most their probability ratio, so that a response that has become
unlikely is not pushed down further.
"""

from paceline.extend import LossInputs, TokenLosses, log_ratio, segment_sums, spread


def tapered(inputs: LossInputs, *, most: float = 1.0) -> TokenLosses:
    """Return -A log pi if A >= 0; if A < 0, that times the response's ratio, at most `most`, without gradient.

    Every tensor has one entry per response token [R]; inputs.segments says where a response begins and ends. KL,
    entropy, sampler correction and the mean over tokens come afterwards, from the keys of `objective:`.
    """
    moved = log_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
    ratio = spread(segment_sums(moved, inputs.segments), inputs.segments, len(moved)).exp()
    weight = ratio.clamp(max=most).where(inputs.advantages < 0, 1.0)
    return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {"weight": weight})
