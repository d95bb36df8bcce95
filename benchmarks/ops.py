"""Each operation's kernel beside the torch it replaces, and every way to multiply by a weight on this CPU.

    python -m benchmarks.ops [--threads 1] [--repeats 9] [--quick] [--out FILE]

Microseconds a call, Python wrapper included: the minimum over repeats in which the contestants take turns, so that a
busy machine disturbs all alike. Weights rotate through copies larger than the second-level cache, as in a model whose
layers follow each other. "empty" is the cost of allocating a result, the floor of every wrapper.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe_machine
from models import ops
from models.ops import reference

RESULTS = Path(__file__).parent / "results" / "ops.json"
DEMO = [(128, 256), (128, 128), (128, 768), (384, 128), (128, 228)]  # K, N of a 0.6M model: qkv, o, gate_up, down, head
LARGE = [(512, 1024), (512, 512), (512, 3072), (1536, 512), (512, 228)]  # of a 20M model
ROWS = (1, 2, 4, 8, 32, 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Contestants = dict[str, Callable[[], object]]


def measure(contestants: Contestants, repeats: int, budget_s: float = 0.004) -> dict[str, float]:
    """Microseconds a call of each. A repeat calls each contestant for about `budget_s`."""
    counts = {}
    for name, call in contestants.items():
        call()
        start = time.perf_counter()
        call()
        counts[name] = max(1, int(budget_s / max(time.perf_counter() - start, 1e-7)))
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / counts[name])
    return {name: round(1e6 * seconds, 2) for name, seconds in best.items()}


def operations(rows: int, dtype: torch.dtype, context: int) -> dict[str, Contestants]:
    """The demo model's operations for one engine step of `rows` decoding requests with `context` tokens each."""
    hidden, query_heads, kv_heads, head_dim, inner, vocab, block = 128, 4, 2, 32, 384, 228, 16
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, gate_up, head_norm = randn(rows, hidden), randn(hidden), randn(rows, 2 * inner), randn(head_dim)
    qkv, angle = randn(rows, (query_heads + 2 * kv_heads) * head_dim), randn(rows, head_dim // 2).float()
    q, kv = randn(rows, query_heads, head_dim), randn(rows, kv_heads, head_dim)
    blocks = -(-context // block)
    caches = randn(rows * blocks * block, kv_heads, head_dim), randn(rows * blocks * block, kv_heads, head_dim)
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    paged = (tables, torch.arange(rows + 1, dtype=torch.int32), torch.full((rows,), context, dtype=torch.int32), block)
    places = torch.arange(rows)
    slots = places * blocks * block
    heads = (angle.cos(), angle.sin(), query_heads, kv_heads, head_norm, head_norm, 1e-6)
    drawing = (randn(rows, vocab), torch.full((rows,), -torch.inf), torch.ones(rows), places, places)

    def separate_qkv() -> object:
        parts = qkv.view(rows, -1, head_dim)
        turned = [
            reference.apply_rope(reference.rms_norm(part, head_norm, 1e-6), *heads[:2])
            for part in (parts[:, :query_heads], parts[:, query_heads : query_heads + kv_heads])
        ]
        return turned, parts[:, query_heads + kv_heads :]

    maxima = {"max_query": 1, "max_context": context}
    return {
        "empty": {"kernel": lambda: torch.empty_like(x)},
        "rms_norm": {
            "kernel": lambda: ops.rms_norm(x, weight, 1e-6),
            "torch": lambda: reference.rms_norm(x, weight, 1e-6),
        },
        "add_rms_norm": {
            "kernel": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
            "torch": lambda: reference.rms_norm(x + x, weight, 1e-6),
        },
        "swiglu": {"kernel": lambda: ops.swiglu(gate_up), "torch": lambda: reference.swiglu(gate_up)},
        "split_qkv": {"kernel": lambda: ops.split_qkv(qkv, *heads), "torch": separate_qkv},
        "write_kv": {
            "kernel": lambda: ops.write_kv(kv, kv, *caches, slots),
            "torch": lambda: reference.write_kv(kv, kv, *caches, slots),
        },
        "paged_attention": {
            "kernel": lambda: ops.paged_attention(q, *caches, *paged, 0.2),
            "torch": lambda: reference.paged_attention(q, *caches, *paged, 0.2, **maxima),
        },
        "sample": {"kernel": lambda: ops.sample(*drawing), "torch": lambda: reference.sample(*drawing)},
    }


def large_attention(rows: int, dtype: torch.dtype, context: int) -> tuple[Contestants, int]:
    """Decode attention of the 20M model, a cache per layer: each contestant calls all; the number of layers."""
    layers, query_heads, kv_heads, head_dim, block = 6, 8, 4, 64, 16
    blocks = -(-context // block)
    shape = (rows * blocks * block, kv_heads, head_dim)
    caches = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(layers)]
    q = torch.randn(rows, query_heads, head_dim).to(dtype)
    tables = torch.randperm(rows * blocks).int().view(rows, blocks)
    paged = (tables, torch.arange(rows + 1).int(), torch.full((rows,), context, dtype=torch.int32), block, 0.125)
    maxima = {"max_query": 1, "max_context": context}
    return {
        "kernel": lambda: [ops.paged_attention(q, *cache, *paged) for cache in caches],
        "torch": lambda: [reference.paged_attention(q, *cache, *paged, **maxima) for cache in caches],
    }, layers


def learner_operations(tokens: int) -> dict[str, Contestants]:
    """Forward and backward over packed segments with long-tailed lengths, float32."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(1000, generator=generator) * 0.95 + 4).exp().clamp(13, 212).int()
    lengths = lengths[: int((lengths.cumsum(0) <= tokens).sum())]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
    rows = int(offsets[-1])
    q, k, v = (torch.randn(rows, heads, 32, generator=generator).requires_grad_() for heads in (4, 2, 2))
    x, weight = torch.randn(rows, 128, generator=generator).requires_grad_(), torch.ones(128, requires_grad=True)
    gate_up = torch.randn(rows, 768, generator=generator).requires_grad_()
    grads = [torch.randn(rows, *shape, generator=generator) for shape in ((4, 32), (128,), (384,))]

    def pair(call: Callable[[Any], Tensor], grad: Tensor) -> Contestants:
        return {
            "kernel": lambda: torch.autograd.backward(call(ops), grad),
            "torch": lambda: torch.autograd.backward(call(reference), grad),
        }

    return {
        "packed_attention": pair(lambda m: m.packed_attention(q, k, v, offsets, 0.2), grads[0]),
        "rms_norm": pair(lambda m: m.rms_norm(x, weight, 1e-6), grads[1]),
        "swiglu": pair(lambda m: m.swiglu(gate_up), grads[2]),
    }


def linear_contestants(rows: int, depth: int, columns: int, dtype: torch.dtype) -> tuple[Contestants, int]:
    """Each multiplies by every copy of the weight once; the number of copies."""
    copies = max(1, min(16, int(8e6 / (depth * columns * dtype.itemsize))))
    weights = [torch.randn(columns, depth).to(dtype) for _ in range(copies)]
    panels = [weight.clone() for weight in weights]
    for weight in panels:
        ops.prepack(weight)
    x = torch.randn(rows, depth).to(dtype)
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    contestants: Contestants = {
        "kernel_packed": lambda: [ops.linear(x, weight, invariant=True) for weight in panels],
        "kernel_unpacked": lambda: [ops.linear(x, weight, invariant=True) for weight in weights],
        "fast_mode": lambda: [ops.linear(x, weight, invariant=False) for weight in panels],
        "torch": lambda: [F.linear(x, weight) for weight in weights],
        "torch_padded": lambda: [F.linear(F.pad(x, (0, 0, 0, max(0, 16 - rows))), weight)[:rows] for weight in weights],
        "onednn_packed": lambda: [
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") for weight in onednn
        ],
    }
    if dtype == torch.float32:
        mkl = [torch.ops.mkl._mkl_reorder_linear_weight(weight, rows) for weight in weights]
        contestants["mkl_packed"] = lambda: [
            torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)
            for packed, weight in zip(mkl, weights, strict=True)
        ]
    return contestants, copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few repeats, batch sizes and shapes: a try, not a result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = 3 if arguments.quick else arguments.repeats
    rows = (1, 32) if arguments.quick else ROWS
    shapes = [DEMO[0], LARGE[0]] if arguments.quick else DEMO + LARGE
    result: dict[str, Any] = {"machine": describe_machine(("torch",)), "threads": arguments.threads, "unit": "us"}

    with torch.inference_mode():
        for dtype_name, dtype in DTYPES.items():
            for count in (1, 32):
                name = f"decode_{dtype_name}_{count}_rows"
                result[name] = {op: measure(both, repeats) for op, both in operations(count, dtype, 200).items()}
                for op, figures in result[name].items():
                    print(f"{name} {op:16s} {figures}", flush=True)
            for count in (8, 32, 64):
                name = f"attention_20m_{dtype_name}_{count}_rows"
                both, layers = large_attention(count, dtype, 100)
                result[name] = {key: round(us / layers, 2) for key, us in measure(both, repeats).items()}
                print(f"{name} {result[name]}", flush=True)
    result["learner_forward_backward"] = {op: measure(both, repeats) for op, both in learner_operations(4096).items()}
    for op, figures in result["learner_forward_backward"].items():
        print(f"learner {op:16s} {figures}", flush=True)
    result["linear"] = []
    with torch.inference_mode():
        for dtype_name, dtype in DTYPES.items():
            for depth, columns in shapes:
                for count in rows:
                    contestants, copies = linear_contestants(count, depth, columns, dtype)
                    figures = {name: round(us / copies, 2) for name, us in measure(contestants, repeats).items()}
                    result["linear"].append({"dtype": dtype_name, "K": depth, "N": columns, "M": count, **figures})
                    print(f"linear {dtype_name} K{depth} N{columns} M{count} {figures}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
