"""Drafter-invariant sampling: Gumbel-max with the noise of `models.noise`, and both log-probs of the drawn token.

A draw depends on the row's logits, cutoff, temperature, key and position only. Top-k and top-p are the caller's: they
arrive as a cutoff.
"""

import torch
from torch import Tensor

from models.ops import reference
from models.ops.native import as_float32, as_int64, kernels, takes


def sample(
    logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """token = argmax(logits / T + G) over the tokens with logits >= cutoff; the smallest token wins a tie.

    logits [R, V] float32 or bfloat16, without NaN or +inf and with a finite maximum at or above cutoff; cutoff [R]
    float32 (-inf keeps all); temperature [R] float32, >= 0; keys and positions [R] int64 (position in [0, 2^32)).
    Returns tokens [R] int64, log-softmax(logits / T over kept tokens)[token] [R] float32, and log-softmax(logits)
    [token] [R] float32. At T = 0: argmax(logits), and the first log-prob is 0.
    """
    if not takes(logits):
        return reference.sample(logits, cutoff, temperature, keys, positions)
    rows, vocab = logits.shape
    if not cutoff.shape == temperature.shape == keys.shape == positions.shape == (rows,):
        raise ValueError(f"cutoff, temperature, keys and positions must be [{rows}], one entry per row of logits")
    if vocab == 0:
        raise ValueError("logits of an empty vocabulary")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    cutoff, temperature = as_float32(cutoff), as_float32(temperature)
    keys, positions = as_int64(keys), as_int64(positions)
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
