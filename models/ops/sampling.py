"""Drafter-invariant sampling: Gumbel-max with the noise of `models.noise`, and both log-probs of the drawn token.

A draw depends on the row's logits, cutoff, temperature, key and position only. Top-k and top-p are first turned into a
cutoff. Log-softmax is here too, because on the CPU it sums a row in the sampler's order.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops import reference
from models.ops.native import as_float32, as_int64, kernels, takes
from models.ops.triton import operators
from models.ops.triton.operators import operators_take


def sample(
    logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """token = argmax(logits / T + G) over the tokens with logits >= cutoff; the smallest token wins a tie.

    logits [R, V] float32 or bfloat16, without NaN or +inf and with a finite maximum at or above cutoff; cutoff [R]
    float32 (-inf keeps all); temperature [R] float32, >= 0; keys and positions [R] int64 (position in [0, 2^32)).
    Returns tokens [R] int64, log-softmax(logits / T over kept tokens)[token] [R] float32, and log-softmax(logits)
    [token] [R] float32. At T = 0: argmax(logits), and the first log-prob is 0.
    """
    if operators_take(logits):
        drawn: tuple[Tensor, Tensor, Tensor] = operators.sample(logits, cutoff, temperature, keys, positions)
        return drawn
    if not takes(logits):
        return reference.sample(logits, cutoff, temperature, keys, positions)
    rows, vocab = logits.shape
    if vocab == 0:
        raise ValueError("logits of an empty vocabulary")
    logits, cutoff, temperature, keys, positions = _for_kernels(logits, cutoff, temperature, keys, positions)
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs, logprobs_t1 = torch.empty(rows), torch.empty(rows)
    kernels.sample(  # type: ignore[union-attr]
        logits.dtype is torch.bfloat16,
        logits.data_ptr(),
        logits.stride(0),
        cutoff.data_ptr(),
        temperature.data_ptr(),
        keys.data_ptr(),
        positions.data_ptr(),
        rows,
        vocab,
        torch.get_num_threads(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
        logprobs_t1.data_ptr(),
    )
    return tokens, logprobs, logprobs_t1


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax of the rows of logits [R, V] float32, summed in float64 on the CPU. Differentiable.

    With the native kernels a token's entry is bitwise the log-prob that `sample` reports. torch's own sums a row in
    float32 lanes; at 50,000 tokens its error is 1e-5 if one token has most of the mass.
    """
    if not logits.is_cpu:
        return F.log_softmax(logits, dim=-1)  # there each thread sums a few tokens before the sums are added
    if logits.dtype is not torch.float32 or not takes(logits):
        return reference.log_softmax(logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        table: Tensor = _LogSoftmax.apply(logits)  # type: ignore[no-untyped-call]
        return table
    return _log_softmax(logits)


class SoftmaxTerms(NamedTuple):
    """Terms of the softmax of each row of logits, float32 [R] each."""

    top: Tensor  # the largest logit
    log_total: Tensor  # log of the sum of exp((logits - top) / T)
    log_total_t1: Tensor  # the same for T = 1
    total: Tensor  # the sum itself, for T
    entropy: Tensor  # of softmax(logits / T), nats


def softmax_terms(logits: Tensor, targets: Tensor, temperature: float) -> SoftmaxTerms:
    """Overwrite logits [R, V] with exp((logits - top) / T), minus `total` at targets int64 [R].

    That is -total times the gradient of log-softmax(logits / T)[target], T > 0. Needs float32 on the CPU and native
    kernels. Log-softmax at any token is (logit / T - top / T) - log_total, bitwise as in `sample` and `log_softmax`.
    """
    rows, vocab = logits.shape
    if targets.shape != (rows,) or not logits.is_contiguous() or not takes(logits) or logits.dtype is not torch.float32:
        raise ValueError(f"softmax_terms takes contiguous float32 rows, not {tuple(logits.shape)} {logits.dtype}")
    facts = SoftmaxTerms(*torch.empty(5, rows))
    kernels.softmax_terms(  # type: ignore[union-attr]
        logits.data_ptr(),
        as_int64(targets).data_ptr(),
        temperature,
        rows,
        vocab,
        torch.get_num_threads(),
        *(fact.data_ptr() for fact in facts),
    )
    return facts


def sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    *,
    scale: float = 1.0,
    noise: bool = True,
) -> tuple[Tensor, Tensor]:
    """The k tokens with the largest logits / T + G, best first, and log-softmax((logits / T + G) / scale) of them.

    Arguments as in `sample`; 1 <= k <= V; without `noise` G is 0; at T = 0 the values are the logits. The first token
    is the one `sample` draws. Returns tokens int64 [R, k] and log-probabilities float32 [R, k] (-inf below the cutoff).
    """
    rows, vocab = logits.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k={k} of a vocabulary of {vocab}")
    if k <= operators.MAX_TOPK and operators_take(logits):
        best: tuple[Tensor, Tensor] = operators.sample_topk(
            logits, cutoff, temperature, keys, positions, k, scale, noise
        )
        return best
    if not takes(logits):
        return reference.sample_topk(logits, cutoff, temperature, keys, positions, k, scale=scale, noise=noise)
    logits, cutoff, temperature, keys, positions = _for_kernels(logits, cutoff, temperature, keys, positions)
    tokens, logprobs = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k))
    kernels.sample_topk(  # type: ignore[union-attr]
        logits.dtype is torch.bfloat16,
        logits.data_ptr(),
        logits.stride(0),
        cutoff.data_ptr(),
        temperature.data_ptr(),
        keys.data_ptr(),
        positions.data_ptr(),
        rows,
        vocab,
        k,
        scale,
        noise,
        torch.get_num_threads(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
    )
    return tokens, logprobs


def _log_softmax(logits: Tensor) -> Tensor:
    logits = logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty_like(logits)
    kernels.log_softmax(  # type: ignore[union-attr]
        logits.data_ptr(), out.data_ptr(), rows, vocab, torch.get_num_threads()
    )
    return out


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        table = _log_softmax(logits)
        ctx.save_for_backward(table)
        return table

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (table,) = ctx.saved_tensors
        for_logits: Tensor = torch.ops.aten._log_softmax_backward_data(grad, table, -1, table.dtype)
        return for_logits


def _for_kernels(
    logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logits with dense rows; cutoff and temperature float32, keys and positions int64. Raises ValueError."""
    rows = logits.shape[0]
    if not cutoff.shape == temperature.shape == keys.shape == positions.shape == (rows,):
        raise ValueError(f"cutoff, temperature, keys and positions must be [{rows}], one entry per row of logits")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return logits, as_float32(cutoff), as_float32(temperature), as_int64(keys), as_int64(positions)


def cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest logit that each row may draw, float32 [R].

    logits [R, V]; temperature, top_p float32 [R]; top_k int64 [R] (0 is off). Top-k keeps the k largest logits, then
    top-p the smallest set of them whose probability at this temperature reaches p; ties with the last kept are kept.
    """
    if operators_take(logits):
        found: Tensor = operators.cutoff(logits, temperature, top_k, top_p)
        return found
    return reference.cutoff(logits, temperature, top_k, top_p)
