"""Loads and outcomes of engine steps, where only the number of requests and their sums matter."""

import numpy as np

from config.strategy import Strategy
from policies.steps import Load, StepKind, StepOutcome


def load(running: int) -> Load:
    return Load(running, 0, 100 * running)


def outcome(
    strategy: Strategy,
    running: int,
    drafted: int,
    accepted: int,
    elapsed_s: float,
    *,
    kind: StepKind = StepKind.USUAL,
    draft_s: float = 0.0,
    prompt_tokens: int = 0,
) -> StepOutcome:
    """Accepted tokens are spread over the requests as evenly as they can be; drafts are of full depth, or none."""
    stood = np.full(running, accepted // running, np.int64)
    stood[: accepted % running] += 1
    return StepOutcome(
        kind=kind,
        strategy=strategy,
        load=load(running),
        prompt_tokens=prompt_tokens,
        drafted=drafted,
        accepted=accepted,
        elapsed_s=elapsed_s,
        draft_s=draft_s,
        prompt_ids=np.zeros(running, np.int64) if drafted else None,
        reached=np.full(running, strategy.depth) if drafted else None,
        stood=np.minimum(stood, strategy.depth) if drafted else None,
    )
