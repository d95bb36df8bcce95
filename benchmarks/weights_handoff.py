"""New weights from a learner's rank to one engine process: the ways of `cluster.weights` beside each other, on this
machine and this device.

The object store's way is what it does without Ray: packed and checked in one process, copied into shared memory,
checked and loaded in the other. `old` is what it did before: CRC-32 on both sides, all copies in the engine's dtype at
once.

    python -m benchmarks.weights_handoff --mib 1024 --rounds 3
"""

import argparse
import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.receive import Receiver
from actors.handoff.send import Layout, Sender
from actors.handoff.types import Offer, Terms
from actors.processes.link import share_bytes, shared_bytes
from models.device import choose_device
from models.manifest import WeightsManifest, lay_out
from models.weights import pack_each, unpack

LIMIT_S = 300.0
WAYS = ("old", "store", "ipc", "broadcast")


def named(mib: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Matrices of 32 MiB, in the learner's float32."""
    rows = 32 * 2**20 // dtype.itemsize // 4096
    return {f"layers.{i}.weight": torch.randn(rows, 4096, device=device) for i in range(max(1, mib // 32))}


def engine(pipe: Connection, device_kind: str, mib: int) -> None:
    """The other process: load what it is told of, in the way it is told."""
    device = torch.device(device_kind)
    targets = {name: tensor.bfloat16() for name, tensor in named(mib, torch.bfloat16, device).items()}
    receiver = Receiver(device)
    while (told := pipe.recv()) is not None:
        if isinstance(told, Offer):
            checksum = receiver.receive(told, targets).checksum
        else:
            way, manifest, path = told
            with Path(path).open("r+b") as file:
                buffer = shared_bytes(os.dup(file.fileno()), manifest.total_bytes)
                checksum = zlib.crc32(buffer.data) if way == "old" else manifest.checksum
                for name, tensor in unpack(manifest, buffer, verify=way != "old"):
                    targets[name].copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        pipe.send(checksum)
        if pipe.recv():  # outside of what is timed
            pipe.send(float(sum(t.double().sum() for t in targets.values())))


def by_store(pipe: Connection, tensors: dict[str, Tensor], layout: Layout, device: torch.device, *, old: bool) -> Any:
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()} if old else {}
    source = iter(half.items()) if old else ((name, tensor.bfloat16()) for name, tensor in tensors.items())
    specs, total_bytes = layout
    manifest, buffer = pack_each(specs, total_bytes, source, 1, device=device)
    if old:
        zlib.crc32(buffer.data)
    descriptor = share_bytes(buffer.copy())  # the object store's copy, and the one into the engine's process
    try:
        pipe.send(("old" if old else "store", manifest, f"/proc/{os.getpid()}/fd/{descriptor}"))
        return pipe.recv()
    finally:
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of weights, in bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    device = torch.device(choose_device(options.device, "--device"))
    tensors = named(options.mib, torch.bfloat16, device)
    layout = lay_out((name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items())
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=engine, args=(theirs, str(device), options.mib), daemon=True
    )
    child.start()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
    )
    sender = Sender(0, 1, device, f"127.0.0.1:{store.port}")
    counter = iter(range(10**6))

    def in_pieces(way: Any) -> Any:
        terms = Terms(name=f"{next(counter)}", version=1, receivers=1, way=way, limit_s=LIMIT_S)
        manifest = WeightsManifest(1, 0, *layout)
        offer = Offer(
            store=f"127.0.0.1:{store.port}",
            name=terms.name,
            version=1,
            tensors=manifest.tensors,
            total_bytes=manifest.total_bytes,
            receiver=0,
            limit_s=LIMIT_S,
        )
        ours.send(offer)
        sender.send(terms, layout, ((name, tensor.bfloat16()) for name, tensor in tensors.items()))
        return ours.recv()

    ways: dict[str, Callable[[], Any]] = {
        "old": lambda: by_store(ours, tensors, layout, device, old=True),
        "store": lambda: by_store(ours, tensors, layout, device, old=False),
        "ipc": lambda: in_pieces("ipc"),
        "broadcast": lambda: in_pieces("broadcast"),
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sums = set()
    for _ in range(options.rounds + 1):
        for way in WAYS:
            start_s = time.perf_counter()
            ways[way]()
            seconds[way].append(time.perf_counter() - start_s)
            ours.send(True)
            sums.add(round(ours.recv(), 3))
    assert len(sums) == 1, f"the ways loaded different weights: {sums}"
    ours.send(None)
    best = {way: min(values[1:]) for way, values in seconds.items()}  # the first round starts groups and maps memory
    gigabytes = layout[1] / 1e9
    rows = {
        way: {"s": round(s, 4), "GB/s": round(gigabytes / s, 2), "times old": round(best["old"] / s, 2)}
        for way, s in best.items()
    }
    for way, row in rows.items():
        print(f"{way:10} {row['s']:8.3f} s {row['GB/s']:7.2f} GB/s  {row['times old']:6.2f} x old")
    if options.out is not None:
        options.out.write_text(json.dumps({"device": str(device), "bytes": layout[1], "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
