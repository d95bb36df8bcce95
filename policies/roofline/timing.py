"""The time of kernels on a device, in milliseconds. Owns the constants and their fit; independent of engines.

    kernel = max(bytes, bytes under way, flops, walk of its blocks, launch floor) + gap;   step = sum of kernels + host

There is no gap between kernels of which the later starts while the earlier ends (`Kernel.early`), nor do products wait
for their first weights there: an assumption, from Hopper on.

Bytes and flops of a matrix product overlap imperfectly: their joint time is the p-norm of both. Flops come in tiles and
waves. The best of a few tile shapes and splits of k counts, as the libraries choose, and each wave lasts as long as one
tile.

SWEEP is fitted to every other decoding cell and to the draft lengths 3 and 15 of EfficientRollout's A100 sweep of
Qwen2.5-7B (tests/policies/test_roofline.py bounds the errors, and lists the remaining ones). It describes the engine of
that sweep. Ours was not measured on a GPU yet. So DEFAULT takes its rates without its cost per request, which is Python
there and arrays here. `benchmarks.gpu` prints what to correct.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from config.network import Network
from policies.roofline.devices import Device
from policies.roofline.kernels import Kernel, Part, Stream, Walk, floor_bytes, step_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """The share of its peaks that a device reaches, and the costs that are neither bytes nor flops."""

    bandwidth_share: float
    matmul_share: float  # of the peak, by a tile of 128 x 256 in a full wave
    overlap: float  # p of the p-norm; infinite: bytes and flops hide each other entirely
    kernel_s: float = 1.8e-6  # shortest kernel in a graph
    gap_s: float = 0.7e-6  # between two of them
    # Of the host, for a launch without a graph: 8 us of Python, torch and Triton (benchmarks.step_host, EPYC), and 2 of
    # CUDA's own, assumed. The host runs ahead of the device: a step takes as long as the slower of the two.
    eager_kernel_s: float = 10e-6
    tile_s: float  # 64 keys of a head of 128 against 64 rows of queries, by one block
    crowding: float  # factor by which another block on a multiprocessor prolongs the others' walk
    instruction_s: float = 4.6e-12  # of one thread, by one multiprocessor of 128 lanes at 1.7 GHz. Not fitted.
    # From a load to its data, under load (an assumption): what is under way at once bounds what arrives in that time.
    latency_s: float = 0.7e-6
    local_bytes_s: float = 1.1e11  # that one multiprocessor reads of the L2 cache: 64 bytes a clock. Not fitted.
    resident: int = 3  # programs of a product in few bits at once on a multiprocessor, by registers and shared memory
    host_s: float  # per step: schedule, upload, download, the loop in Python
    request_s: float = 0.0  # per step and request


# Tile of a matrix product (rows, columns) and the share of matmul_share it reaches: small ones load more than they use.
_TILES = ((64, 64, 0.59), (64, 128, 0.73), (128, 64, 0.73), (128, 128, 0.92), (128, 256, 1.0), (256, 128, 1.0))
_TILE_SHARES = {(rows, columns): share for rows, columns, share in _TILES}
_FEW_ROWS_SHARE = 0.5  # of tiles below: another instruction (mma.sync), an assumption
_SPLITS = (1, 2, 3, 4, 6, 8)

SWEEP = DeviceRates(
    bandwidth_share=0.94,
    matmul_share=1.0,
    overlap=2.7,
    tile_s=1.59e-6,
    crowding=0.41,
    host_s=0.92e-3,
    request_s=34e-6,
)
DEFAULT = replace(SWEEP, request_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One engine step, predicted."""

    ms: float
    floor_ms: float  # every weight and every key and value once, at full bandwidth
    launches: int
    by_part_ms: dict[Part, float]
    host_ms: float
    launch_ms: float  # what launch floors and gaps add to bytes and flops, and without graphs the host's launches

    @property
    def decides(self) -> str:
        """The largest contribution: weights, kv, sampling, rest, launches or host."""
        shares: dict[str, float] = dict(self.by_part_ms) | {"launches": self.launch_ms, "host": self.host_ms}
        return max(shares, key=shares.__getitem__)


def kernel_s(kernel: Kernel, device: Device, rates: DeviceRates = DEFAULT, *, behind_early: bool = False) -> float:
    """Seconds of all its launches, on the device. behind_early: the kernel before it is an early one too."""
    overlapped = kernel.early and device.overlaps
    gaps = kernel.launches if not overlapped else int(not behind_early)  # its own launches follow one another
    least = rates.kernel_s * kernel.launches
    return max(least, busy_s(kernel, device, rates, behind_early=behind_early)) + rates.gap_s * gaps


def busy_s(kernel: Kernel, device: Device, rates: DeviceRates, *, behind_early: bool = False) -> float:
    """Return the seconds by bytes, flops and walks alone."""
    moving = kernel.moved_bytes / (device.bandwidth_bytes_s * rates.bandwidth_share)
    if kernel.product is not None:
        added_s = 0.0
        if kernel.stream is None:
            computing = product_s(*kernel.product, device, rates)
        else:
            stream = kernel.stream
            programs = min(stream.programs, rates.resident * device.multiprocessors)
            moving = max(moving, kernel.read_bytes * rates.latency_s / (programs * stream.under_way))
            computing = _streamed_s(kernel, stream, device, rates)
            if not (behind_early and device.overlaps):
                added_s = rates.latency_s  # the first bytes
            if stream.splits > 1:  # sums, there and back
                added_s += 2 * rates.latency_s + stream.added / rates.local_bytes_s
        return float((moving**rates.overlap + computing**rates.overlap) ** (1 / rates.overlap)) + added_s
    computing = kernel.flops / (device.bf16_flops_s * rates.matmul_share)
    if kernel.by_row is not None:
        rows, instructions = kernel.by_row
        computing = rates.latency_s + -(-rows // device.multiprocessors) * instructions * rates.instruction_s
    return max(moving, computing, 0.0 if kernel.walk is None else walk_s(kernel.walk, device, rates))


def _streamed_s(kernel: Kernel, stream: Stream, device: Device, rates: DeviceRates) -> float:
    """Return the seconds of a product's instructions and flops, by whole waves of its own tiles."""
    assert kernel.product is not None
    rate = device.bf16_flops_s * rates.matmul_share / device.multiprocessors * kernel.speed
    share = _TILE_SHARES.get((stream.rows, stream.columns), _FEW_ROWS_SHARE)
    flops = 2.0 * stream.rows * stream.columns * kernel.product[2] / stream.splits
    program_s = flops / (rate * share) + kernel.unpacked / stream.programs * rates.instruction_s
    return -(-stream.programs // device.multiprocessors) * program_s


@lru_cache(maxsize=65536)
def product_s(m: int, n: int, k: int, device: Device, rates: DeviceRates) -> float:
    """Return the seconds of the flops of [m, k] times [k, n] alone, by the best tile and split of k."""
    per_multiprocessor = device.bf16_flops_s * rates.matmul_share / device.multiprocessors
    best = math.inf
    for rows, columns, share in _TILES:
        tiles = -(-m // rows) * -(-n // columns)
        for split in _SPLITS:
            waves = -(-tiles * split // device.multiprocessors)
            seconds = waves * 2.0 * rows * columns * k / split / (per_multiprocessor * share)
            if split > 1:  # partial sums in float32, through memory
                seconds += 8.0 * m * n * split / device.bandwidth_bytes_s
            best = min(best, seconds)
    return best


def walk_s(walk: Walk, device: Device, rates: DeviceRates) -> float:
    """Return the seconds until the last block has walked its keys."""
    waves = -(-walk.blocks // device.multiprocessors)
    tile_s = rates.tile_s * max(walk.rows, 32) / 64
    return (1 + rates.crowding * (waves - 1)) * -(-walk.keys // 64) * tile_s


def time_of(
    kernels: Iterable[Kernel],
    device: Device,
    rates: DeviceRates = DEFAULT,
    *,
    requests: int = 0,
    floor_s: float = 0.0,
    eager: bool = False,
) -> StepTime:
    """The step that launches these, one after the other. eager: without a graph, by a host that runs ahead."""
    parts: dict[Part, float] = {"weights": 0.0, "kv": 0.0, "sampling": 0.0, "rest": 0.0}
    launched, waiting, early = 0, 0.0, False
    for kernel in kernels:
        whole = kernel_s(kernel, device, rates, behind_early=early)
        busy, early = busy_s(kernel, device, rates, behind_early=early), kernel.early
        parts[kernel.part] += min(busy, whole) * 1e3
        waiting += max(0.0, whole - busy) * 1e3
        launched += kernel.launches
    host_ms = (rates.host_s + rates.request_s * requests) * 1e3
    if eager:
        waiting += max(0.0, launched * rates.eager_kernel_s * 1e3 - sum(parts.values()) - waiting)
    return StepTime(
        ms=sum(parts.values()) + waiting + host_ms,
        floor_ms=floor_s * 1e3,
        launches=launched,
        by_part_ms=parts,
        host_ms=host_ms,
        launch_ms=waiting,
    )


def step_time(
    net: Network,
    device: Device,
    batch: int,
    rows: int,
    context: int,
    rates: DeviceRates = DEFAULT,
    *,
    eager: bool = False,
) -> StepTime:
    """Return the time of our engine's step: see `policies.roofline.kernels.step_kernels`."""
    kernels = step_kernels(net, batch, rows, context)
    floor_s = floor_bytes(net, batch, context) / device.bandwidth_bytes_s
    return time_of(kernels, device, rates, requests=batch, floor_s=floor_s, eager=eager)
