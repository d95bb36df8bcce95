"""A chain of drafts by a copy of the target in one native call: stack, head and draw, once per token.

Holds the head's address and the workspace. The kernels are those of the separate operations, so tokens are bitwise
those of `DecoderStack`, `ops.linear` or `ops.low_bit_linear`, and `ops.sample` in turn. Never differentiable.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from models.low_bit import LowBitWeight
from models.ops.low_bit import low_bit_panels, packable
from models.ops.matmul import panels_of
from models.ops.native import kernels
from models.ops.stack import DecoderStack, StackLayer

Numbers = NDArray[Any]


class DraftChain(DecoderStack):
    """A decoder stack and its head [V, H]: in the stack's dtype, packed or not, or in eight bits.

    Raises ValueError if no kernel supports them (check `supports` first).
    """

    def __init__(
        self,
        layers: Sequence[StackLayer],
        embedding: Tensor,
        final_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        head: Tensor | LowBitWeight,
        *,
        query_heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        super().__init__(layers, embedding, final_norm, cos, sin, query_heads=query_heads, kv_heads=kv_heads, eps=eps)
        if isinstance(head, LowBitWeight):
            fits = packable(head) and head.format.container_bits == 8
            shape: tuple[int, ...] = head.outputs, head.inputs
        else:
            fits, shape = head.dtype is embedding.dtype and head.is_contiguous(), head.shape
        if not fits or shape != embedding.shape:
            raise ValueError(f"the head must be {list(embedding.shape)} of {embedding.dtype}, or in eight bits")
        self._head = head
        self._space, self._space_rows = torch.empty(0, dtype=torch.uint8), 0

    @staticmethod
    def supports(weight: Tensor, head_dim: int) -> bool:
        """Return whether a kernel supports such weights (older builds of the extension have none)."""
        return DecoderStack.supports(weight, head_dim) and hasattr(kernels, "draft_chain")

    def draft(
        self,
        depth: int,
        slots: Numbers,
        lengths: Numbers,
        prompt_lengths: Numbers,
        counts: Numbers,
        history: Numbers,
        block_tables: Numbers,
        block_tokens: int,
        k_cache: Tensor,
        v_cache: Tensor,
        temperatures: Numbers,
        top_k: Numbers,
        top_p: Numbers,
        noise_keys: Numbers,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Return tokens int64 [R, depth]: the first counts[r] <= depth entries of request r are drafted, the rest are
        -1.

        slots, lengths, prompt_lengths, counts, top_k, noise_keys int64 [R]; temperatures, top_p float32 [R]. history
        int32 [slots, W] and block_tables int32 [slots, M] are the engine's, by slot; caches [layers, KV slots, Hkv, D]:
        K/V of the positions lengths - 1 .. lengths + counts - 2 are written. The draw behind position p has the noise
        position p + 1 - prompt_lengths. With top-k or top-p the kept set equals `ops.cutoff`'s up to the rounding of a
        sum. logits [R, depth, V] of the weights' dtype: output for the logits that were drawn from. Raises IndexError
        for an entry outside its table.
        """
        requests = len(slots)
        whole = slots, lengths, prompt_lengths, counts, top_k, noise_keys
        for kind, arrays in (("int64", whole), ("float32", (temperatures, top_p))):
            for array in arrays:
                if array.shape != (requests,) or array.dtype != kind or not array.flags.c_contiguous:
                    raise ValueError(
                        f"what stands per request must be {kind} [{requests}], got {array.dtype} {list(array.shape)}"
                    )
        for name, table in (("history", history), ("block_tables", block_tables)):
            if table.dtype != "int32" or table.ndim != 2 or not table.flags.c_contiguous:
                raise ValueError(f"{name} must be int32 [slots, n]")
        if len(history) != len(block_tables):
            raise ValueError(f"{len(history)} slots of history and {len(block_tables)} block tables")
        self._check_caches(k_cache, v_cache)
        vocab = self._embedding.shape[0]
        if logits is not None and (
            logits.shape != (requests, depth, vocab)
            or logits.dtype is not self._embedding.dtype
            or not logits.is_contiguous()
        ):
            raise ValueError(f"logits must be [{requests}, {depth}, {vocab}] of {self._embedding.dtype}")
        self.refresh_changed()
        if isinstance(self._head, LowBitWeight):
            head, bits, packed = low_bit_panels(self._head), 8, True
        else:
            panels = panels_of(self._head)
            head, bits, packed = (self._head, 0, False) if panels is None else (panels, 0, True)
        if requests > self._space_rows:
            needed = kernels.draft_chain_workspace_bytes(self._half, self._shape, requests)  # type: ignore[union-attr]
            self._space, self._space_rows = torch.empty(needed, dtype=torch.uint8), requests
        tokens = torch.empty((requests, depth), dtype=torch.int64)
        kernels.draft_chain(  # type: ignore[union-attr]
            self._half,
            self._shape,
            self._addresses.data_ptr(),
            self._embedding.data_ptr(),
            self._final_norm.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            head.data_ptr(),
            bits,
            packed,
            requests,
            depth,
            slots.ctypes.data,
            lengths.ctypes.data,
            prompt_lengths.ctypes.data,
            counts.ctypes.data,
            history.ctypes.data,
            history.shape[1],
            block_tables.ctypes.data,
            *block_tables.shape,
            block_tokens,
            k_cache.shape[1],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            temperatures.ctypes.data,
            top_p.ctypes.data,
            top_k.ctypes.data,
            noise_keys.ctypes.data,
            0 if logits is None else logits.data_ptr(),
            self._space.data_ptr(),
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens
