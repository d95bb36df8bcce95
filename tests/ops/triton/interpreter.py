"""Triton's interpreter, made faithful: kernels run on CPU tensors, operation by operation, in numpy.

Import this before anything imports Triton in the process, or have TRITON_INTERPRET=1 from its start. What it mends in
Triton 3.6: scalars as loop bounds with numpy 2.4, bfloat16 rounding (it truncated) and dot products (it multiplied the
bits as integers), the same of float8_e4m3fn, integer dot products (numpy's are slow: in float64 they are as exact),
the order of a dot product's sums (`product`), fused multiply-adds (it rounded twice), and its speed.
What it cannot show: the order in which a GPU sums.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

if type(tl.max).__name__ != "InterpretedFunction":
    raise RuntimeError("Triton was imported too early, with TRITON_INTERPRET unset: tests/conftest.py sets it first")
_HANDLE: Any = triton_interpreter.TensorHandle
_BUILDER: Any = triton_interpreter.InterpreterBuilder


def _widened(data: Any) -> Any:
    """float32 of bfloat16 bits."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def _rounded(data: Any) -> Any:
    """bfloat16 bits of float32, to nearest even."""
    values = torch.from_numpy(np.ascontiguousarray(data))
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def _widened_fp8(data: Any) -> Any:
    """float32 of float8_e4m3fn bits."""
    return torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()


def _rounded_fp8(data: Any) -> Any:
    """float8_e4m3fn bits of float32, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def product(left: Any, right: Any, dtype: Any) -> Any:
    """Multiply float arrays [..., rows, depth] and [..., depth, columns], summing in `dtype` in the order of depth.

    An element's bits follow from its row and its column only. numpy's matmul is BLAS: other kernels on other CPUs.
    In OpenBLAS's for Haswell and Zen a row's bits also follow from how many rows are beside it.
    """
    left, right = left.astype(dtype, copy=False), np.ascontiguousarray(right, dtype)
    total = np.zeros((*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1]), dtype)
    term = np.empty_like(total)
    for k in range(left.shape[-1]):
        np.multiply(left[..., k, None], right[..., k, None, :], out=term)
        np.add(total, term, out=total)
    return total


def _patch() -> None:
    convert, lang_tensor, bf16, fp8, f32 = (
        triton_interpreter._convert_float,
        triton_interpreter._patch_lang_tensor,
        tl.bfloat16,
        tl.float8e4nv,
        tl.float32,
    )

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == bf16 and target == f32:
            return _widened(data)
        if source == f32 and target == bf16:
            return _rounded(data)
        if source == fp8 and target == f32:
            return _widened_fp8(data)
        if source == f32 and target == fp8:
            return _rounded_fp8(data)
        return convert(data, source, target, rounding)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if d.dtype.scalar == tl.int32:
            exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return _HANDLE(exact.astype(np.int32) + d.data, d.dtype.scalar)
        wide = {bf16: _widened, fp8: _widened_fp8}
        left, right = (wide[x.dtype.scalar](x.data) if x.dtype.scalar in wide else x.data for x in (a, b))
        return _HANDLE(product(left, right, d.data.dtype) + d.data, d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return _HANDLE(wide.astype(x.data.dtype), z.dtype.scalar)

    # Every call inside a kernel patched the language anew: nearly all of its time. Once per module will do.
    run, patched = triton_interpreter.GridExecutor.__call__, set[str]()

    def run_grid(self: Any, *arguments: Any, **keywords: Any) -> None:
        patched.clear()
        with np.errstate(all="ignore"):  # a GPU warns of nothing
            run(self, *arguments, **keywords)

    def call_inside(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = self.fn.__globals__["__name__"]
        if module not in patched:
            triton_interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*arguments, **keywords)

    triton_interpreter.GridExecutor.__call__ = run_grid
    triton_interpreter.InterpretedFunction.__call__ = call_inside
    triton_interpreter._convert_float = convert_float
    triton_interpreter._patch_lang_tensor = patch_lang_tensor
    _BUILDER.create_dot, _BUILDER.create_fma = create_dot, create_fma


_patch()
