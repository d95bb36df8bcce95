"""Triton's interpreter, made faithful: kernels run on CPU tensors, operation by operation, in numpy.

Import this before anything imports Triton in the process, or have TRITON_INTERPRET=1 from its start. What it mends in
Triton 3.6: scalars as loop bounds with numpy 2.4, bfloat16 rounding (it truncated), dot products and differences (it
took the bits for integers), the same of float8_e4m3fn, integer dot products (numpy's are slow: in float64 they are as
exact), the order of a dot product's sums (`product`), fused multiply-adds (it rounded twice), inline PTX (`ptx`; it had
none), and its speed.
What it cannot show: the order in which a GPU sums.
"""

import os
from types import SimpleNamespace
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


def ptx(asm: str, registers: dict[str, Any]) -> dict[str, Any]:
    """Run PTX of a few operations on 32-bit registers (uint32 arrays), as its manual defines them."""
    registers = dict(registers)

    def value(operand: str) -> Any:
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for line in filter(None, (line.strip(" {};") for line in asm.splitlines())):
        name, _, operands = line.partition(" ")
        if name == ".reg":
            continue
        target, *given = (operand.strip() for operand in operands.split(","))
        a, b, *rest = map(value, given)
        if name == "prmt.b32":  # each of four bytes by its number in both inputs
            both = [(word >> np.uint32(8 * byte)) & np.uint32(255) for word in (a, b) for byte in range(4)]
            chosen = [both[int(rest[0]) >> 4 * place & 7] << np.uint32(8 * place) for place in range(4)]
            assert not int(rest[0]) & 0x8888, "signs are not repeated"
            registers[target] = chosen[0] | chosen[1] | chosen[2] | chosen[3]
        elif name == "shr.b32":
            registers[target] = a >> b
        elif name == "sub.u32":
            registers[target] = a - b
        elif name == "xor.b32":
            registers[target] = a ^ b
        elif name == "lop3.b32":  # bit (4 a + 2 b + c) of a table
            registers[target] = np.uint32(0)
            for case in (case for case in range(8) if int(rest[1]) >> case & 1):
                parts = (word if case & bit else ~word for word, bit in zip((a, b, rest[0]), (4, 2, 1), strict=True))
                registers[target] |= np.bitwise_and.reduce(np.broadcast_arrays(*parts))
        else:
            raise NotImplementedError(name)
    return registers


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

    def create_fsub(self: Any, left: Any, right: Any) -> Any:
        if left.dtype.scalar != bf16:
            return self.binary_op(left, right, np.subtract)
        return _HANDLE(_rounded(_widened(left.data) - _widened(right.data)), bf16)

    def create_inline_asm(self: Any, asm: Any, constraints: Any, values: Any, kinds: Any, pure: Any, pack: int) -> Any:
        """Inputs of bytes, packed by four; outputs of one or two bytes."""
        shape, given = values[0].data.shape, len(kinds)
        if kinds[0].scalar.primitive_bitwidth == 16:
            given *= 2
        words = [np.ascontiguousarray(value.data).reshape(-1).view(np.uint32) for value in values]
        found = ptx(asm, {f"${given + place}": word for place, word in enumerate(words)})
        each = given // len(kinds)
        results = []
        for place, kind in enumerate(kinds):
            registers = np.stack([found[f"${each * place + i}"] for i in range(each)], 1)
            data = registers.reshape(-1).view(get_np_dtype(kind)).reshape(shape)
            results.append(_HANDLE(data, kind.scalar))
        return SimpleNamespace(get_result=results.__getitem__)

    np_dtype, kinds, blocks = triton_interpreter._get_np_dtype, dict[str, Any](), dict[Any, Any]()

    def get_np_dtype(kind: Any) -> Any:
        """Triton's table is made anew at every call."""
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if scalar.name not in kinds:
            kinds[scalar.name] = np_dtype(scalar)
        return kinds[scalar.name]

    def block_of(element: Any, shape: Any) -> Any:
        """The type of blocks, made once: it never changes."""
        key = element.name, *shape
        if key not in blocks:
            blocks[key] = tl.block_type(element, shape)
        return blocks[key]

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
    triton_interpreter._get_np_dtype = get_np_dtype
    tl.block_type.with_element_ty = lambda self, element: block_of(element, self.shape)
    _BUILDER.get_block_ty = lambda self, element, shape: block_of(element, shape)
    triton_interpreter._patch_lang_tensor = patch_lang_tensor
    _BUILDER.create_dot, _BUILDER.create_fma = create_dot, create_fma
    _BUILDER.create_fsub, _BUILDER.create_inline_asm = create_fsub, create_inline_asm


_patch()
