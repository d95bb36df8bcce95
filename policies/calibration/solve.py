"""Small non-linear least squares over positive parameters. Independent of costs."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
_STEP = 1e-5  # of a logarithm, for finite differences
_FAR = 3.0  # residuals beyond this many standard deviations lose weight, without bound


def fit_positive(residuals: Callable[[FloatArray], FloatArray], start: FloatArray, rounds: int = 40) -> FloatArray:
    """Return logarithms [P] that minimise residuals(logarithms) [M]: Levenberg-Marquardt, with Cauchy's weights beyond
    3.

    Residuals are in standard deviations, including those that hold parameters near a prior.
    """
    at, damping = start.astype(float), 1e-2
    found = residuals(at)
    loss = _loss(found)
    idle = 0  # consecutive rounds with little gain: one alone may be too long a step, cut to almost nothing
    for _ in range(rounds):
        jacobian = np.empty((len(found), len(at)))
        for column in range(len(at)):
            moved = at.copy()
            moved[column] += _STEP
            jacobian[:, column] = (residuals(moved) - found) / _STEP
        weights = 1 / (1 + (found / _FAR) ** 2)
        normal, slope = jacobian.T @ (jacobian * weights[:, None]), jacobian.T @ (found * weights)
        better = False
        for _ in range(8):
            step = -np.linalg.solve(normal + np.diag(damping * (np.diag(normal) + 1e-9)), slope)
            tried = at + np.clip(step, -2.0, 2.0)
            there = residuals(tried)
            lower = _loss(there)
            if lower < loss:
                better = loss - lower > 1e-4 * (1 + loss)
                at, found, loss, damping = tried, there, lower, damping / 5
                break
            damping = min(damping * 5, 1e9)
        idle = 0 if better else idle + 1
        if idle == 2:
            break
    return at


def _loss(residuals: FloatArray) -> float:
    return float(np.log1p((residuals / _FAR) ** 2).sum()) * _FAR**2
