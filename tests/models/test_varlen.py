"""Packed attention as CUDA computes it, on the CPU: torch's variable-length attention over an oracle of its kernel, and
groups of similar lengths; what padding costs; which of the two is chosen."""

import gzip
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.training.packing import plan_packed
from models.ops import Segments, reference, varlen
from models.ops.segments import LEAST_WIDTH, MAX_PADDED_WORK, similar_lengths
from tests.models import flash_oracle

CPU = torch.device("cpu")
RAGGED = [
    [1],
    [0, 1, 0],
    [5, 0, 130, 1, 129, 64],
    [200, 1, 1, 1, 7, 190],
    list(range(12)),
]
REAL = Path(__file__).parents[3] / "shared" / "data" / "rollouts_qwen25math_100x8.jsonl.gz"
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Segments, float], Tensor]


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    varlen.variable_length.cache_clear()
    yield
    varlen.variable_length.cache_clear()


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The signature of torch 2.11: no `enable_gqa`, heads may differ."""
    return torch.nn.attention.varlen.varlen_attn(  # type: ignore[return-value]
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def grouped(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, segments: Segments, scale: float) -> Tensor:
    return varlen.grouped_attention(q, k, v, segments.groups_on(CPU), scale)


def oracle(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, segments: Segments, scale: float) -> Tensor:
    return reference.packed_attention(q, k, v, offsets, scale)


def results(attend: Attend, lengths: list[int], dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    """Output and gradients, in float32."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows, dim = sum(lengths), 16
    q, k, v = (
        torch.randn(rows, h, dim, generator=generator).to(dtype).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    )
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    out = attend(q, k, v, offsets, Segments(lengths), 0.3)
    grad = torch.randn(rows, heads[0], dim, generator=generator).to(dtype)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, (q, k, v), grad))]


def assert_near(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("signature", ["installed", "2.11"])
def test_torchs_variable_lengths_equal_the_oracle(
    signature: str, heads: tuple[int, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if signature == "2.11":
        monkeypatch.setattr(varlen, "_varlen_attn", lambda: varlen_attn_2_11)
    with flash_oracle.installed():
        assert varlen.variable_length(CPU, torch.bfloat16, *heads, 16) is not None
        found = results(varlen.packed_attention, lengths, torch.bfloat16, heads)
    assert_near(found, results(oracle, lengths, torch.bfloat16, heads), 0.02)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_similar_lengths_equal_the_oracle(
    dtype: torch.dtype, heads: tuple[int, int], lengths: list[int]
) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert_near(results(grouped, lengths, dtype, heads), results(oracle, lengths, dtype, heads), tolerance)


def test_float32_takes_groups_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lengths = RAGGED[2]
    found = results(varlen.packed_attention, lengths, torch.float32)
    assert_near(found, results(oracle, lengths, torch.float32), 1e-5)
    assert not caplog.records


@pytest.mark.parametrize("fault", ["missing", "refuses", "wrong", "wrong gradient"])
def test_without_a_sound_kernel_groups_are_taken_and_the_log_says_why_once(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise ImportError("no such module")

    def broken(*arguments: Any, **options: Any) -> Tensor:
        q, k, v = arguments[:3]
        if fault == "refuses":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")
        group = q.shape[1] // k.shape[1]
        values = v.repeat_interleave(group, 1)
        out = reference.packed_attention(q, k, v, arguments[3], options["scale"])
        return out + 0.1 * values if fault == "wrong" else out + (values - values.detach())

    monkeypatch.setattr(varlen, "_varlen_attn", missing if fault == "missing" else lambda: broken)
    lengths = RAGGED[2]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = results(varlen.packed_attention, lengths, torch.bfloat16)
    assert_near(found, results(oracle, lengths, torch.bfloat16), 0.02)
    (record,) = caplog.records
    assert "padded in groups" in record.getMessage()
    wanted = {"missing": "no such module", "refuses": "Ampere GPUs or newer.)"}.get(fault, "it is wrong by")
    assert wanted in record.getMessage()


def work(lengths: list[int]) -> int:
    """Of padded attention by groups, with tiles of LEAST_WIDTH."""
    return sum(len(group) * max(LEAST_WIDTH, lengths[group[0]]) ** 2 for group in similar_lengths(lengths))


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), max_size=200))
@settings(deadline=None)
def test_padding_costs_little_whatever_the_lengths(lengths: list[int]) -> None:
    groups = similar_lengths(lengths)
    assert sorted(i for group in groups for i in group) == [i for i, length in enumerate(lengths) if length]
    assert all(lengths[group[0]] == max(lengths[i] for i in group) for group in groups)
    assert work(lengths) <= MAX_PADDED_WORK * sum(max(LEAST_WIDTH, length) ** 2 for length in lengths if length)
    # Each group ends 1.14 times below the one before it, or holds segments that no group before it had room for.
    assert len(groups) <= 45
    rows = Segments(lengths).groups_on(CPU)
    assert sum(count * width for count, width in rows.shapes) == len(rows.rows)
    assert rows.rows[rows.places].tolist() == list(range(sum(lengths)))


@pytest.mark.skipif(not REAL.exists(), reason="the shared data of real rollouts is not here")
def test_padding_costs_little_for_real_rollouts() -> None:
    """8 ranks, micro-batches of 16,384 tokens, lengths estimated at 3.2 characters a token: padding to the longest does
    several times the work."""
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    lengths = [int((len(r["prompt"]) + len(text)) / 3.2) + 1 for r in records for text in r["samples"]]
    once, padded, by_groups, counts = 0, 0, 0, []
    for rank in plan_packed(lengths, budget_tokens=16_384, ranks=8):
        for micro in rank:
            own = [lengths[i] for i in micro]
            once += sum(n * n for n in own)
            padded += len(own) * max(own) ** 2
            by_groups += sum(len(group) * own[group[0]] ** 2 for group in similar_lengths(own))
            counts.append(len(similar_lengths(own)))
    print(f"to the longest {padded / once:.2f}, in groups {by_groups / once:.3f}, groups {np.mean(counts):.1f}")
    assert by_groups <= MAX_PADDED_WORK * once
    assert padded > 3 * once
