"""The predictor's list of kernels is what the CUDA step launches; and what it says of few bits."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.tools.qwen import QWEN, network, qwen
from config.formats import FORMATS
from config.strategy import Strategy
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import draft_kernels, floor_bytes, launches, step_kernels
from policies.roofline.timing import DEFAULT, StepTime, step_time, time_of
from tests.policies.engine_trace import traced_chain, traced_step

QUANTIZATIONS = ("none", "w8a8", "fp8", "w4a8", "w4a16")
MARLIN_MS = {1: 4.362, 8: 4.774, 32: 7.178}  # a token by the A100 sweep's drafter: vLLM's kernel of four bits
NAMES = {"embedding": "embed", "addmm": "product", "mm": "product", "linear": "product", "cat": "pack"}
NAMES |= {"low_bit_linear": "product"}
PRODUCTS = ("qkv", "o", "gate_up", "down")


@pytest.mark.parametrize(
    ("size", "quantization", "batch", "rows", "context"),
    [
        *(
            (size, "none", *shape)
            for size in QWEN
            for shape in ((1, 1, 1024), (32, 1, 8192), (8, 9, 2048), (1, 512, 512))
        ),
        *((size, name, 8, 9, 2048) for size in QWEN for name in QUANTIZATIONS[1:]),
    ],
)
def test_the_list_of_kernels_is_what_the_engine_launches(
    size: str, quantization: str, batch: int, rows: int, context: int
) -> None:
    """The engine's own step on meta tensors: every kernel, its launches, and bytes and flops within one percent."""
    config = qwen(size)
    traced = traced_step(config, batch, rows, context, quantization)
    listed = step_kernels(network(config, quantization=quantization), batch, rows, context)
    found = Counter(NAMES.get(kernel.name, kernel.name) for kernel in traced)
    assert found == Counter("product" if kernel.name in PRODUCTS else kernel.name for kernel in listed)
    assert launches(traced) == launches(listed)
    assert sum(k.moved_bytes for k in traced) == pytest.approx(sum(k.moved_bytes for k in listed), rel=0.01)
    assert sum(k.flops for k in traced) == pytest.approx(sum(k.flops for k in listed), rel=0.01)
    for part in ("weights", "sampling", "rest"):
        of_part = [sum(k.moved_bytes for k in kernels if k.part == part) for kernels in (traced, listed)]
        assert of_part[0] == pytest.approx(of_part[1], rel=0.03), part


@pytest.mark.parametrize("quantization", ["w4a16", "w8a8"])
@pytest.mark.parametrize("size", QWEN)
def test_the_list_of_a_self_draft_is_what_the_engine_launches(size: str, quantization: str) -> None:
    config, batch, depth, context = qwen(size), 8, 3, 2048
    traced = traced_chain(config, batch, depth, context, quantization)
    strategy = Strategy("self", depth)
    listed = draft_kernels(network(config), batch, strategy, context, FORMATS[quantization])
    names, products = {"stack": "tokens", "head": "product"}, (*PRODUCTS, "head")  # which may be in few bits too
    found = Counter(names.get(kernel.name, NAMES.get(kernel.name, kernel.name)) for kernel in traced)
    assert found == Counter("product" if kernel.name in products else kernel.name for kernel in listed)
    assert launches(traced) == launches(listed)
    assert sum(k.moved_bytes for k in traced) == pytest.approx(sum(k.moved_bytes for k in listed), rel=0.01)
    assert sum(k.flops for k in traced) == pytest.approx(sum(k.flops for k in listed), rel=0.01)


@pytest.mark.parametrize("size", QWEN)
def test_attention_is_split_where_the_kernel_splits_it(size: str) -> None:
    """One launch or two, over batches, rows and contexts: as the kernel's own plan."""
    config = replace(qwen(size), num_layers=1)
    for batch, rows, context in itertools.product((1, 32, 66, 132), (1, 5, 17), (200, 2048, 32_768)):
        traced, listed = traced_step(config, batch, rows, context), step_kernels(network(config), batch, rows, context)
        assert launches(traced) == launches(listed), (batch, rows, context)


@pytest.mark.parametrize("size", QWEN)
def test_every_step_is_within_fifteen_percent_of_the_fused_plan(size: str) -> None:
    net, device = network(qwen(size)), DEVICES["H100"]
    cells = [(batch, 1, context) for batch in (1, 8, 32, 64) for context in (1024, 8192, 32_768)]
    for batch, rows, context in [*cells, (1, 9, 4096), (32, 9, 2048)]:
        now_ms = time_of(traced_step(qwen(size), batch, rows, context), device).ms
        fused_ms = time_of(step_kernels(net, batch, rows, context), device).ms
        floor_ms = floor_bytes(net, batch, context) / device.bandwidth_bytes_s * 1e3
        assert floor_ms < now_ms <= 1.15 * fused_ms, (batch, rows, context)


def step_on_h100(size: str, quantization: str) -> StepTime:
    """One request of 1,024 tokens decodes."""
    return time_of(step_kernels(network(qwen(size), quantization=quantization), 1, 1, 1024), DEVICES["H100"])


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_few_bits_pay_where_weights_decide(quantization: str) -> None:
    """As predicted: 7B decodes faster in each format, and never below what its bytes take."""
    low, full = (network(qwen("7b"), quantization=name) for name in (quantization, "none"))
    assert low.weight_bytes < 0.62 * full.weight_bytes
    floor_ms = floor_bytes(low, 1, 1024) / DEVICES["H100"].bandwidth_bytes_s * 1e3
    assert step_on_h100("7b", "none").ms > step_on_h100("7b", quantization).ms > floor_ms


def test_few_bits_cost_launches_where_weights_do_not_decide() -> None:
    full, low = step_on_h100("0.5b", "none"), step_on_h100("0.5b", "w8a8")
    assert low.launches == full.launches + 4 * QWEN["0.5b"]["num_layers"]
    assert low.ms > full.ms


@pytest.mark.parametrize("device", ["A100", "H100"])
@pytest.mark.parametrize("size", ["1.5b", "7b"])
@pytest.mark.parametrize("batch", MARLIN_MS)
def test_eight_bits_draft_faster_than_our_four_where_auto_takes_them(size: str, device: str, batch: int) -> None:
    """As predicted, at the block efficiency of five drafted tokens; for 7B another's four bits are faster than ours."""
    net, gpu, depth, context = network(qwen(size)), DEVICES[device], 5, 1024
    draft_ms = {
        name: time_of(draft_kernels(net, batch, Strategy("self", depth), context, FORMATS[name]), gpu).ms
        - DEFAULT.host_s * 1e3
        for name in ("w8a8", "w4a8", "w4a16")
    }
    assert draft_ms["w8a8"] <= 1.01 * min(draft_ms["w4a8"], draft_ms["w4a16"])
    plain_ms, verify_ms = (step_time(net, gpu, batch, rows, context).ms for rows in (1, 1 + depth))
    assert 5.87 * plain_ms / (draft_ms["w8a8"] + verify_ms) > 1.25
    if (size, device) == ("7b", "A100"):
        assert draft_ms["w4a16"] / depth > MARLIN_MS[batch]
