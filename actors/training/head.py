"""The head of the native network: from hidden states to log-probs and back, in chunks of rows.

Defines the chunk size and the explicit gradients of log-softmax. On a device, the backward pass computes a chunk's
logits again and turns them into their own gradient in place; all chunks add to one gradient of the weight. On the CPU
with a frozen weight (LoRA), the gradient of a log-prob is computed together with it, so nothing is recomputed. On the
CPU otherwise, autograd does it (`actors.training.network`).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from models import ops

LOGITS_CHUNK_BYTES = 64 * 2**20  # float32 logits per chunk, on the CPU
_DEVICE_SHARE = 64  # on a device: 1 / this share of its memory; backward's peak is 2.5 times that
_TILE_ROWS = 128  # smaller products, or remainders, are no faster


def chunk_bytes_on(device: torch.device) -> int:
    """Return the bytes of float32 logits per chunk. Depends on the device's size and not its free memory, because the
    split of sums determines their last bits."""
    if device.type != "cuda":
        return LOGITS_CHUNK_BYTES
    return max(LOGITS_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE)


def chunk_rows_of(vocab_size: int, chunk_bytes: int) -> int:
    """Return the number of logit rows in this many bytes, in whole tiles if possible."""
    rows = max(1, chunk_bytes // (4 * vocab_size))
    return rows if chunk_bytes <= LOGITS_CHUNK_BYTES else max(_TILE_ROWS, rows // _TILE_ROWS * _TILE_ROWS)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    chunk_rows: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies of hidden [R, H], weight [V, H], int64 targets [R], as float32 [R].

    These are log-softmax(logits / temperature) at the targets, log-softmax(logits) there without gradient, and the
    entropy of softmax(logits / temperature), with gradient if requested. Logits are float32 (`ops.head`)."""
    found: tuple[Tensor, Tensor, Tensor] = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperature, chunk_rows, entropy_gradient
    )
    return found


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = []
        for h, t in zip(torch.split(hidden, chunk_rows), torch.split(targets, chunk_rows), strict=True):
            logits = ops.head(h, weight, invariant=False).float()
            chosen, normaliser_t1 = logits.gather(1, t[:, None])[:, 0], logits.logsumexp(-1)
            normaliser = normaliser_t1
            if temperature != 1.0:
                logits /= temperature
                normaliser = logits.logsumexp(-1)
            logits -= normaliser[:, None]
            entropy = -logits.exp().mul_(logits).sum(-1)
            chunks.append((chosen / temperature - normaliser, chosen - normaliser_t1, entropy, normaliser))
        logprobs, logprobs_t1, entropy, normaliser = (torch.cat(column) for column in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy if entropy_gradient else None)
        ctx.temperature, ctx.chunk_rows = temperature, chunk_rows
        ctx.mark_non_differentiable(logprobs_t1, *(() if entropy_gradient else (entropy,)))
        return logprobs, logprobs_t1, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, for_logprobs: Tensor, _: Tensor, for_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grads: list[Tensor] = []
        grad_weight: Tensor | None = None
        for start in range(0, max(1, len(targets)), ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            table = ops.head(hidden[rows], weight, invariant=False).float()
            if ctx.temperature != 1.0:
                table /= ctx.temperature
            table -= normaliser[rows, None]  # log-probs
            # d logprob / d z = one_hot - p and d entropy / d z = -p (log p + entropy), for z = logits / temperature
            grad = for_logprobs[rows, None] / ctx.temperature
            if entropy is None:
                table = table.exp_().mul_(-grad)
            else:
                slope = for_entropy[rows, None] / ctx.temperature
                probs = table.exp()
                table = table.add_(entropy[rows, None]).mul_(-slope).sub_(grad).mul_(probs)
            table.scatter_add_(1, targets[rows, None], grad)
            table = table.to(weight.dtype)
            if wants_hidden:
                grads.append(table @ weight)
            if grad_weight is not None:
                grad_weight.addmm_(table.t(), hidden[rows])
            elif wants_weight:
                grad_weight = table.t() @ hidden[rows]
        return torch.cat(grads) if wants_hidden else None, grad_weight, None, None, None, None


def frozen_head_logprobs(
    states: Tensor,
    weight: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    chunk_rows: int,
    invariant: bool,
    bf16_gradients: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `head_logprobs` of the states [T, H] at `rows` int64 [R], R > 0, with targets int64 [R]: on the CPU, for
    a weight [V, H] without gradient. A row with several targets is computed once. The entropies have no gradient."""
    needed, at = np.unique(rows.numpy(), return_inverse=True)
    hidden = states.index_select(0, torch.from_numpy(needed))
    found: tuple[Tensor, Tensor, Tensor] = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, at, targets, temperature, chunk_rows, invariant, bf16_gradients
    )
    return found


class _FrozenHead(torch.autograd.Function):
    """With z = logits / T and p = softmax(z), d log p_t / d hidden = (W_t - p W) / T.

    The first target t of a row is subtracted before the product, (p - 1_t) W, because W_t and p W nearly cancel if p_t
    is near 1. The row's other targets add W_t' - W_t."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        at: NDArray[np.int64],
        targets: Tensor,
        temperature: float,
        chunk_rows: int,
        invariant: bool,
        bf16_gradients: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, drawn = len(hidden), targets.numpy()
        order = np.argsort(at, kind="stable")
        first = np.searchsorted(at[order], np.arange(count + 1))  # start of each row, in `order`
        taken = drawn[order[first[:-1]]]
        others = np.flatnonzero(drawn != taken[at])
        rows, apart_at = torch.from_numpy(at), torch.from_numpy(others)
        chosen, parts, slopes = torch.empty(len(at)), [], []
        frozen = weight
        if ctx.needs_input_grad[0]:
            frozen = weight.to(ops.product_dtype(torch.bfloat16 if bf16_gradients else weight.dtype))
        for start in range(0, count, chunk_rows):
            end = min(start + chunk_rows, count)
            table = ops.head(hidden[start:end], weight, invariant=invariant).float()
            here = torch.from_numpy(order[first[start] : first[end]])
            chosen[here] = table[rows[here] - start, targets[here]]
            parts.append(ops.softmax_terms(table, torch.from_numpy(taken[start:end]), temperature))
            if ctx.needs_input_grad[0]:
                slope = (table.to(frozen.dtype) @ frozen).float()
                slopes.append(slope.div_(parts[-1].total[:, None] * -temperature))
        top, log_total, log_total_t1, _, entropy = (torch.cat(column)[rows] for column in zip(*parts, strict=True))
        if slopes:
            apart = weight[drawn[others]].float().sub_(weight[taken[at[others]]].float()).div_(temperature)
            ctx.save_for_backward(torch.cat(slopes), rows, apart, rows[apart_at], apart_at)
        ctx.dtype = hidden.dtype
        logprobs_t1 = (chosen - top) - log_total_t1
        logprobs = logprobs_t1.clone()
        if temperature != 1.0:
            logprobs = (chosen / temperature - top / temperature) - log_total
        ctx.mark_non_differentiable(logprobs_t1, entropy)
        return logprobs, logprobs_t1, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        slopes, rows, apart, apart_rows, apart_at = ctx.saved_tensors
        weights = grad.new_zeros(len(slopes)).index_add_(0, rows, grad)
        for_hidden = (slopes * weights[:, None]).index_add_(0, apart_rows, apart * grad[apart_at, None])
        return for_hidden.to(ctx.dtype), None, None, None, None, None, None, None
