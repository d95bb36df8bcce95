"""A roofline of one pass, in seconds: memory traffic against arithmetic, plus a cost per request.

    memory  = fixed_s + context_s * context tokens          weights and launches; keys and values
    compute = rows * (row_s + pair_s * context / requests)  products; attention
    pass    = (memory^overlap + compute^overlap)^(1 / overlap) + request_s * requests

EfficientRollout's eq. 2 is the limit overlap -> infinity, where one hides the other entirely; at 1 they add up. Owns
the formula and its fit to measured passes; has no device data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, Field

from policies.calibration.solve import FloatArray, fit_positive

_SPREAD = 0.05  # relative deviation of a well measured pass from the formula
# Start and prior of a fit while little was measured, with standard deviations of the logarithms.
_REQUESTS, _CONTEXT, _PAIR = (100.0, 1.5), (20_000.0, 2.0), (100_000.0, 2.0)


@dataclass(frozen=True, slots=True)
class FreeRows:
    """The number of rows above which a pass's arithmetic outweighs its weights, as a prior, and how far one of them
    hides the other: `overlap` of the formula. The spreads are those of the logarithms."""

    rows: float
    spread: float = 1.5
    overlap: float = 1.5
    overlap_spread: float = 0.4


# They have 4 to 16 rows, and fetch weights while they compute.
PROCESSOR = FreeRows(16.0, overlap=4.0, overlap_spread=1.0)
UNKNOWN_GPU = FreeRows(100.0, 1.0)  # by the peaks 120 to 420, which kernels do not reach


class Roofline(BaseModel, frozen=True, extra="forbid"):
    """Costs of a pass. All are at least 0; `fixed_s` is positive."""

    fixed_s: float = Field(gt=0)
    context_s: float = Field(ge=0)
    row_s: float = Field(ge=0)
    pair_s: float = Field(default=0.0, ge=0)
    request_s: float = Field(ge=0)
    overlap: float = Field(default=1.0, ge=1)

    def seconds(self, requests: int, rows: int, context_tokens: int) -> float:
        """Return the seconds of a pass of `rows` rows for `requests` >= 1 requests with `context_tokens` tokens in
        total."""
        memory = self.fixed_s + self.context_s * context_tokens
        compute = rows * (self.row_s + self.pair_s * context_tokens / requests)
        high, low = (memory, compute) if memory > compute else (compute, memory)
        return float(high * (1 + (low / high) ** self.overlap) ** (1 / self.overlap) + self.request_s * requests)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """Typical seconds of passes of that shape. `sure`: its weight, 1 after a few, as the inverse of a 5 % deviation."""

    requests: int
    rows: int
    context_tokens: int
    seconds: float
    sure: float = 1.0


def fit_roofline(passes: Sequence[MeasuredPass], start: Roofline | None = None, free: FreeRows = PROCESSOR) -> Roofline:
    """Fit a roofline of least relative error to at least one pass. Parameters that the passes leave open stay near a
    prior. `start`: an earlier fit as the prior, since shapes with one mean context each leave much open. `free`: prior
    knowledge of the device if there is no `start`."""
    requests, rows, context, seconds, sure = (
        np.array([getattr(one, name) for one in passes], float)
        for name in ("requests", "rows", "context_tokens", "seconds", "sure")
    )
    logs, weights = np.log(seconds), sure / _SPREAD
    least = float(seconds.min())
    prior = np.log(
        [least, least / free.rows, least / _REQUESTS[0], least / _CONTEXT[0], least / _PAIR[0], free.overlap]
    )
    spreads = np.array([1.0, free.spread, _REQUESTS[1], _CONTEXT[1], _PAIR[1], free.overlap_spread])
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
        # Prices are regularised relative to the whole pass, since a slow machine is slow in all of them.
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
