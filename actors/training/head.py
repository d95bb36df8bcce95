"""The head of the native network on a device: from hidden states to log-probs and back, in chunks of rows.

Owns how many rows are computed at once and the gradients of log-softmax, written out: a chunk's logits are computed
again in the backward pass and become their own gradient in place, and every chunk adds to one gradient of the weight.
On the CPU, whose numbers are not to change by a bit, autograd does it (`actors.training.network`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models import ops

LOGITS_CHUNK_BYTES = 64 * 2**20  # float32 logits that exist at once, on the CPU
_DEVICE_SHARE = 64  # on a device: one part in so many of its memory; backward needs 2.5 times that at its peak
_TILE_ROWS = 128  # a product of fewer rows, or of a rest, is no faster


def chunk_bytes_on(device: torch.device) -> int:
    """float32 logits that exist at once. A function of the device alone, not of what is free there: how sums are cut
    decides their last bits."""
    if device.type != "cuda":
        return LOGITS_CHUNK_BYTES
    return max(LOGITS_CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // _DEVICE_SHARE)


def chunk_rows_of(vocab_size: int, chunk_bytes: int) -> int:
    """Rows of logits in so many bytes, whole tiles where there is one."""
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
    """Of hidden [R, H], weight [V, H], int64 targets [R]: float32 [R] log-softmax(logits / temperature) at the targets,
    log-softmax(logits) there without gradient, and the entropy of softmax(logits / temperature), with gradient if
    asked. Logits are float32 (`ops.head`)."""
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
