"""Operations on one token at a time: RMS norm, SwiGLU, rotary embedding, writing the KV cache.

Each is batch-invariant and computes in float32, rounding once to the storage dtype.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.ops import lean, reference
from models.ops.native import as_float32, dense_rows, kernels, takes
from models.ops.triton import operators
from models.ops.triton.operators import operators_take

_BF16 = torch.bfloat16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D] -> [..., D], in x's dtype. Differentiable."""
    if operators_take(x, weight):
        normed: Tensor = operators.rms_norm(x, weight, eps)
        return normed
    if lean.wanted(x, weight):
        return lean.rms_norm(x, weight, eps)
    if not takes(x, weight):
        return reference.rms_norm(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _apply(_RMSNorm, x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [..., D]: bitwise the two separate operations. Differentiable."""
    if x.shape == residual.shape and operators_take(x, residual, weight):
        both: tuple[Tensor, Tensor] = operators.add_rms_norm(x, residual, weight, eps)
        return both
    grad = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad or weight.requires_grad)
    if grad or not takes(x, residual, weight) or x.shape != residual.shape:
        total = x + residual
        return rms_norm(total, weight, eps), total
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    width = _width(x, weight)
    out, total = torch.empty_like(x), torch.empty_like(x)
    kernels.add_rms_norm(  # type: ignore[union-attr]
        x.dtype is _BF16,
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // width,
        width,
        eps,
    )
    return out, total


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: silu(first half) * second half. Differentiable."""
    if operators_take(gate_up):
        gated: Tensor = operators.swiglu(gate_up)
        return gated
    if lean.wanted(gate_up):
        return lean.swiglu(gate_up)
    if not takes(gate_up):
        return reference.swiglu(gate_up)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _apply(_SwiGLU, gate_up)
    return _swiglu(gate_up)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of x [T, H, D] by the angles of cos, sin [T, D/2] (Hugging Face's rotate_half).

    Differentiable in x only.
    """
    if lean.wanted(x):
        return lean.apply_rope(x, cos, sin)
    if not takes(x):
        return reference.apply_rope(x, cos, sin)
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply(_Rope, x, cos, sin)
    return _rope(x, cos, sin, inverse=False)


def split_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection [T, (Hq + 2 Hkv) D] into q [T, Hq, D], k, v [T, Hkv, D]; norm (if given) and rotate q
    and k.

    v may be a view of qkv. Bitwise `rms_norm` then `apply_rope` on the parts. Differentiable.
    """
    rows, head_dim = qkv.shape[0], qkv.shape[1] // (query_heads + 2 * kv_heads)
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    grad = torch.is_grad_enabled() and (qkv.requires_grad or any(weight.requires_grad for weight in norms))
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm come together or not at all")
    if grad and not norms and takes(qkv):
        whole: tuple[Tensor, Tensor, Tensor] = _SplitQkv.apply(qkv, cos, sin, query_heads, kv_heads)  # type: ignore[no-untyped-call]
        return whole
    if grad or not takes(qkv, *norms) or qkv.stride(1) != 1:
        parts = qkv.view(rows, query_heads + 2 * kv_heads, head_dim)
        q, k = parts[:, :query_heads], parts[:, query_heads : query_heads + kv_heads]
        q = q if q_norm is None else rms_norm(q, q_norm, eps)
        k = k if k_norm is None else rms_norm(k, k_norm, eps)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), parts[:, query_heads + kv_heads :]
    cos, sin = _angles(cos, sin, rows, head_dim)
    q, k = qkv.new_empty((rows, query_heads, head_dim)), qkv.new_empty((rows, kv_heads, head_dim))
    stride = qkv.stride(0)
    kernels.split_qkv(  # type: ignore[union-attr]
        qkv.dtype is _BF16,
        qkv.data_ptr(),
        stride,
        cos.data_ptr(),
        sin.data_ptr(),
        0 if q_norm is None else _head_weight(q_norm, head_dim),
        0 if k_norm is None else _head_weight(k_norm, head_dim),
        eps,
        q.data_ptr(),
        k.data_ptr(),
        rows,
        query_heads,
        kv_heads,
        head_dim,
    )
    offset = qkv.storage_offset() + (query_heads + kv_heads) * head_dim
    return q, k, qkv.as_strided((rows, kv_heads, head_dim), (stride, head_dim, 1), offset)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Set k_cache[slots[t]] = k[t], and v_cache likewise. k, v [T, Hkv, D]; caches [slots, Hkv, D]; slots int64 [T],
    distinct.

    Raises IndexError (CPU) for a slot outside the cache.
    """
    whole = k_cache.is_contiguous() and v_cache.is_contiguous() and slots.dtype is torch.int64 and slots.is_contiguous()
    if not whole or not takes(k, v, k_cache, v_cache):
        reference.write_kv(k, v, k_cache, v_cache, slots)
        return
    if k.shape[1:] != k_cache.shape[1:] or k.shape != v.shape or k_cache.shape != v_cache.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of {tuple(k_cache.shape)}")
    if slots.shape[0] != k.shape[0]:
        raise ValueError(f"{slots.shape[0]} slots for {k.shape[0]} tokens")
    k, v = dense_rows(k), dense_rows(v)
    kernels.write_kv(  # type: ignore[union-attr]
        k.dtype is _BF16,
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        k.shape[0],
        k.shape[1] * k.shape[2],
        k_cache.shape[0],
    )


def rope_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """`split_qkv`, then `write_kv`, in one kernel on CUDA: returns q [T, Hq, D], writes keys and values to the caches.

    qkv [T, (Hq + 2 Hkv) D]; cos, sin float32 [P, D/2], the angles of every position (`models.rope.RopeTable.table`);
    positions, kv_slots int64 [T]; norm weights [D] or both None; caches [slots, Hkv, D]. No gradient.
    """
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    if operators_take(qkv, k_cache, v_cache, *norms):
        rotated: Tensor = operators.rope_write(
            qkv, cos, sin, positions, kv_slots, q_norm, k_norm, eps, k_cache, v_cache
        )
        return rotated
    kv_heads, head_dim = k_cache.shape[1:]
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    cos, sin = cos.index_select(0, positions), sin.index_select(0, positions)
    q, k, v = split_qkv(qkv, cos, sin, query_heads, kv_heads, q_norm, k_norm, eps)
    write_kv(k, v, k_cache, v_cache, kv_slots)
    return q


def _width(x: Tensor, weight: Tensor) -> int:
    width = x.shape[-1]
    if weight.shape != (width,):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {width}")
    return width


def _head_weight(weight: Tensor, head_dim: int) -> int:
    if weight.shape != (head_dim,) or not weight.is_contiguous():
        raise ValueError(f"a head's norm weight must be contiguous [{head_dim}], got {tuple(weight.shape)}")
    return weight.data_ptr()


def _angles(cos: Tensor, sin: Tensor, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    if cos.shape != (rows, head_dim // 2) or cos.shape != sin.shape:
        raise ValueError(f"cos and sin must be [{rows}, {head_dim // 2}], got {tuple(cos.shape)}, {tuple(sin.shape)}")
    return as_float32(cos), as_float32(sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    width = _width(x, weight)
    out = torch.empty_like(x)
    rows = x.numel() // width
    kernels.rms_norm(  # type: ignore[union-attr]
        x.dtype is _BF16, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, torch.get_num_threads()
    )
    return out


def _swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    kernels.swiglu(  # type: ignore[union-attr]
        gate_up.dtype is _BF16, gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()
    )
    return out


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    x = dense_rows(x)
    rows, heads, head_dim = x.shape
    cos, sin = _angles(cos, sin, rows, head_dim)
    out = x.new_empty((rows, heads, head_dim))
    kernels.rope(  # type: ignore[union-attr]
        x.dtype is _BF16,
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        head_dim,
        inverse,
        torch.get_num_threads(),
    )
    return out


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        width = weight.shape[0]
        grad_x, grad_weight = torch.empty_like(x), torch.empty(width, dtype=torch.float32)
        kernels.rms_norm_backward(  # type: ignore[union-attr]
            x.dtype is _BF16,
            grad.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            grad_x.data_ptr(),
            grad_weight.data_ptr(),
            x.numel() // width,
            width,
            ctx.eps,
            torch.get_num_threads(),
        )
        return grad_x, grad_weight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad, result = grad.contiguous(), torch.empty_like(gate_up)
        kernels.swiglu_backward(  # type: ignore[union-attr]
            gate_up.dtype is _BF16,
            grad.data_ptr(),
            gate_up.data_ptr(),
            result.data_ptr(),
            gate_up.shape[0],
            gate_up.shape[1] // 2,
            torch.get_num_threads(),
        )
        return result


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rope(x, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rope(grad, cos, sin, inverse=True), None, None


class _SplitQkv(torch.autograd.Function):
    """Without norms. The gradients of the three parts are joined, where torch's views would each fill a whole one."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, query_heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        heads = query_heads + 2 * kv_heads
        parts = qkv.view(qkv.shape[0], heads, qkv.shape[1] // heads)
        q, k, v = torch.split(parts, [query_heads, kv_heads, kv_heads], dim=1)
        return _rope(q, cos, sin, inverse=False), _rope(k, cos, sin, inverse=False), v.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_q: Tensor, for_k: Tensor, for_v: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        turned = (_rope(part, cos, sin, inverse=True) for part in (for_q, for_k))
        return torch.cat((*turned, for_v), dim=1).flatten(1), None, None, None, None
