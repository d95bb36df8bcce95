"""The drafter over a packed batch, in one pass or several, each fed with the previous output. Owns attention; no
losses.

Row i of a segment starts a chain, as drafting from there would. Pass 1 gets the target's state at its position p. Pass
k gets, at position p + k - 1, the embedding of token p + k and the output of pass k - 1 for the same row. In pass k its
query attends to the keys of pass 1 of rows 0 .. i (true states) and to those of passes 2 .. k of row i alone (its own
output): exactly the cache that drafting would have. HASS and EAGLE-3 express the same by shifted features and a mask.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafter.eagle.model import DrafterNetwork
from drafter.training.head import TargetHead
from drafter.training.packing import PackedBatch
from models import ops

_CHUNK_ROWS = 512  # query rows per chunk of scores
_KEPT_SCORES = 1 << 22  # per head; if a segment has more, scores are recomputed in the backward pass


class ChainContext:
    """`models.transformer.AttentionContext` of one batch; call `next_pass` before each pass but the first."""

    def __init__(self, batch: PackedBatch, last_position: int) -> None:
        self._batch, self._last = batch, last_position
        self._keys: list[Tensor] = []  # of each pass, [T, Hkv, D]
        self._values: list[Tensor] = []
        self.positions = batch.positions

    def next_pass(self) -> None:
        """Advance all rows by one position. At the model's last position they stay there, unsupervised."""
        self.positions = (self.positions + 1).clamp(max=self._last)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionContext."""
        self._keys.append(k)
        self._values.append(v)
        scale = q.shape[-1] ** -0.5
        segments = self._batch.segments
        if len(self._keys) == 1:
            return ops.packed_attention(q, k, v, self._batch.cu_seqlens, scale, segments=segments)
        own_keys, own_values = torch.stack(self._keys[1:], 1), torch.stack(self._values[1:], 1)  # [T, k - 1, Hkv, D]
        parts = (x.split(segments.lengths) for x in (q * scale, self._keys[0], self._values[0], own_keys, own_values))
        return torch.cat([_segment(*tensors) for tensors in zip(*parts, strict=True)])


def _segment(q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """Attend within one segment of n rows, q scaled; arguments as in `_rows` -> [n, Hq, D]."""
    rows = len(q)
    recompute = rows * rows > _KEPT_SCORES and torch.is_grad_enabled()
    out = []
    for start in range(0, rows, _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, rows)
        args = q[start:end], keys[:end], values[:end], own_keys[start:end], own_values[start:end]
        out.append(checkpoint(_rows, *args, use_reentrant=False) if recompute else _rows(*args))
    return out[0] if len(out) == 1 else torch.cat(out)


def _rows(q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """Queries [m, Hq, D] of the last m of n rows; keys, values [n, Hkv, D]; own ones [m, K, Hkv, D] -> [m, Hq, D]."""
    count, heads, dim = q.shape
    total, groups = keys.shape[:2]
    grouped = q.view(count, groups, heads // groups, dim)
    hidden = torch.ones(count, total, dtype=torch.bool, device=q.device).triu(total - count + 1)
    scores = torch.einsum("mgrd,ngd->grmn", grouped, keys).masked_fill(hidden, -torch.inf)
    own = torch.einsum("mgrd,mkgd->grmk", grouped, own_keys)
    weights = torch.cat((scores, own), dim=-1).float().softmax(-1).to(values.dtype)
    seen = torch.einsum("grmn,ngd->mgrd", weights[..., :total], values)
    seen = seen + torch.einsum("grmk,mkgd->mgrd", weights[..., total:], own_values)
    return seen.reshape(count, heads, dim)


def run_passes(model: DrafterNetwork, head: TargetHead, batch: PackedBatch, passes: int) -> list[Tensor]:
    """Return the output of `advance` in each pass, [T, H]: row i of pass k approximates the state at position p + k.

    Rows without a row `k - 1` rows ahead (`batch.ahead`) are computed in pass k, but are meaningless.
    """
    context = ChainContext(batch, head.config.max_position_embeddings - 1)
    features = model.features(batch.states[batch.at].float())
    outputs: list[Tensor] = []
    rope = model.rope or head.rope
    for index in range(passes):
        if index:
            context.next_pass()
        row, _ = batch.ahead(index)
        embedded = head.embed(batch.tokens[row])
        features = model.advance(embedded, features, rope.at(context.positions), context)
        outputs.append(features)
    return outputs
