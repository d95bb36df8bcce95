"""Seconds of one pass by a roofline, in seconds: bytes against arithmetic, and what every request costs besides.

    memory  = fixed_s + context_s * context tokens          weights and launches; keys and values
    compute = rows * (row_s + pair_s * context / requests)  products; attention
    pass    = (memory^overlap + compute^overlap)^(1 / overlap) + request_s * requests

EfficientRollout's eq. 2 is the limit overlap -> infinity, where one hides the other altogether; at 1 they add up. Owns
the formula and its fit to measured passes; knows no device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, Field

from policies.calibration.solve import FloatArray, fit_positive

_SPREAD = 0.05  # relative deviation of a well measured pass from the formula
# Where a fit begins and what holds it while little was measured, with standard deviations of the logarithms.
_REQUESTS, _CONTEXT, _PAIR = (100.0, 1.5), (20_000.0, 2.0), (100_000.0, 2.0)
_OVERLAP = (1.5, 0.4)


@dataclass(frozen=True, slots=True)
class FreeRows:
    """From how many rows on a pass's arithmetic outweighs its weights, before anything was measured; `spread`: of its
    logarithm. Of an unknown device: processors have 4 to 16, GPUs 100 to 300."""

    rows: float = 16.0
    spread: float = 1.5


UNKNOWN_GPU = FreeRows(100.0, 1.0)  # by the peaks 120 to 420, which kernels do not reach


class Roofline(BaseModel, frozen=True, extra="forbid"):
    """Costs of a pass. All are at least 0, `fixed_s` above."""

    fixed_s: float = Field(gt=0)
    context_s: float = Field(ge=0)
    row_s: float = Field(ge=0)
    pair_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(ge=0)
    overlap: float = Field(default=1.0, ge=1)

    def seconds(self, requests: int, rows: int, context_tokens: int) -> float:
        """Of a pass of `rows` rows for `requests` >= 1 requests that know `context_tokens` together."""
        memory = self.fixed_s + self.context_s * context_tokens
        compute = rows * (self.row_s + self.pair_s * context_tokens / requests)
        high, low = (memory, compute) if memory > compute else (compute, memory)
        return float(high * (1 + (low / high) ** self.overlap) ** (1 / self.overlap) + self.request_s * requests)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """Typical seconds of passes of that shape, `sure` as many standard deviations of 5 %: 1 after a few."""

    requests: int
    rows: int
    context_tokens: int
    seconds: float
    sure: float = 1.0


def fit_roofline(
    passes: Sequence[MeasuredPass], start: Roofline | None = None, free: FreeRows | None = None
) -> Roofline:
    """The roofline of least relative error; what the passes do not tell stays near a prior. Needs one pass at least.
    `start`: an earlier fit, which holds what these passes do not tell, as shapes with a mean context each. `free`: what
    is known of the device where there is none; None: nothing."""
    free = free or FreeRows()
    requests, rows, context, seconds, sure = (
        np.array([getattr(one, name) for one in passes], float)
        for name in ("requests", "rows", "context_tokens", "seconds", "sure")
    )
    logs, weights = np.log(seconds), sure / _SPREAD
    least = float(seconds.min())
    prior = np.log([least, least / free.rows, least / _REQUESTS[0], least / _CONTEXT[0], least / _PAIR[0], _OVERLAP[0]])
    spreads = np.array([1.0, free.spread, _REQUESTS[1], _CONTEXT[1], _PAIR[1], _OVERLAP[1]])
    if start is not None:
        known = (start.fixed_s, start.row_s, start.request_s, start.context_s, start.pair_s, start.overlap)
        prior = np.log(np.maximum(known, 1e-9 * start.fixed_s))

    def residuals(at: FloatArray) -> FloatArray:
        fixed_s, row_s, request_s, context_s, pair_s, overlap = np.exp(at)
        overlap = max(overlap, 1.0)
        memory = fixed_s + context_s * context
        compute = rows * (row_s + pair_s * context / requests)
        high, low = np.maximum(memory, compute), np.minimum(memory, compute)
        found = np.log(high * (1 + (low / high) ** overlap) ** (1 / overlap) + request_s * requests)
        # Prices are held in proportion to the whole pass: a slow machine is slow in all of them.
        held = at - prior
        held[1:5] -= held[0]
        return np.concatenate(((found - logs) * weights, held / spreads))

    fixed_s, row_s, request_s, context_s, pair_s, overlap = (
        float(value) for value in np.exp(fit_positive(residuals, prior))
    )
    return Roofline(
        fixed_s=fixed_s,
        context_s=context_s,
        row_s=row_s,
        pair_s=pair_s,
        request_s=request_s,
        overlap=max(overlap, 1.0) if math.isfinite(overlap) else 1.0,
    )
