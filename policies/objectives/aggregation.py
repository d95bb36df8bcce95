"""Aggregation of token losses to the loss of a mini-batch: the weight of each token.

`sequence_coefficients` is computed once for the whole mini-batch. So its loss is a plain weighted sum of tokens, and
its parts can be added in any split into micro-batches and over ranks.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from config.objective import Aggregation


def sequence_coefficients(
    response_lengths: Sequence[int],
    weights: Sequence[float],
    aggregation: Aggregation,
    sum_divisor: float | None = None,
    asked: float | None = None,
) -> NDArray[np.float64]:
    """Factor c_s of every token of sequence s, so that loss = sum_s c_s * sum_t x_st.

    token_mean (DAPO): c_s = w_s / sum_j w_j T_j. seq_mean_token_mean (GRPO): c_s = w_s / (T_s * sum_j w_j).
    seq_mean_token_sum: c_s = w_s / sum_j w_j. seq_mean_token_sum_norm: that divided by `sum_divisor`. With the longest
    allowed response as the divisor it is Dr. GRPO (Liu et al. 2025, section 3.2): a token's weight depends on no
    length. fixed_mean_token_sum_norm: c_s = w_s / (asked * sum_divisor). `asked` is the number of responses that this
    mini-batch stands for, trained on or not. The denominator has no sampled quantity. So weights that are right in
    expectation give an unbiased gradient, unlike a division by their sum (1/N off). With all weights 1 the others are
    the mean over tokens, and the mean over sequences of their means, of their sums, and of their sums divided by the
    divisor. [S], float64.
    Raises ValueError if a length is below 1, a weight is negative, all weights are 0, or a divisor or `asked`
    is missing.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    w = np.asarray(weights, dtype=np.float64)
    if lengths.shape != w.shape or lengths.size == 0:
        raise ValueError(f"need one weight for each of at least one sequence; got {w.shape} for {lengths.shape}")
    if (lengths < 1).any():
        raise ValueError(f"sequence {int(np.argmax(lengths < 1))} has an empty response")
    if not ((w >= 0).all() and np.isfinite(w).all() and w.sum() > 0):
        raise ValueError("sequence weights must be finite, not negative, and not all zero")
    coefficients: NDArray[np.float64]
    match aggregation:
        case "token_mean":
            coefficients = w / float((w * lengths).sum())
        case "seq_mean_token_mean":
            coefficients = w / (lengths * float(w.sum()))
        case "seq_mean_token_sum":
            coefficients = w / float(w.sum())
        case "seq_mean_token_sum_norm":
            if sum_divisor is None:
                raise ValueError("objective.sum_divisor is not set: seq_mean_token_sum_norm divides by it")
            coefficients = w / (float(w.sum()) * sum_divisor)
        case "fixed_mean_token_sum_norm":
            if sum_divisor is None or asked is None or not asked > 0:
                raise ValueError(
                    "fixed_mean_token_sum_norm divides by objective.sum_divisor and by the responses asked for; got "
                    f"{sum_divisor} and {asked}"
                )
            coefficients = w / (asked * sum_divisor)
        case _:
            assert_never(aggregation)
    return coefficients
