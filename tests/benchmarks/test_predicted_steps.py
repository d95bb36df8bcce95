"""The predictor's list of kernels is what the CUDA step launches; and what is predicted of both is recorded."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.harness import RESULTS, load
from benchmarks.predicted_steps import GRID, QUANTIZATIONS, VERIFYING, low_bit_row, self_row, step_row, sweep_errors
from benchmarks.tools.engine_trace import kernels_before, traced_chain, traced_step
from benchmarks.tools.qwen import QWEN, network, qwen
from config.formats import FORMATS
from config.strategy import Strategy
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import draft_kernels, launches, step_kernels

RECORD = load(RESULTS / "predicted_steps.json")
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


def test_the_record_is_what_the_command_computes_now() -> None:
    device = DEVICES[RECORD["device"]]
    for step in RECORD["steps"][:: len(RECORD["steps"]) // 6]:
        cell = step["size"], step["batch"], step["rows"], step["context"]
        assert step_row(*cell, device) == step, "run: python -m benchmarks.predicted_steps"
    for row in RECORD["low_bit"][:: len(RECORD["low_bit"]) // 6]:
        assert low_bit_row(row["size"], row["batch"], row["rows"], row["context"], device) == row
    for row in RECORD["self"][:: len(RECORD["self"]) // 6]:
        assert self_row(row["size"], row["batch"], DEVICES[row["device"]]) == row
    assert RECORD["sweep_error"] == sweep_errors()
    assert "PREDICTED" in RECORD["question"]


def test_every_step_is_within_fifteen_percent_of_the_fused_plan() -> None:
    assert len(RECORD["steps"]) == len(QWEN) * (len(GRID) + len(VERIFYING))
    for step in RECORD["steps"]:
        assert step["now_ms"] <= 1.15 * step["fused_ms"], step
        assert step["floor_ms"] < step["now_ms"] < step["before_ms"], step


def test_few_bits_pay_where_weights_decide_and_cost_launches_where_they_do_not() -> None:
    """As predicted: 7B decodes faster in each format, one request of 0.5B does not where tokens are rounded."""
    found = {(row["size"], row["batch"], row["rows"], row["context"]): row for row in RECORD["low_bit"]}
    large, small = found["7b", 1, 1, 1024], found["0.5b", 1, 1, 1024]
    for name in QUANTIZATIONS[1:]:
        assert large[name]["weight_gib"] < 0.62 * large["none"]["weight_gib"]
        assert large["none"]["ms"] > large[name]["ms"] > large[name]["floor_ms"]
    assert small["w8a8"]["launches"] == small["none"]["launches"] + 4 * QWEN["0.5b"]["num_layers"]
    assert small["w8a8"]["ms"] > small["none"]["ms"]


def test_eight_bits_draft_faster_than_our_four_where_auto_takes_them() -> None:
    """As predicted, and for 7B the four bits of another's kernel are faster than ours."""
    for row in RECORD["self"]:
        if row["size"] != "0.5b":
            assert row["w8a8"]["token_ms"] <= 1.01 * min(row[form]["token_ms"] for form in ("w4a8", "w4a16")), row
            assert row["w8a8"]["worth"] > 1.25
        if "marlin_token_ms" in row:
            assert row["w4a16"]["token_ms"] > row["marlin_token_ms"]


def test_before_is_the_trace_of_what_there_was() -> None:
    graph, sampling = kernels_before("7b", 1, 1, 1024)
    assert launches(graph) == 1458
    assert launches(sampling) == 188
    with pytest.raises(KeyError, match="no step of 7b"):
        kernels_before("7b", 3, 1, 1024)


@pytest.mark.parametrize("size", QWEN)
def test_attention_is_split_where_the_kernel_splits_it(size: str) -> None:
    """One launch or two, over batches, rows and contexts: as the kernel's own plan."""
    config = replace(qwen(size), num_layers=1)
    for batch, rows, context in itertools.product((1, 32, 66, 132), (1, 5, 17), (200, 2048, 32_768)):
        traced, listed = traced_step(config, batch, rows, context), step_kernels(network(config), batch, rows, context)
        assert launches(traced) == launches(listed), (batch, rows, context)
