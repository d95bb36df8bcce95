"""The measured A100 sweep to which the predictor's constants are fitted, and the kernels of its engine.

Owns the fixture `benchmarks/data/a100_sweep_qwen2.5_7b.csv`: median milliseconds of Qwen2.5-7B in bfloat16 by rows per
request, batch and context (from furiosa-ai/EfficientRollout, Apache-2.0; cells of unclear meaning left out). Its engine
is vLLM, and its requests share one prompt. From 8 requests on, the added time per key is that of one walk over the
context, whatever the batch; keys of fewer requests are faster than the memory's bandwidth allows. So attention differs
from ours: one shared pass (from 8 requests on when verifying, from 32 when decoding, and from 512 tokens), whose blocks
of 64 query rows walk the whole context unsplit. Otherwise unsplit blocks when verifying, and the cache's rate when
decoding. Everything but attention and sampling is priced like our own engine.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.tools.qwen import network, qwen
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import Kernel, Walk, step_kernels
from policies.roofline.timing import SWEEP, DeviceRates, time_of

FIXTURE = Path(__file__).parents[1] / "data/a100_sweep_qwen2.5_7b.csv"
QWEN_7B = network(qwen("7b"))
CACHE_BYTES_S = 4.2e12  # keys and values shared by requests, fitted with the rest
_SHARED_FROM, _SHARED_CONTEXT, _TILE_ROWS = {True: 8, False: 32}, 512, 64  # requests (verifying, decoding), tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured cell. rows 1: decoding."""

    rows: int
    batch: int
    context: int
    median_ms: float


def cells(path: Path = FIXTURE) -> list[Cell]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Cell(int(r["rows"]), int(r["batch"]), int(r["context"]), float(r["median_ms"])) for r in rows]


def fitted(found: list[Cell]) -> list[Cell]:
    """Return the cells of the fit: every other decoding cell, and draft lengths 3 and 15. The rest are tests."""
    decoding = [cell for cell in found if cell.rows == 1]
    return decoding[::2] + [cell for cell in found if cell.rows in (4, 16)]


def predicted_ms(cell: Cell, rates: DeviceRates = SWEEP) -> float:
    kernels = _sweep_kernels(cell)
    return time_of(kernels, DEVICES["A100"], rates, requests=cell.batch).ms


def relative_error(cell: Cell, rates: DeviceRates = SWEEP) -> float:
    return predicted_ms(cell, rates) / cell.median_ms - 1


def _sweep_kernels(cell: Cell) -> Iterator[Kernel]:
    net = QWEN_7B
    logits = cell.batch * cell.rows * net.vocab_size * 4
    for kernel in step_kernels(net, cell.batch, cell.rows, cell.context):
        if kernel.part == "kv":
            yield from _attention(cell)
        elif kernel.part == "sampling":  # four passes over float32 logits
            yield Kernel(name="sample", part="sampling", read_bytes=4 * logits, write_bytes=0, launches=4)
        else:
            yield kernel


def _attention(cell: Cell) -> Iterator[Kernel]:
    net, batch, rows, context = QWEN_7B, cell.batch, cell.rows, cell.context
    keys_bytes = context * 2 * net.kv_size * net.item_bytes  # of one request
    make = partial(Kernel, part="kv", write_bytes=0)
    if batch >= _SHARED_FROM[rows > 1] and context >= _SHARED_CONTEXT:
        blocks = net.num_heads * -(-batch * rows // _TILE_ROWS)
        yield make(name="shared", read_bytes=keys_bytes, walk=Walk(blocks, context, _TILE_ROWS))
        yield make(name="own", read_bytes=0, launches=2)
    elif rows > 1:
        blocks = batch * net.num_heads * -(-rows // _TILE_ROWS)
        yield make(name="unsplit", read_bytes=keys_bytes, walk=Walk(blocks, context, _TILE_ROWS))
    else:
        device = DEVICES["A100"]
        through_cache = batch * device.bandwidth_bytes_s * SWEEP.bandwidth_share / CACHE_BYTES_S
        yield make(name="split", read_bytes=int(keys_bytes * max(1.0, through_cache)), launches=2)
