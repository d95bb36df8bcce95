"""Weights laid out once for the CPU's matrix kernels, and again after every update. Owns the choice of the kernel.

Batch-invariant mode and float32 use our own kernel's panels (`ops.prepack`). In fast mode bfloat16 goes through oneDNN
with weights in its blocked layout: it has the CPU's bfloat16 instructions, and without its own layout it would convert
the weights in every call (measured here: 2x slower at 1 row, 1.2x at 32). A call costs about 10 microseconds more than
one of ours, so small products stay ours.
"""

import torch
from torch import Tensor, nn

from models import ops
from models.transformer import Projection, Transformer

SMALL_PRODUCT = 1 << 19  # rows x weight elements: 4 rows of a 128 x 1024 projection


class OneDNNProjection(nn.Module):
    """A Projection, for inference, whose weight is also kept in oneDNN's layout. Shares the Projection's parameters."""

    def __init__(self, projection: Projection) -> None:
        super().__init__()
        self.weight, self.bias = projection.weight, projection.bias
        self._blocked: Tensor | None = None

    def pack(self) -> None:
        self._blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        if self.weight.numel() <= SMALL_PRODUCT or ops.is_packed(self.weight):
            ops.prepack(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        if x.shape[0] * self.weight.numel() <= SMALL_PRODUCT:
            return ops.linear(x, self.weight, self.bias, invariant=False)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")
        return y


def pack_weights(model: Transformer) -> None:
    """Call before the first forward and after every change of the parameters. Does nothing on other devices."""
    head = model.embed_tokens.weight
    if head.device.type != "cpu":
        return
    blocked = not model.batch_invariant and head.dtype == torch.bfloat16 and _onednn_has_bfloat16()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if blocked and isinstance(child, Projection):
                child = OneDNNProjection(child)
                setattr(parent, name, child)
            if isinstance(child, OneDNNProjection):
                child.pack()
            elif isinstance(child, Projection):
                ops.prepack(child.weight)
    if model.lm_head is None:
        ops.prepack(head)


def _onednn_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
