"""The predictor's list of kernels is what the CUDA step launches; and what it says of few bits."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

from benchmarks.harness import RESULTS
from benchmarks.tools.qwen import QWEN, network, qwen
from config.formats import FORMATS
from config.strategy import Strategy
from models.dtypes import DTYPES
from models.ops.triton.launch_low_bit import plan_low_bit_linear
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import (
    GATED,
    UNPACKED,
    draft_kernels,
    floor_bytes,
    launches,
    projection,
    step_kernels,
)
from policies.roofline.timing import DEFAULT, StepTime, step_time, time_of
from tests.policies.engine_trace import traced_chain, traced_step

QUANTIZATIONS = ("none", "w8a8", "fp8", "w4a8", "w4a16")
MARLIN_MS = {1: 4.362, 8: 4.774, 32: 7.178}  # a token by the A100 sweep's drafter: vLLM's kernel of four bits
BLOCK_EFFICIENCY = {"w8a8": 5.87, "w4a16": 5.18, "w4a8": 5.18}  # tokens a cycle of five drafts, of EfficientRollout
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


def test_few_bits_cost_a_launch_for_tokens_that_no_kernel_before_rounds() -> None:
    """Attention's, and the first norm's: norms and SwiGLU round theirs."""
    for size in QWEN:
        full, low = step_on_h100(size, "none"), step_on_h100(size, "w8a8")
        assert low.launches == full.launches + QWEN[size]["num_layers"] + 1
        assert low.ms < full.ms


@pytest.mark.parametrize("device", ["A100", "H100"])
@pytest.mark.parametrize("size", ["1.5b", "7b"])
@pytest.mark.parametrize("batch", MARLIN_MS)
def test_eight_bits_are_worth_what_the_best_four_are_where_auto_takes_them(size: str, device: str, batch: int) -> None:
    """As predicted, at the block efficiencies of five drafted tokens (w4a8: assumed to be w4a16's, which rounds less).
    On an A100 our four bits with floats take what the sweep's kernel of four bits takes."""
    net, gpu, depth, context = network(qwen(size)), DEVICES[device], 5, 1024
    plain_ms, verify_ms = (step_time(net, gpu, batch, rows, context).ms for rows in (1, 1 + depth))
    draft_ms, worth = dict[str, float](), dict[str, float]()
    for name, tokens in BLOCK_EFFICIENCY.items():
        kernels = draft_kernels(net, batch, Strategy("self", depth), context, FORMATS[name])
        draft_ms[name] = time_of(kernels, gpu).ms - DEFAULT.host_s * 1e3
        worth[name] = tokens * plain_ms / (draft_ms[name] + verify_ms)
    assert worth["w8a8"] > max(1.2, worth["w4a16"])
    assert worth["w8a8"] > 0.97 * worth["w4a8"]
    if (size, device) == ("7b", "A100"):
        assert draft_ms["w4a16"] / depth == pytest.approx(MARLIN_MS[batch], rel=0.07)


@pytest.mark.parametrize("rows", [1, 16, 17, 40, 65, 300, 4096])
@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_programs_of_products_in_few_bits_are_the_kernels_own(quantization: str, rows: int) -> None:
    form, eight = FORMATS[quantization], {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
    kind = eight.get(form.activations, torch.bfloat16)
    net = network(qwen("7b"), quantization=quantization)
    for n, k in ((896, 896), (896, 4864), (1536, 8960), (3584, 18_944), (37_888, 3584)):
        *_, listed = projection(net, "o", rows, n, k)

        def empty(*shape: int, dtype: torch.dtype = kind) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        groups = form.groups(k)
        (launch,) = plan_low_bit_linear(
            empty(rows, k),
            None if form.activations == "none" else empty(rows, 1, dtype=torch.float32),
            empty(n, k * form.container_bits // 8, dtype=DTYPES[form.stored]),
            empty(n, groups, dtype=torch.float32),
            empty(n, groups, dtype=torch.uint8) if form.asymmetric else None,
            None,
            empty(rows, n),
            empty(264, dtype=torch.int32),
        )
        assert listed.stream is not None
        assert listed.stream.programs == prod(launch.grid), (n, k)
        assert listed.stream.splits == prod(launch.grid[2:]), (n, k)
        tile = launch.constants["TILE_ROWS"], launch.constants["TILE_COLUMNS"]
        assert (listed.stream.rows, listed.stream.columns) == tile
        deep = launch.constants.get("TILE_DEPTH", 64)
        assert listed.stream.under_way == (launch.stages - 1) * tile[1] * deep, "all buffers but the one in use"


def test_instructions_are_those_of_the_compiled_code() -> None:
    """Of the record of sm_90's code: products by four bits, and SwiGLU in eight."""
    rows = json.loads((RESULTS / "triton_kernels.json").read_text())["rows"]
    for row in (row for row in rows if row["architecture"] == "sm_90"):
        form, _, shape = row["kernel"].partition(", ")
        if form in ("w4a8", "w4a16"):
            m, n, k = map(int, shape.split(" x "))
            *_, listed = projection(network(qwen("7b"), quantization=form), "", m, n, k)
            assert listed.stream is not None
            per_weight = UNPACKED[FORMATS[form].activations, listed.stream.rows, n >= 8192]
            assert row["per_weight"] == pytest.approx(per_weight, rel=0.05), row
        if form == "swiglu_quantise":
            assert row["per_weight"] == pytest.approx(GATED[FORMATS[shape].activations], rel=0.15), row


@pytest.mark.parametrize(
    ("size", "quantization", "share"),
    [("7b", "none", 0.8), ("1.5b", "none", 0.55), ("7b", "w8a8", 0.75), ("1.5b", "w8a8", 0.45)],
)
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_decoding_few_requests_is_near_the_limit_of_the_memory(
    size: str, quantization: str, share: float, batch: int
) -> None:
    """As predicted, with 0.15 ms of host: 0.05 measured without CUDA, and 0.1 assumed for CUDA's own."""
    net, device = network(qwen(size), quantization=quantization), DEVICES["H100"]
    step_ms = time_of(step_kernels(net, batch, 1, 1024), device, replace(DEFAULT, host_s=0.15e-3)).ms
    assert floor_bytes(net, batch, 1024) / device.bandwidth_bytes_s * 1e3 / step_ms >= share


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_kernels_that_start_early_cost_no_gap_and_only_where_the_device_lets_them(quantization: str) -> None:
    kernels = step_kernels(network(qwen("1.5b"), quantization=quantization), 1, 1, 1024)
    apart = [replace(kernel, early=False) for kernel in kernels]
    hopper, ampere = DEVICES["H100"], DEVICES["A100"]
    assert time_of(kernels, ampere).ms == time_of(apart, ampere).ms
    saved_ms = time_of(apart, hopper).ms - time_of(kernels, hopper).ms
    # A gap for each of a layer's launches, and the first weights of four products.
    most_ms = (launches(kernels) * DEFAULT.gap_s + 4 * QWEN["1.5b"]["num_layers"] * DEFAULT.latency_s) * 1e3
    assert 0.6 * most_ms < saved_ms < most_ms
