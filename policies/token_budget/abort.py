"""Thresholds for ending responses by their answer, and for calling them late without one (DUET, section 3.2).

actors.engine.stopping decides which responses they apply to, and how these end.
"""

from dataclasses import dataclass

from config.token_budget import AbortOptions
from policies.token_budget.window import LengthWindow


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds, in tokens of a response."""

    poll_from: int
    give_up_at: int | None  # None: the limit of all responses is lower


def thresholds(options: AbortOptions, window: LengthWindow, ended: int, max_new_tokens: int) -> Thresholds | None:
    """Return the thresholds of the next responses, from the natural lengths in `window`. None before `warmup_responses`
    responses have `ended`.

    Each is at least one token. A threshold at or above the limit is dropped, since responses end there anyway.
    """
    poll_from, late = window.quantile(options.poll_quantile), window.quantile(options.abort_quantile)
    if ended < options.warmup_responses or poll_from is None or late is None:
        return None
    give_up_at = late + options.grace_tokens
    return Thresholds(max(poll_from, 1), give_up_at if give_up_at < max_new_tokens else None)
