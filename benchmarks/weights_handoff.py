"""New weights from a learner's rank to one engine process: a comparison of the ways of `cluster.weights`, on this
machine and this device.

The object store's way is its work without Ray: packed and checked in one process, copied into shared memory, checked
and loaded in the other. `old` is its earlier version: CRC-32 on both sides, all copies in the engine's dtype at once,
pageable copies. A broadcast needs two GPUs, or a CPU.

    python -m benchmarks.weights_handoff --mib 1024 --rounds 3

Owns `results/weights_handoff.json`.
"""

import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.receive import Receiver
from actors.handoff.send import Layout, Sender
from actors.processes.link import share_bytes, shared_bytes
from benchmarks.harness import RESULTS, command, write
from contracts.handoff import Offer, Terms, Way
from models.device import choose_device
from models.manifest import WeightsManifest, lay_out
from models.pieces import Scatter, from_host
from models.weights import pack, pack_each, unpack

LIMIT_S = 300.0
MATRIX_MIB = 32  # in bfloat16


def main(
    mib: Annotated[int, "of weights, in bfloat16"] = 512,
    rounds: Annotated[int, "warm ones, after a cold one, which starts groups and maps memory"] = 5,
    device: Annotated[str, "where both ends' tensors are", ("auto", "cpu", "cuda")] = "auto",
    out: Path = RESULTS / "weights_handoff.json",
) -> None:
    place = torch.device(choose_device(device, "--device"))
    seconds = measure(place, mib, rounds)
    size_bytes = max(1, mib // MATRIX_MIB) * MATRIX_MIB * 2**20
    warm = {way: median(values[1:]) for way, values in seconds.items()}
    rows = [
        {
            "way": way,
            "cold_s": round(values[0], 4),
            "warm_s": round(warm[way], 4),
            "warm_gb_s": round(size_bytes / warm[way] / 1e9, 2),
            "times_old": round(warm["old"] / warm[way], 2),
            "times_old_cold": round(seconds["old"][0] / values[0], 2),
        }
        for way, values in seconds.items()
    ]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    settings = {"bytes": size_bytes, "rounds": rounds, "seed": 0}
    write(out, "how soon does an engine have new weights, by way?", {"rows": rows}, settings=settings)


def measure(device: torch.device, mib: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a cold round and `rounds` warm ones, taken in turn, by way, from the learner's float32
    tensors to the engine's bfloat16 ones. Raises AssertionError if two ways loaded different weights."""
    tensors = learners(mib, device)
    layout = lay_out((name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=engine, args=(theirs, str(device), mib), daemon=True)
    child.start()
    try:
        pieces = InPieces(device, layout, ours)
        ways: dict[str, Callable[[], None]] = {
            "old": partial(through_memory, ours, tensors, layout, device, old=True),
            "store": partial(through_memory, ours, tensors, layout, device, old=False),
            "ipc": partial(pieces.hand_over, tensors, "ipc"),
        }
        if device.type == "cpu":
            ways["broadcast"] = partial(pieces.hand_over, tensors, "broadcast")
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        sums = set()
        for _ in range(rounds + 1):
            for way, hand_over in ways.items():
                start_s = time.perf_counter()
                hand_over()
                _answer(ours)
                seconds[way].append(time.perf_counter() - start_s)
                ours.send("sum")  # outside of the timed part
                sums.add(_answer(ours))
        assert len(sums) == 1, f"the ways loaded different weights: {sums}"
    finally:
        child.kill()
        child.join()
    return seconds


def learners(mib: int, device: torch.device) -> dict[str, Tensor]:
    """Return float32 matrices."""
    rows = MATRIX_MIB * 2**20 // 2 // 4096
    return {f"layers.{i}.weight": torch.randn(rows, 4096, device=device) for i in range(max(1, mib // MATRIX_MIB))}


def in_engines_dtype(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor at a time in the engine's dtype."""
    return ((name, tensor.bfloat16()) for name, tensor in tensors.items())


class InPieces:
    """The learner's end of hand-overs."""

    def __init__(self, device: torch.device, layout: Layout, pipe: Connection) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        self._address, self._layout, self._pipe = f"127.0.0.1:{self._store.port}", layout, pipe
        self._sender, self._count = Sender(0, 1, device, self._address), 0

    def hand_over(self, tensors: Mapping[str, Tensor], way: Way) -> None:
        self._count += 1
        terms = Terms(name=str(self._count), version=1, receivers=1, way=way, limit_s=LIMIT_S)
        specs, total_bytes = self._layout
        offer = Offer(
            store=self._address,
            name=terms.name,
            version=1,
            tensors=tuple(specs),
            total_bytes=total_bytes,
            receiver=0,
            limit_s=LIMIT_S,
        )
        self._pipe.send(offer)
        self._sender.send(terms, self._layout, in_engines_dtype(tensors))


def through_memory(
    pipe: Connection, tensors: Mapping[str, Tensor], layout: Layout, device: torch.device, *, old: bool
) -> None:
    """Hand over one buffer, copied like the object store does, into memory that the engine's process maps."""
    if old:
        manifest, buffer = pack(dict(in_engines_dtype(tensors)), 1)
        zlib.crc32(buffer.data)
    else:
        specs, total_bytes = layout
        manifest, buffer = pack_each(specs, total_bytes, in_engines_dtype(tensors), 1, device=device)
    descriptor = share_bytes(buffer.copy())
    try:
        pipe.send((old, manifest, f"/proc/{os.getpid()}/fd/{descriptor}"))
        pipe.poll(LIMIT_S)  # it has the memory open, and has finished with it
    finally:
        os.close(descriptor)


def engine(pipe: Connection, device_name: str, mib: int) -> None:
    """Run the other process: load weights in the requested way, and answer with the reason if that fails."""
    device = torch.device(device_name)
    targets = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in learners(mib, device).items()}
    receiver = Receiver(device)
    while True:
        told = pipe.recv()
        answer: object = None
        try:
            if isinstance(told, Offer):
                receiver.receive(told, targets)
            elif told == "sum":
                answer = float(sum(tensor.double().sum() for tensor in targets.values()))
            else:
                old, manifest, path = told
                _load(old, manifest, path, targets=targets, device=device)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            answer = error
        pipe.send(answer)


def _load(
    old: bool, manifest: WeightsManifest, path: str, *, targets: Mapping[str, Tensor], device: torch.device
) -> None:
    with Path(path).open("r+b") as file:
        buffer = shared_bytes(os.dup(file.fileno()), manifest.total_bytes)
    if old:
        zlib.crc32(buffer.data)
    named = unpack(manifest, buffer, verify=not old)
    if device.type == "cuda" and not old:
        from_host(buffer, Scatter(manifest.tensors, targets), device)
        return
    for name, tensor in named:
        targets[name].copy_(tensor)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError("the engine's process does not answer")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


if __name__ == "__main__":
    command(main)
