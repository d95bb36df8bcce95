"""Predicted milliseconds of engine steps on an H100, before and now, and in few bits:
`python -m benchmarks.predicted_steps`.

Owns `results/predicted_steps.json`. Predictions, not measurements: the engine's own code on meta tensors says what it
launches (`benchmarks.tools.engine_trace`), `policies.roofline`, fitted to a measured A100 sweep, what that takes. Per
step: *floor* (every weight, key and value once), *before* (traced at commit 84d231c: graph, and sampling launched one
by one), *now* (the present code, in a graph), *fused* (the list of kernels that a fused engine needs). Before flatters:
perfect overlap, no under-occupied attention, contexts that are powers of two. In few bits: *now* with
rollout.quantization, its list of kernels, bytes of weights and the engine that starts with them.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from benchmarks.harness import RESULTS, command, markdown, save
from benchmarks.tools.a100_sweep import cells, fitted, relative_error
from benchmarks.tools.engine_trace import kernels_before, traced_step
from benchmarks.tools.qwen import QWEN, network, qwen
from policies.roofline.devices import DEVICES, Device
from policies.roofline.kernels import floor_bytes, launches, step_kernels
from policies.roofline.memory import GIB
from policies.roofline.timing import DEFAULT, time_of

GRID = tuple((batch, 1, context) for batch in (1, 8, 32, 64) for context in (1024, 8192, 32_768))
VERIFYING = ((1, 9, 4096), (32, 9, 2048))
QUANTIZATIONS = ("none", "w8a8", "fp8", "w4a8", "w4a16")


def step_row(size: str, batch: int, rows: int, context: int, device: Device) -> dict[str, Any]:
    """One step: milliseconds and launches."""
    config = qwen(size)
    net = network(config)
    graph, sampling = kernels_before(size, batch, rows, context)
    traced = traced_step(config, batch, rows, context)
    listed = step_kernels(net, batch, rows, context)
    host_ms = DEFAULT.host_s * 1e3
    before_ms = time_of(graph, device).ms + time_of(sampling, device, eager=True).ms - host_ms
    now, fused = time_of(traced, device), time_of(listed, device)
    return {
        "size": size,
        "batch": batch,
        "rows": rows,
        "context": context,
        "floor_ms": round(floor_bytes(net, batch, context) / device.bandwidth_bytes_s * 1e3, 3),
        "before_ms": round(before_ms, 3),
        "now_ms": round(now.ms, 3),
        "fused_ms": round(fused.ms, 3),
        "before_launches": launches(graph) + launches(sampling),
        "now_launches": now.launches,
        "fused_launches": fused.launches,
        "decides": now.decides,
    }


def low_bit_row(size: str, batch: int, rows: int, context: int, device: Device) -> dict[str, Any]:
    """One step by rollout.quantization: milliseconds."""
    found: dict[str, Any] = {"size": size, "batch": batch, "rows": rows, "context": context}
    for name in QUANTIZATIONS:
        net = network(qwen(size), quantization=name)
        step = time_of(step_kernels(net, batch, rows, context), device)
        found[name] = {
            "weight_gib": round(net.weight_bytes / GIB, 3),
            "floor_ms": round(floor_bytes(net, batch, context) / device.bandwidth_bytes_s * 1e3, 3),
            "ms": round(step.ms, 3),
            "launches": step.launches,
            "decides": step.decides,
        }
    return found


def sweep_errors() -> dict[str, Any]:
    """Of the predictor, on the measured sweep: what it was fitted to, and what it was not."""
    found = cells()
    known = fitted(found)

    def mean(rows: Iterator[Any]) -> dict[str, float]:
        errors = [abs(relative_error(cell)) for cell in rows]
        return {"cells": len(errors), "mean": round(fmean(errors), 4), "worst": round(max(errors), 4)}

    return {
        "decoding": mean(c for c in found if c.rows == 1),
        "decoding, not fitted": mean(c for c in found if c.rows == 1 and c not in known),
        "verifying": mean(c for c in found if c.rows > 1),
        "verifying, not fitted": mean(c for c in found if c.rows > 1 and c not in known),
    }


def main(
    *,
    device: Annotated[str, "of policies.roofline.devices", tuple(DEVICES)] = "H100",
    out: Path = RESULTS / "predicted_steps.json",
) -> None:
    gpu = DEVICES[device]
    steps = [step_row(size, *cell, gpu) for size in QWEN for cell in (*GRID, *VERIFYING)]
    low_bit = [low_bit_row(size, *cell, gpu) for size in QWEN for cell in (*GRID, *VERIFYING)]
    question = "PREDICTED, not measured: how long does an engine step take, before and now, beside a fused plan?"
    rates = {name: getattr(DEFAULT, name) for name in DEFAULT.__slots__}
    found = {"question": question, "device": device, "rates": rates, "sweep_error": sweep_errors(), "steps": steps}
    save(out, found | {"low_bit": low_bit})
    names = ("size", "batch", "rows", "context", "floor_ms", "before_ms", "now_ms", "fused_ms")
    print(markdown([*names, "before / now"], [_line(step, names) for step in steps]))
    shown = [[row[name] for name in names[:4]] + [row[form]["ms"] for form in QUANTIZATIONS] for row in low_bit]
    print(markdown([*names[:4], *(f"{form} ms" for form in QUANTIZATIONS)], shown))


def _line(step: dict[str, Any], names: tuple[str, ...]) -> list[object]:
    return [*(step[name] for name in names), f"{step['before_ms'] / step['now_ms']:.1f}x"]


if __name__ == "__main__":
    command(main, timed=False)
