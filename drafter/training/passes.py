"""The drafter over a packed batch, once or fed with its own output several times. Owns who sees whom; no losses.

Row i of a segment starts a chain, as drafting from there would: pass 1 feeds it with the target's state at its position
p; pass k feeds, at position p + k - 1, the embedding of token p + k and what pass k - 1 put out for the same row. In
pass k its query sees the keys of pass 1 of rows 0 .. i (true states) and the keys of passes 2 .. k of row i alone (its
own output): exactly the cache that drafting would have. HASS and EAGLE-3 say the same with shifted features and a mask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafter.eagle.model import DrafterNetwork
from drafter.training.head import TargetHead
from drafter.training.packing import PackedBatch
from models import ops

_CHUNK_ROWS = 512  # queries whose scores exist at a time
_KEPT_SCORES = 1 << 22  # per head; with more in a segment, scores are computed again for the backward pass


class ChainContext:
    """`models.transformer.AttentionContext` of one batch; call `next_pass` before each pass but the first."""

    def __init__(self, batch: PackedBatch, last_position: int) -> None:
        self._batch, self._last = batch, last_position
        self._keys: list[Tensor] = []  # of each pass, [T, G, D]: G heads of keys and values
        self._values: list[Tensor] = []
        self._true: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())  # of pass 1 by segment, [G, n, D]
        self.positions = batch.positions

    def next_pass(self) -> None:
        """The rows move on by one position. Past the model's last position they stay there, unsupervised."""
        if not self._true[0]:
            lengths = self._batch.lengths
            keys, values = (x[0].transpose(0, 1).contiguous().split(lengths, 1) for x in (self._keys, self._values))
            self._true = keys, values
        self.positions = (self.positions + 1).clamp(max=self._last)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionContext."""
        self._keys.append(k)
        self._values.append(v)
        scale = q.shape[-1] ** -0.5
        lengths = self._batch.lengths
        if len(self._keys) == 1:
            return ops.packed_attention(q, k, v, self._batch.cu_seqlens, scale, max_seqlen=max(lengths))
        rows, heads, dim = q.shape
        groups = k.shape[1]
        grouped = (q * scale).view(rows, groups, heads // groups, dim)
        own = [(grouped * keys[:, :, None]).sum(-1) for keys in self._keys[1:]]
        own_scores = torch.stack(own, -1).transpose(0, 1).split(lengths, 1)  # [G, n, R, K] of each segment
        queries = grouped.transpose(0, 1).contiguous().split(lengths, 1)  # [G, n, R, D]
        parts = [_segment(*tensors) for tensors in zip(queries, *self._true, own_scores, strict=True)]
        seen, weights = (torch.cat(tensors, 1).transpose(0, 1) for tensors in zip(*parts, strict=True))
        for index, values in enumerate(self._values[1:]):
            seen = seen + weights[..., index : index + 1] * values[:, :, None]
        return seen.reshape(rows, heads, dim)


def _segment(q: Tensor, keys: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """One segment of n rows: scaled queries [G, n, R, D], keys and values [G, n, D], and what each query scores with the
    K keys of its own row [G, n, R, K] -> what it takes from `values` [G, n, R, D], and its weights for its own [.., K]."""
    rows = q.shape[1]
    recompute = rows * rows > _KEPT_SCORES and torch.is_grad_enabled()
    parts = []
    for start in range(0, rows, _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, rows)
        args = q[:, start:end], keys[:, :end], values[:, :end], own[:, start:end]
        parts.append(checkpoint(_rows, *args, use_reentrant=False) if recompute else _rows(*args))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([seen for seen, _ in parts], 1), torch.cat([weights for _, weights in parts], 1)


def _rows(q: Tensor, keys: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """As `_segment`, for the last m of n rows."""
    groups, count, repeats, dim = q.shape
    total = keys.shape[1]
    scores = torch.bmm(q.reshape(groups, count * repeats, dim), keys.transpose(1, 2)).view(
        groups, count, repeats, total
    )
    later = torch.ones(count, total, dtype=torch.bool, device=q.device).triu_(total - count + 1)
    scores = torch.cat((scores.masked_fill(later[:, None], -torch.inf), own), dim=-1)
    weights = scores.float().softmax(-1).to(values.dtype)
    true = weights[..., :total].reshape(groups, count * repeats, total)
    return torch.bmm(true, values).view(groups, count, repeats, dim), weights[..., total:]


def run_passes(model: DrafterNetwork, head: TargetHead, batch: PackedBatch, passes: int) -> list[Tensor]:
    """Output of `advance` in each pass, [T, H]: row i of pass k stands for the state at position p + k.

    Rows that `batch.ahead(k - 1)` says nothing lies behind are computed in pass k, but mean nothing.
    """
    context = ChainContext(batch, head.config.max_position_embeddings - 1)
    features = model.features(batch.states[batch.at].float())
    outputs: list[Tensor] = []
    for index in range(passes):
        if index:
            context.next_pass()
        row, _ = batch.ahead(index)
        embedded = head.embed(batch.tokens[row])
        features = model.advance(embedded, features, head.rope.at(context.positions), context)
        outputs.append(features)
    return outputs
