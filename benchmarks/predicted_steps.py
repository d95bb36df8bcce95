"""Predicted milliseconds of engine steps on an H100, before and now, and in few bits:
`python -m benchmarks.predicted_steps`.

Owns `results/predicted_steps.json`. Predictions, not measurements: the engine's own code on meta tensors says what it
launches (`benchmarks.tools.engine_trace`), `policies.roofline`, fitted to a measured A100 sweep, what that takes. Per
step: *floor* (every weight, key and value once), *before* (traced at commit 84d231c: graph, and sampling launched one
by one), *now* (the present code, in a graph), *fused* (the list of kernels that a fused engine needs). Before flatters:
perfect overlap, no under-occupied attention, contexts that are powers of two. In few bits: *now* with
rollout.quantization, its list of kernels, bytes of weights and the engine that starts with them. Drafts by a copy of
the target in few bits (`self`): on an A100 too, beside the drafter that the sweep measured there.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from benchmarks.harness import RESULTS, command, markdown, save
from benchmarks.tools.a100_sweep import cells, fitted, relative_error
from benchmarks.tools.engine_trace import kernels_before, traced_step
from benchmarks.tools.qwen import QWEN, network, qwen
from config.formats import FORMATS
from config.strategy import Strategy
from policies.roofline.devices import DEVICES, Device
from policies.roofline.kernels import draft_kernels, floor_bytes, launches, step_kernels
from policies.roofline.memory import GIB
from policies.roofline.timing import DEFAULT, step_time, time_of

GRID = tuple((batch, 1, context) for batch in (1, 8, 32, 64) for context in (1024, 8192, 32_768))
VERIFYING = ((1, 9, 4096), (32, 9, 2048))
# Medians of the A100 sweep's drafter (Qwen2.5-7B in W4A16 by vLLM's Marlin kernel, draft length 7, 1,024 tokens) by
# requests: milliseconds of a drafted token.
MARLIN_MS = {1: 4.362, 8: 4.774, 32: 7.178}
DRAFTING, DRAFT_DEPTH, DRAFT_CONTEXT = ("w8a8", "w4a8", "w4a16"), 5, 1024
# Tokens per cycle of five drafted ones, as EfficientRollout's Table 4 has them by bits of the drafter's weights.
BLOCK_EFFICIENCY = {8: 5.87, 4: 5.18}
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


def self_row(size: str, batch: int, device: Device) -> dict[str, Any]:
    """Drafting with a copy: milliseconds of a drafted token and of a cycle, by the copy's format, and what that is
    worth beside plain decoding."""
    net, strategy = network(qwen(size)), Strategy("self", DRAFT_DEPTH)
    plain = step_time(net, device, batch, 1, DRAFT_CONTEXT).ms
    verify = step_time(net, device, batch, 1 + DRAFT_DEPTH, DRAFT_CONTEXT).ms
    found: dict[str, Any] = {"size": size, "device": device.name, "batch": batch, "plain_ms": round(plain, 3)}
    if (size, device.name) == ("7b", "A100"):
        found["marlin_token_ms"] = MARLIN_MS[batch]
    for name in DRAFTING:
        form = FORMATS[name]
        kernels = draft_kernels(net, batch, strategy, DRAFT_CONTEXT, form)
        draft = time_of(kernels, device).ms - DEFAULT.host_s * 1e3
        found[name] = {
            "copy_gib": round(net.copied(form).copy_bytes / GIB, 3),
            "token_ms": round(draft / DRAFT_DEPTH, 3),
            "cycle_ms": round(draft + verify, 3),
            "worth": round(BLOCK_EFFICIENCY[form.bits] * plain / (draft + verify), 3),
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
    drafts = [self_row(size, batch, DEVICES[name]) for name in ("A100", "H100") for size in QWEN for batch in MARLIN_MS]
    save(out, found | {"low_bit": low_bit, "self": drafts})
    names = ("size", "batch", "rows", "context", "floor_ms", "before_ms", "now_ms", "fused_ms")
    print(markdown([*names, "before / now"], [_line(step, names) for step in steps]))
    shown = [[row[name] for name in names[:4]] + [row[form]["ms"] for form in QUANTIZATIONS] for row in low_bit]
    print(markdown([*names[:4], *(f"{form} ms" for form in QUANTIZATIONS)], shown))
    of_drafts = ("token_ms", "cycle_ms", "worth")
    heads = ["size", "device", "batch", "plain_ms", *(f"{form} {of}" for form in DRAFTING for of in of_drafts)]
    print(
        markdown(heads, [[*(r[n] for n in heads[:4]), *(r[f][o] for f in DRAFTING for o in of_drafts)] for r in drafts])
    )


def _line(step: dict[str, Any], names: tuple[str, ...]) -> list[object]:
    return [*(step[name] for name in names), f"{step['before_ms'] / step['now_ms']:.1f}x"]


if __name__ == "__main__":
    command(main, timed=False)
