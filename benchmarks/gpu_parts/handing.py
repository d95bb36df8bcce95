"""Weights from the learner to an engine: cast, packed, checked, over PCIe and between processes; peak memory."""

import multiprocessing
import time
from typing import Any

import torch

from benchmarks.gpu_parts.session import Session, part
from benchmarks.tools.qwen import network
from benchmarks.weights_handoff import measure
from models.checkpoint import hf_shapes, hf_tensors
from models.manifest import lay_out
from models.pieces import Scatter, from_host
from models.weights import pack_each, unpack
from policies.roofline.learning import HOST_COPY_BYTES_S


def run(session: Session) -> None:
    for size in session.sizes("7b", "1.5b"):
        model = session.model(size, torch.float32)
        wire_bytes = network(model.config).parameters * 2
        session.free()
        start_s = time.perf_counter()
        largest = 0
        for _, tensor in hf_tensors(model, torch.bfloat16):
            largest = max(largest, tensor.nbytes)
        session.synchronize()
        session.row(
            size=size,
            cast_s=time.perf_counter() - start_s,
            peak_gib=session.peak_gib(),
            predicted_peak_gib=(2 * wire_bytes + largest) / 2**30,
            largest_tensor_bytes=largest,
        )
        _through_the_host(session, size, model, wire_bytes)
        del model
        session.free()
        if session.left_s < 8:
            break
    _between_processes(session)


def _through_the_host(session: Session, size: str, model: Any, wire_bytes: int) -> None:
    """Measure the object store's way: off the device into one buffer, checked, read by another, onto the device."""
    specs, total_bytes = lay_out((name, "bfloat16", tuple(shape)) for name, shape in hf_shapes(model).items())
    device = next(model.parameters()).device
    start_s = time.perf_counter()
    manifest, buffer = pack_each(specs, total_bytes, hf_tensors(model, torch.bfloat16), 1, device=device)
    packed_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    tensors = dict(unpack(manifest, buffer))
    checked_s = time.perf_counter() - start_s
    targets = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
    session.synchronize()
    start_s = time.perf_counter()
    if device.type == "cuda":
        from_host(buffer, Scatter(manifest.tensors, targets), device)
    else:
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    session.synchronize()
    loaded_s = time.perf_counter() - start_s
    session.row(
        size=size,
        wire_bytes=wire_bytes,
        pack_s=packed_s,
        predicted_pack_s=2 * wire_bytes / HOST_COPY_BYTES_S + wire_bytes / session.gpu.host_bytes_s,
        check_s=checked_s,
        load_s=loaded_s,
        predicted_load_s=wire_bytes / session.gpu.host_bytes_s,
        gb_s=wire_bytes / (packed_s + checked_s + loaded_s) / 1e9,
    )


def _child(inbox: Any, outbox: Any) -> None:
    tensor = inbox.get()
    kept = torch.empty_like(tensor)
    found = []
    for _ in range(4):
        if tensor.is_cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        kept.copy_(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start_s)
    outbox.put(min(found))


def _between_processes(session: Session) -> None:
    """Measure CUDA IPC: another process copies memory of this one, on the same GPU."""
    if session.device != "cuda" or session.rehearse:
        session.row(ipc="only on a GPU: a pretended one has no memory that two processes share")
        return
    from torch.multiprocessing import reductions

    reductions.init_reductions()  # type: ignore[no-untyped-call]
    size = 1 << 31
    tensor = torch.zeros(size, dtype=torch.uint8, device=session.device)
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_child, args=(inbox, outbox))
    start_s = time.perf_counter()
    child.start()
    inbox.put(tensor)
    try:
        copy_s = outbox.get(timeout=max(10.0, session.left_s))
    finally:
        child.kill()
        child.join()
    session.row(
        ipc_gb_s=size / copy_s / 1e9,
        predicted_ipc_gb_s=session.gpu.bandwidth_bytes_s / 2 / 1e9,
        with_start_s=time.perf_counter() - start_s,
    )
    del tensor
    session.free()
    if session.left_s > 15:
        mib = 4096
        seconds = measure(torch.device(session.device, 0), mib, rounds=1)
        session.row(**{f"{way}_gb_s": mib * 2**20 / s / 1e9 for way, (_, s) in seconds.items()})


if __name__ == "__main__":
    part(run, "handing")
