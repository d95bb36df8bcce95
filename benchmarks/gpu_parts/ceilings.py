"""The device's peaks in practice: copies, products, launches, transfers. Proposes an entry for the predictor."""

import time

import torch
import torch.nn.functional as F

from benchmarks.gpu_parts.session import Session, part
from policies.roofline.timing import DEFAULT, product_s


def run(session: Session) -> None:
    share = _copies(session)
    flops = _products(session)
    kernel_s, eager_s = _launches(session)
    host = _transfers(session)
    session.row(
        proposed_device=session.gpu.name,
        bandwidth_share=share,
        predicted_bandwidth_share=DEFAULT.bandwidth_share,
        bf16_flops_s=flops,
        predicted_bf16_flops_s=session.gpu.bf16_flops_s,
        graph_kernel_s=kernel_s,
        predicted_graph_kernel_s=DEFAULT.kernel_s + DEFAULT.gap_s,
        eager_kernel_s=eager_s,
        predicted_eager_kernel_s=DEFAULT.eager_kernel_s,
        host_bytes_s=host,
        predicted_host_bytes_s=session.gpu.host_bytes_s,
    )


def _copies(session: Session) -> float:
    """Return the share of memory bandwidth that a copy reaches; also measures a read-only sum, as weights are read."""
    size = 1 << 16 if session.rehearse else 1 << 31
    source = torch.zeros(size, dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    copy_s = session.device_seconds(target.copy_, source)
    peak = session.gpu.bandwidth_bytes_s
    session.row(copy_gb_s=2 * size / copy_s / 1e9, predicted_copy_gb_s=peak * DEFAULT.bandwidth_share / 1e9)
    words = source.view(torch.int32)
    read_s = session.device_seconds(words.max)
    session.row(read_gb_s=size / read_s / 1e9, predicted_read_gb_s=peak * DEFAULT.bandwidth_share / 1e9)
    return 2 * size / copy_s / peak


def _products(session: Session) -> float:
    """Return the best flops per second over the shapes of a 7B layer, from one row to a prompt chunk."""
    best = 0.0
    shapes = ((37_888, 3584), (3584, 18_944), (4608, 3584)) if not session.rehearse else ((64, 32),)
    for n, k in shapes:
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=session.device)
        for m in (1, 8, 64, 128, 512, 4096) if not session.rehearse else (1, 8):
            x = torch.randn(m, k, dtype=torch.bfloat16, device=session.device)
            seconds = session.device_seconds(F.linear, x, weight)
            moving = 2.0 * (n * k + m * k + m * n) / (session.gpu.bandwidth_bytes_s * DEFAULT.bandwidth_share)
            computing = product_s(m, n, k, session.gpu, DEFAULT)
            predicted = (moving**DEFAULT.overlap + computing**DEFAULT.overlap) ** (1 / DEFAULT.overlap)
            session.row(m=m, n=n, k=k, us=seconds * 1e6, predicted_us=predicted * 1e6)
            best = max(best, 2.0 * m * n * k / seconds)
    return best


def _launches(session: Session) -> tuple[float, float]:
    """Return the seconds of an almost empty kernel: in a graph, and launched alone."""
    x = torch.zeros(64, device=session.device)
    count = 10 if session.rehearse else 500

    def work() -> None:
        for _ in range(count):
            x.add_(1.0)

    eager_s = session.seconds(work) / count
    graph_s = session.seconds(session.captured(work)) / count
    session.row(eager_us=eager_s * 1e6, graph_us=graph_s * 1e6)
    start_s = time.perf_counter()
    for _ in range(count):
        session.synchronize()
    session.row(idle_sync_us=(time.perf_counter() - start_s) / count * 1e6)
    return graph_s, eager_s


def _transfers(session: Session) -> float:
    """Return bytes per second from host to device and back, pinned and pageable; also measures a small copy."""
    best = 0.0
    pinned_too = session.device == "cuda"
    for size in (4096, 1 << 20, 1 << 29) if not session.rehearse else (4096,):
        for pinned in (True, False) if pinned_too else (False,):
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            there = torch.empty(size, dtype=torch.uint8, device=session.device)
            up_s = session.seconds(there.copy_, host, True)
            down_s = session.seconds(host.copy_, there, True)
            session.row(bytes=size, pinned=pinned, up_us=up_s * 1e6, down_us=down_s * 1e6, up_gb_s=size / up_s / 1e9)
            best = max(best, size / up_s)
    return best


if __name__ == "__main__":
    part(run, "ceilings")
