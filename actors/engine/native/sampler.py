"""Top-k and top-p as a cutoff on logits; the draw itself is `ops.sample`. Owns no state and no randomness."""

import torch
from torch import Tensor


def cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit that each row may draw, float32 [R].

    logits [R, V]; temperature, top_p float32 [R]; top_k int64 [R] (0 is off). Top-k keeps the k largest logits, then
    top-p the smallest set of them whose probability at this temperature reaches p; ties with the last kept are kept.
    """
    vocab = logits.shape[1]
    ordered = logits.float().sort(dim=-1, descending=True).values
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab)[:, None]
    scaled = ordered / torch.where(temperature == 0, 1.0, temperature)[:, None]
    probability = scaled.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    # Kept while the probability before a token is below p; the most probable one is always kept.
    before = probability.cumsum(dim=-1) - probability
    keep &= (before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1)
    last = keep.sum(dim=-1, keepdim=True) - 1
    return ordered.gather(1, last)[:, 0]
