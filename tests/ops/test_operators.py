"""The operators `paceline::*` without a GPU: their oracle on CPU, their shapes on meta tensors, who takes them."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from models import ops
from models.ops import reference
from models.ops.triton import LAUNCHES, draft_operators, low_bit_operators, operators, operators_take

T, HQ, HKV, D, V, SLOTS = 5, 4, 2, 8, 61, 64


def arguments(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Of every operator, on CPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = torch.arange(T)
    per_row = (torch.full((T,), -torch.inf), torch.ones(T), rows, rows)
    caches = random(SLOTS, HKV, D), random(SLOTS, HKV, D)
    angles = torch.randn(T, D // 2, generator=generator)
    tables = torch.arange(4, dtype=torch.int32).view(2, 2)
    four = torch.arange(4)
    level = torch.arange(8).view(4, 2), -torch.ones(4, 2), four.view(2, 2), -torch.ones(2, 2)
    nodes = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6)
    eyes = torch.eye(2, dtype=torch.uint8).expand(2, 2, 2)
    few_bits = torch.randint(-127, 128, (T, 16), generator=generator).to(torch.int8), torch.rand(T, 1)
    weight = torch.randint(-127, 128, (24, 16), generator=generator).to(torch.int8), torch.rand(24, 1)
    lengths = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([7, 5], dtype=torch.int32)
    return {
        "rms_norm": (random(T, 16), random(16), 1e-6),
        "add_rms_norm": (random(T, 16), random(T, 16), random(16), 1e-6),
        "rope_write": (random(T, (HQ + 2 * HKV) * D), angles, angles, rows, rows, random(D), random(D), 1e-6, *caches),
        "swiglu": (random(T, 32),),
        "paged_attention": (random(T, HQ, D), *caches, tables, *lengths, None, 16, 4, 32, 0.3),
        "linear": (random(T, 16), random(24, 16), random(24), False),
        "head": (random(T, 16), random(24, 16)),
        "sample": (random(T, V), *per_row),
        "sample_topk": (random(T, V), *per_row, 3, 1.0, True),
        "cutoff": (random(T, V), torch.ones(T), torch.zeros(T, dtype=torch.int64), torch.full((T,), 0.9)),
        "draft_inputs": (rows, random(V, 16), random(T, 16), random(16), random(16), 1e-6),
        "tree_feed": (*level, 2, 2, random(2, 2, 16), four.view(2, 2), random(2, 2, 16), eyes, *nodes),
        "tree_best": (*level, 2, *nodes, *(x[:, :3].clone() for x in nodes)),
        "quantise_tokens": (random(T, 16), torch.int8),
        "add_norm_quantise": (random(T, 16), random(T, 16), random(16), 1e-6, torch.int8),
        "swiglu_quantise": (random(T, 32), torch.int8),
        "low_bit_linear": (*few_bits, *weight, None, random(24), dtype),
    }


def operator_named(name: str) -> Any:
    return next(getattr(of, name) for of in (operators, draft_operators, low_bit_operators) if hasattr(of, name))


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result or ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAUNCHES)
def test_shapes_on_meta_tensors_are_those_of_the_oracle(name: str, dtype: torch.dtype) -> None:
    given = arguments(dtype)[name]
    operator = operator_named(name)
    on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
    for found, expected in zip(tensors(operator(*on_meta)), tensors(operator(*given)), strict=True):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_rope_write_is_split_and_write() -> None:
    qkv, cos, sin, positions, slots, q_norm, k_norm, eps, *caches = arguments(torch.float32)["rope_write"]
    slots = slots + 11
    mine, theirs = [x.clone() for x in caches], [x.clone() for x in caches]
    q = ops.rope_write(qkv, cos, sin, positions, slots, q_norm, k_norm, eps, *mine)
    expected = reference.rope_write(qkv, cos, sin, positions, slots, q_norm, k_norm, eps, *theirs)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(mine[1][slots], qkv.view(T, -1, D)[:, -HKV:])


def test_attention_leaves_padding_rows_zero_and_skips_requests_without_rows() -> None:
    q, k, v, tables, _, contexts, mask, *rest = arguments(torch.float32)["paged_attention"]
    some = operators.paged_attention(q, k, v, tables, torch.tensor([0, 3, 3], dtype=torch.int32), contexts, mask, *rest)
    assert not some[3:].any()
    alone = operators.paged_attention(
        q[:3], k, v, tables[:1], torch.tensor([0, 3], dtype=torch.int32), contexts[:1], mask, *rest
    )
    torch.testing.assert_close(some[:3], alone)
    with pytest.raises(ValueError, match="max_query=2"):
        operators.paged_attention(
            q, k, v, tables, torch.tensor([0, 3, 3], dtype=torch.int32), contexts, mask, 16, 2, 32, 0.3
        )


def test_operators_leave_cpu_gradients_and_other_dtypes_alone() -> None:
    x = torch.zeros(2, 3, device="meta")
    assert operators_take(x)
    assert operators_take(x, x)
    assert not operators_take(torch.zeros(2))
    assert not operators_take(x.double())
    assert not operators_take(x, x.bfloat16())
    assert not operators_take(x, x.clone().requires_grad_())
    with torch.no_grad():
        assert operators_take(x, x.clone().requires_grad_())


def test_without_triton_cuda_computes_the_oracle_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operators.installed.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    x, weight = torch.randn(2, 3), torch.randn(3)
    try:
        for _ in range(2):
            found = operators.launched("rms_norm", "launch", reference.rms_norm)(x, weight, 1e-6)
            assert torch.equal(found, reference.rms_norm(x, weight, 1e-6))
    finally:
        operators.installed.cache_clear()
    assert caplog.text.count("Triton is not installed") == 1


def test_importing_the_operations_imports_no_triton() -> None:
    code = "import sys, models.ops; assert 'triton' not in sys.modules, 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_head_keeps_its_sums_in_float32_on_devices_and_the_weights_dtype_on_cpu() -> None:
    hidden, weight = (x.bfloat16() for x in (torch.randn(3, 8), torch.randn(5, 8)))
    assert ops.head(hidden, weight, invariant=False).dtype is torch.bfloat16
    assert ops.head(hidden.to("meta"), weight.to("meta"), invariant=False).dtype is torch.float32
    leaf = weight.to("meta").requires_grad_()
    ops.head(hidden.to("meta"), leaf, invariant=False).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype is torch.bfloat16
