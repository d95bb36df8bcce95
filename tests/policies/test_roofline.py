"""The predictor of engine steps: against the measured A100 sweep, and its laws."""

from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tools.a100_sweep import Cell, cells, fitted, relative_error
from benchmarks.tools.qwen import network, qwen
from config.formats import FORMATS
from config.strategy import PLAIN, Strategy
from models.ops.triton.work import WorkList
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import (
    SPLIT_TOKENS,
    Kernel,
    draft_kernels,
    floor_bytes,
    launches,
    listed_attention,
    step_kernels,
)
from policies.roofline.timing import DEFAULT, product_s, step_time, time_of
from tests.policies.networks import NETWORKS

SWEEP = cells()
HELD = [cell for cell in SWEEP if cell not in fitted(SWEEP)]
H100 = DEVICES["H100"]


def errors(found: list[Cell]) -> list[float]:
    return [abs(relative_error(cell)) for cell in found]


def test_decoding_on_the_a100_is_predicted_within_five_percent() -> None:
    decoding = [cell for cell in SWEEP if cell.rows == 1]
    assert len(decoding) == 45
    assert fmean(errors(decoding)) < 0.02
    assert max(errors(decoding)) < 0.05
    assert fmean(errors([cell for cell in HELD if cell.rows == 1])) < 0.02, "cells that nothing was fitted to"


def test_verification_on_the_a100_is_predicted_within_five_percent_on_average() -> None:
    """The draft lengths 7 and 11 were not fitted. What stays: -11 to -14 % at 64 rows of 8 and 16 requests, where bytes
    and flops take equally long; and -14 to -23 % at 4,096 tokens and 32 requests or more, where the sweep's times jump.
    """
    verifying = [cell for cell in SWEEP if cell.rows > 1]
    assert len(verifying) == 178
    assert fmean(errors(verifying)) < 0.05
    assert fmean(errors([cell for cell in HELD if cell.rows > 1])) < 0.05
    far = [cell for cell in verifying if abs(relative_error(cell)) > 0.11]
    assert len(far) == 10
    assert all(cell.batch * cell.rows == 64 or (cell.context == 4096 and cell.batch >= 32) for cell in far)
    assert max(errors(verifying)) < 0.23


def test_attention_with_one_long_context_among_many_takes_what_the_bytes_take() -> None:
    """Issue 32: 7B, 96 running, one at 8,192 tokens, at most 2.5 ms of attention. And the list is what it is for."""
    net = network(qwen("7b"))

    def ms(contexts: list[int]) -> float:
        return time_of([listed_attention(net, contexts)] * net.num_layers, H100).ms - DEFAULT.host_s * 1e3

    bytes_ms = (8192 + 95 * 600) * net.kv_token_bytes / H100.bandwidth_bytes_s * 1e3
    assert bytes_ms < ms([8192, *[600] * 95]) < min(2.5, 1.3 * bytes_ms)
    for contexts in ([8192, *[600] * 95], [32_768], [40] * 7):
        listed = WorkList.of(net.num_heads, net.num_kv_heads, torch.bfloat16)
        walk = listed_attention(net, contexts).walk
        numbers = np.zeros(listed.size(len(contexts), len(contexts), 1), np.int32)
        listed.write(numbers, np.arange(len(contexts) + 1), np.array(contexts), tree=False)
        begins, items = numbers[: listed.programs + 1], numbers[listed.programs + 1 :].reshape(-1, 4)
        shares = [items[a:b, 3].sum() for a, b in pairwise(begins)]
        assert walk is not None
        assert walk.keys == max(shares) * SPLIT_TOKENS
        assert walk.blocks == np.count_nonzero(shares) * net.num_kv_heads


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_ten_launches_a_layer_and_two_a_draw(name: str) -> None:
    net = NETWORKS[name]
    for batch, rows in ((1, 1), (64, 1), (8, 9)):
        kernels = step_kernels(net, batch, rows, 2048)
        around = 1 + 1 + 1 + 2 + 1  # embedding, last norm, head, sampler, packed results
        assert launches(kernels) == 10 * net.num_layers + around
        weights = sum(kernel.product[1] * kernel.product[2] for kernel in kernels if kernel.product)
        norms = (2 * net.num_layers + 1) * net.hidden_size + net.num_layers * net.qkv_bias * net.qkv_size
        assert weights + norms == net.read_parameters


shapes = st.tuples(st.sampled_from(sorted(NETWORKS)), st.integers(1, 128), st.integers(1, 17), st.integers(1, 32_768))


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from(sorted(DEVICES)))
def test_no_step_is_faster_than_its_floor_and_more_work_is_never_faster(
    shape: tuple[str, int, int, int], device_name: str
) -> None:
    name, batch, rows, context = shape
    net, device = NETWORKS[name], DEVICES[device_name]
    context = max(context, rows)
    step = step_time(net, device, batch, rows, context)
    assert step.ms > step.floor_ms > 0
    assert step.ms == pytest.approx(sum(step.by_part_ms.values()) + step.launch_ms + step.host_ms)
    assert step_time(net, device, batch, rows, 2 * context).ms >= step.ms - 1e-9
    assert step_time(net, device, batch, rows, context, eager=True).ms >= step.ms
    twice = replace(device, bandwidth_bytes_s=2 * device.bandwidth_bytes_s, bf16_flops_s=2 * device.bf16_flops_s)
    assert step_time(net, twice, batch, rows, context).ms <= step.ms


def test_the_floor_is_weights_and_cache_once() -> None:
    net = NETWORKS["7b"]
    assert floor_bytes(net, 64, 8192) == net.read_parameters * 2 + 64 * 8192 * 57_344
    assert step_time(net, H100, 1, 1, 1024).floor_ms == pytest.approx(4.24, abs=0.02)


def test_products_cost_whole_tiles_and_waves() -> None:
    """As measured: 257 rows cost as much as 384, and a matrix of few columns leaves multiprocessors idle."""
    device = DEVICES["A100"]
    at_257, at_384 = (product_s(m, 37_888, 3584, device, DEFAULT) for m in (257, 384))
    assert at_257 == pytest.approx(at_384, rel=0.03)
    full = 2.0 * 4096 * 37_888 * 3584 / device.bf16_flops_s
    assert product_s(4096, 37_888, 3584, device, DEFAULT) < 1.15 * full
    assert product_s(128, 3584, 3584, device, DEFAULT) > 1.15 * 2.0 * 128 * 3584 * 3584 / device.bf16_flops_s


def test_drafting_costs_passes_of_networks_only() -> None:
    net = NETWORKS["7b"]
    assert draft_kernels(net, 4, PLAIN, 1024) == []
    assert draft_kernels(net, 4, Strategy("suffix", 8), 1024) == []
    chain, tree = (draft_kernels(net, 4, Strategy.parse(text), 1024) for text in ("eagle:4", "eagle:4x3/12"))
    assert launches(chain) <= 4 * 20, "the budget of a drafted token"
    assert launches(tree) <= 4 * 20


def test_the_self_drafter_passes_its_copy_over_the_targets_keys() -> None:
    net, strategy = NETWORKS["7b"], Strategy("self", 2)
    plain = step_kernels(net, 8, 1, 1024)
    exact, few = (draft_kernels(net, 8, strategy, 1024, copy) for copy in (None, FORMATS["w4a16"]))
    assert launches(exact) == 2 * (launches(plain) - 1) + 1, "a download for all tokens"

    def read(kernels: list[Kernel], part: str) -> int:
        return sum(kernel.read_bytes for kernel in kernels if kernel.part == part)

    assert read(exact, "kv") == read(few, "kv") > 2 * read(plain, "kv"), "the second draw sees one key more"
    assert read(exact, "weights") == 2 * read(plain, "weights")
    saved = 2 * 28 * (net.matrix_parameters * 2 - replace(net, low_bits=FORMATS["w4a16"]).matrices_bytes)
    assert read(exact, "weights") - read(few, "weights") == saved
