"""When responses end by their answer, and when without one they are late (DUET, section 3.2). Owns the thresholds;
which responses it concerns, and how they end, is actors.engine.stopping's.
"""

from dataclasses import dataclass

from config.token_budget import AbortOptions
from policies.token_budget.window import LengthWindow


@dataclass(frozen=True, slots=True)
class Thresholds:
    """In tokens of a response."""

    poll_from: int
    give_up_at: int | None  # None: the limit of all responses comes first


def thresholds(options: AbortOptions, window: LengthWindow, ended: int, max_new_tokens: int) -> Thresholds | None:
    """Of the next responses, from the natural lengths in `window`; None before `warmup_responses` have `ended`.

    At least one token each, and a response that would be given up at its limit ends there anyway.
    """
    poll_from, late = window.quantile(options.poll_quantile), window.quantile(options.abort_quantile)
    if ended < options.warmup_responses or poll_from is None or late is None:
        return None
    give_up_at = late + options.grace_tokens
    return Thresholds(max(poll_from, 1), give_up_at if give_up_at < max_new_tokens else None)
