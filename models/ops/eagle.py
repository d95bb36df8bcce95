"""The EAGLE drafter's passes in one native call each: over given rows, and a whole chain of drafts.

Holds the addresses of the weights and the workspace. The kernels are those of the separate operations, so features and
tokens are bitwise those of `ops.linear`, `ops.split_qkv`, `ops.sample` ... in turn. Never differentiable.
"""

import torch
from torch import Tensor

from models.ops.matmul import panels_of
from models.ops.native import kernels
from models.ops.stack import DecoderStack, StackLayer, layer_addresses


class EaglePasses:
    """One block behind a fusion of embedding and feature; embedding and head are the target's.

    fuse [H, 2H] and the layer's products must be `prepack`ed; `layer.input_norm` is not read. embedding, head [V, H]
    (packed or not); cos, sin float32 [P, D/2]. Call `refresh` after the drafter's weights were written and packed.
    Raises ValueError if no kernel supports them (check `supports` first).
    """

    def __init__(
        self,
        layer: StackLayer,
        fuse: Tensor,
        embedding: Tensor,
        head: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        query_heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        (vocab, hidden), (positions, half) = embedding.shape, cos.shape
        if not self.supports(embedding, 2 * half):
            raise ValueError("EAGLE's passes need the native kernels, plain float32 or bfloat16 weights, D % 8 == 0")
        if layer.form is not None:
            raise ValueError("EAGLE's block is never in few bits")
        self._layer, self._fuse, self._embedding, self._head = layer, fuse, embedding.detach(), head.detach()
        self._source, self._cos, self._sin = head, cos, sin  # panels are stored on the head itself
        self._half, self._hidden = embedding.dtype is torch.bfloat16, hidden
        self._cache_shape = (kv_heads, 2 * half)
        self._shape = kernels.StackShape(  # type: ignore[union-attr]
            layers=1,
            hidden=hidden,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=2 * half,
            intermediate=layer.intermediate,
            vocab=vocab,
            positions=positions,
            eps=eps,
            scale=(2 * half) ** -0.5,
        )
        self._workspace, self._workspace_rows = torch.empty(0, dtype=torch.uint8), 0
        self.refresh()

    @staticmethod
    def supports(weight: Tensor, head_dim: int) -> bool:
        """Return whether a kernel supports such weights (older builds of the extension have none)."""
        return DecoderStack.supports(weight, head_dim) and hasattr(kernels, "eagle_chain")

    def refresh(self) -> None:
        """Use the drafter's newly written and packed weights."""
        packed = panels_of(self._fuse)
        if packed is None:
            raise ValueError("the fusion's weight is not prepacked")
        self._panels = packed
        self._addresses = torch.tensor(layer_addresses(self._layer), dtype=torch.int64)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        query_offsets: Tensor,
        context_lens: Tensor,
        block_tokens: int,
        tree_mask: Tensor | None = None,
    ) -> Tensor:
        """Return features of the next positions [T, H].

        tokens, positions, kv_slots int64 [T]; features [T, H]; keys, values [slots, Hkv, D], written at kv_slots;
        block_tables int32 [R, M], query_offsets int32 [R + 1], context_lens int32 [R]; tree_mask uint8 [T, W]. Raises
        IndexError for an entry outside its table."""
        rows, (requests, width) = len(tokens), block_tables.shape
        self._check(keys, values)
        features = features if features.is_contiguous() else features.contiguous()
        if features.shape != (rows, self._hidden) or positions.shape != (rows,) or kv_slots.shape != (rows,):
            raise ValueError(f"features, positions and kv_slots must have {rows} rows")
        out = torch.empty_like(features)
        kernels.eagle_pass(  # type: ignore[union-attr]
            self._half,
            self._shape,
            self._weights(),
            tokens.data_ptr(),
            features.data_ptr(),
            positions.data_ptr(),
            kv_slots.data_ptr(),
            rows,
            keys.data_ptr(),
            values.data_ptr(),
            len(keys),
            block_tables.data_ptr(),
            width,
            query_offsets.data_ptr(),
            context_lens.data_ptr(),
            requests,
            block_tokens,
            0 if tree_mask is None else tree_mask.data_ptr(),
            0 if tree_mask is None else tree_mask.shape[1],
            self._space(rows),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def chain(
        self,
        hidden: Tensor,
        depth: int,
        positions: Tensor,
        committed: Tensor,
        keys: Tensor,
        values: Tensor,
        block_tables: Tensor,
        block_tokens: int,
        temperatures: Tensor,
        noise_keys: Tensor,
        noise_positions: Tensor,
        *,
        scale: float,
        noise: bool,
    ) -> tuple[Tensor, Tensor]:
        """Draw `depth` tokens per request from the head, each fed back: tokens int64 [R, depth] and log-probs float32
        [R, depth], as from `ops.sample_topk` for k = 1.

        hidden [R, H]: features of the last known position. positions, committed int64 [R]: where the first drafted
        token's row is, in the sequence (positions beyond the last are clamped) and in the request's block table int32
        [R, M]. temperatures float32 [R]; noise_keys, noise_positions int64 [R], of the first drawn token.
        """
        rows, width = block_tables.shape
        self._check(keys, values)
        own = hidden.clone(memory_format=torch.contiguous_format)
        tokens, scores = torch.empty((rows, depth), dtype=torch.int64), torch.empty((rows, depth))
        kernels.eagle_chain(  # type: ignore[union-attr]
            self._half,
            self._shape,
            self._weights(),
            own.data_ptr(),
            positions.data_ptr(),
            committed.data_ptr(),
            rows,
            depth,
            keys.data_ptr(),
            values.data_ptr(),
            len(keys),
            block_tables.data_ptr(),
            width,
            block_tokens,
            temperatures.data_ptr(),
            noise_keys.data_ptr(),
            noise_positions.data_ptr(),
            scale,
            noise,
            self._space(rows),
            tokens.data_ptr(),
            scores.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens, scores

    def _check(self, keys: Tensor, values: Tensor) -> None:
        for cache in (keys, values):
            if cache.shape[1:] != self._cache_shape or not cache.is_contiguous():
                raise ValueError(f"caches must be contiguous [slots, {', '.join(map(str, self._cache_shape))}]")

    def _weights(self) -> object:
        """Built per call: the engine packs the target's head again whenever its weights change."""
        packed = panels_of(self._source)
        return kernels.EagleWeights(  # type: ignore[union-attr]
            self._addresses.data_ptr(),
            self._panels.data_ptr(),
            self._embedding.data_ptr(),
            (self._head if packed is None else packed).data_ptr(),
            packed is not None,
            self._cos.data_ptr(),
            self._sin.data_ptr(),
        )

    def _space(self, rows: int) -> int:
        if rows > self._workspace_rows:
            needed = kernels.eagle_workspace_bytes(self._half, self._shape, rows)  # type: ignore[union-attr]
            self._workspace, self._workspace_rows = torch.empty(needed, dtype=torch.uint8), rows
        return self._workspace.data_ptr()
