"""Differences of log-probs, means over the tokens of a response, their metrics. Owns how extreme values stay finite."""

import torch
from torch import Tensor

from policies.kl import MAX_LOG_RATIO, difference
from policies.objectives.types import LARGEST, SMALLEST


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """log of the probability ratio, within +-MAX_LOG_RATIO; beyond it has no gradient. 0 where both are impossible."""
    return difference(logprobs, others).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def segment_sums(values: Tensor, segments: Tensor) -> Tensor:
    """[S]: sums of `values` [R] over each sequence; 0 for an empty one. In a fixed order: bitwise reproducible."""
    if values.numel() == 0:
        return values.new_zeros(segments.numel() - 1)
    # unsafe: it would look at the lengths first, which on CUDA waits for the device
    sums: Tensor = torch.segment_reduce(values, "sum", lengths=segments.diff(), initial=0.0, unsafe=True)
    return sums


def segment_means(values: Tensor, segments: Tensor) -> Tensor:
    """[S]: means of `values` [R] over each sequence; 0 for an empty one."""
    return segment_sums(values, segments) / segments.diff().clamp(min=1)


def spread(values: Tensor, segments: Tensor, tokens: int) -> Tensor:
    """[R] of R = `tokens`: to every token the value of its sequence, of `values` [S]."""
    return values.repeat_interleave(segments.diff(), output_size=tokens)


def ratio_metrics(logs: Tensor, segments: Tensor) -> dict[str, Tensor]:
    """How far updates have moved single tokens and whole responses, [R] each, from the log ratios [R], detached.

    A response's ratio is the geometric mean of its tokens'; its distance is the abs of its log, which is what bounds of
    sequence-level objectives are chosen by.
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
