"""Differences of log-probs, means over the tokens of a response, and their metrics. Keeps extreme values finite."""

import torch
from torch import Tensor

from policies.kl import MAX_LOG_RATIO, difference
from policies.objectives.types import LARGEST, SMALLEST


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return the log of the probability ratio, clamped to +-MAX_LOG_RATIO without gradient beyond. 0 if both are
    impossible."""
    return difference(logprobs, others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sums(values: Tensor, segments: Tensor) -> Tensor:
    """Return [S]: sums of `values` [R] over each sequence; 0 for an empty one. In a fixed order: bitwise
    reproducible."""
    if values.numel() == 0:
        return values.new_zeros(segments.numel() - 1)
    # unsafe: otherwise it reads the lengths first, which on CUDA waits for the device
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=segments.diff(), initial=0.0, unsafe=True)
    return sums


def segment_means(values: Tensor, segments: Tensor) -> Tensor:
    """Return [S]: means of `values` [R] over each sequence; 0 for an empty one."""
    return segment_sums(values, segments) / segments.diff().clamp(min=1)


def spread(values: Tensor, segments: Tensor, tokens: int) -> Tensor:
    """Return [R], R = `tokens`: for every token the value of its sequence, from `values` [S]."""
    return values.repeat_interleave(segments.diff(), output_size=tokens)


def ratio_metrics(logs: Tensor, segments: Tensor) -> dict[str, Tensor]:
    """Return how far updates have moved tokens and responses, [R] each, detached. Input: the log ratios [R].

    A response's ratio is the geometric mean of its tokens'. Its distance is the abs of its log, by which the bounds of
    sequence-level objectives are chosen.
    """
    of_response = spread(segment_means(logs, segments), segments, len(logs))
    token, response = logs.exp(), of_response.exp()
    return {
        f"ratio/token{LARGEST}": token,
        f"ratio/token{SMALLEST}": token,
        f"ratio/sequence{LARGEST}": response,
        f"ratio/sequence{SMALLEST}": response,
        "ratio/sequence_distance": of_response.abs(),
    }
