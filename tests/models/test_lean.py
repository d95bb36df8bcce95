"""Gradients that keep only inputs, against autograd through the oracle, on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.ops import lean, reference

T, D = 7, 24
OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: lean.rms_norm(x, w, 1e-6), lambda x, w: reference.rms_norm(x, w, 1e-6), [(T, D), (D,)]),
    "rms_norm of heads": (
        lambda x, w: lean.rms_norm(x, w, 1e-6),
        lambda x, w: reference.rms_norm(x, w, 1e-6),
        [(T, 3, D), (D,)],
    ),
    "swiglu": (lean.swiglu, reference.swiglu, [(T, 2 * D)]),
    "rotation": (
        lambda x: lean.apply_rope(x, *angles()),
        lambda x: reference.apply_rope(x, *angles()),
        [(T, 3, D)],
    ),
}


def angles() -> tuple[Tensor, Tensor]:
    turned = torch.arange(T * D // 2).view(T, D // 2).float()
    return turned.cos(), turned.sin()


def computed(function: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    out = function(*inputs)
    assert out.dtype is dtype
    grads = torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).to(dtype))
    assert [g.dtype for g in grads] == [dtype] * len(shapes)
    return [x.detach().float() for x in (out, *grads)]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_autograds(name: str, dtype: torch.dtype) -> None:
    ours, theirs, shapes = OPERATIONS[name]
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for one, other in zip(computed(ours, shapes, dtype), computed(theirs, shapes, dtype), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, shapes = OPERATIONS["swiglu"]
    whole = computed(ours, shapes, torch.float32)
    monkeypatch.setattr(lean, "_CHUNK", 3 * D)
    assert all(torch.equal(*pair) for pair in zip(computed(ours, shapes, torch.float32), whole, strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_only_inputs_are_kept_and_none_is_changed(name: str) -> None:
    ours, _, shapes = OPERATIONS[name]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    before = [x.detach().clone() for x in inputs]
    known = {x.data_ptr() for x in inputs}
    extra: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Any:
        if x.data_ptr() not in known:
            extra.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = ours(*inputs)
    out.sum().backward()
    assert extra == ([(T, D // 2)] * 2 if name == "rotation" else [])
    for x, was in zip(inputs, before, strict=True):
        assert torch.equal(x.detach(), was)
