"""The time until N nodes hold new weights, and who sends how much: Ray's object store against a broadcast of pieces.

    python -m experiments.weights_nodes [--nodes 1 2 4 8 16] [--sizes 20 80] [--rounds 2]

One source (the learner's rank 0) and N receivers, each on a separate raylet (`tests.fleet.nodes`). Sizes are MiB in
bfloat16: 20 of a 10M-parameter model, 80 of one of 40M. Ways:

    store      one buffer through the object store, read in place. The raylets' metrics give what Ray moved: a node that
               sends more than one copy feeds others, and the source's share shows whether it is a tree
    broadcast  pieces over gloo into live tensors, checksums on both ends: the way of `cluster.weights=broadcast`
    delta      through the object store, only what changed: a delta that receivers apply to their own copy
    changes    by broadcast, only what changed
    transport  Ray's direct transport of tensors (gloo), from the source to each. A receiver must be made with
               enable_tensor_transport (else the transfer fails after 60 s, and Ray 2.60 kills the actors at both ends),
               and a group never becomes larger than a process's first one, so no node can join

`delta` and `changes` are `cluster.weights_delta=always`; CHANGED of the elements change each time. `pause_s` is from
the learner's first work on new weights until all receivers hold them. An engine's load from its worker's buffer is the
same for `store` and `delta`, and no part of it.

All raylets share one machine's memory and its two cores, so a copy to a second node takes the time of the first again,
whoever sends it. On real nodes receivers copy in parallel. Owns `results/weights_nodes.json`.
"""

import logging
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.experimental.collective import create_collective_group, destroy_all_collective_groups

from actors.handoff.base import BaseWeights
from actors.handoff.receive import Receiver
from actors.handoff.send import Sender
from benchmarks.harness import ROOT, command, write
from contracts.handoff import Offer, Sent, Terms
from models.checksum import checksum
from models.delta import Held, encode
from models.manifest import WeightsManifest, lay_out
from tests.fleet.nodes import Nodes

LIMIT_S = 120.0
ROWS = 4096  # per matrix
WAYS = ("store", "delta", "broadcast", "changes", "transport")
CHANGED = 0.018  # of a bfloat16 model's elements, as estimated for a learning rate of 1e-6
REPORT_MS = 1000  # period of a raylet's metrics
REPORTED_S = 20.0  # after this time all have reported
_MOVED = re.compile(r'^ray_object_manager_bytes\{.*Type="(\w+)".*\} (\S+)$', re.MULTILINE)


class Source:
    """The learner's side."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._tensors: dict[str, torch.Tensor] = {}
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        self._sender = Sender(0, 1, torch.device("cpu"), f"127.0.0.1:{self._store.port}")
        self._kept: Any = None

    def prepare(self, mib: int) -> Offer:
        """Make weights of that size. Returns the offer to receiver 0, of a round before the first."""
        self._kept = None
        self._tensors = dict(tensors_of(mib))
        self._layout = specs, total_bytes = lay_out(
            (name, "bfloat16", tuple(t.shape)) for name, t in self._tensors.items()
        )
        self._buffer = np.zeros(total_bytes, np.uint8)
        return Offer(
            store=f"127.0.0.1:{self._store.port}",
            name="",
            version=0,
            tensors=tuple(specs),
            total_bytes=total_bytes,
            receiver=0,
            limit_s=LIMIT_S,
        )

    def put(self) -> "list[ray.ObjectRef[Any]]":
        """Put a new object, and release the previous one."""
        self._buffer[:8] += 1
        self._kept = ray.put(self._buffer)
        return [self._kept]

    def whole(self) -> "tuple[WeightsManifest, list[ray.ObjectRef[Any]]]":
        """Put the buffer, the base of the first `delta`, as `LearnerRank.publish` does."""
        self._manifest = WeightsManifest(0, checksum(self._buffer), *self._layout)
        return self._manifest, self.put()

    def delta(self) -> "tuple[WeightsManifest, list[ray.ObjectRef[Any]], int]":
        """Put what differs from the buffer that was put before, then the new one. Returns the delta and its size."""
        old = Held(self._manifest, ray.get(self._kept))
        self._manifest = WeightsManifest(old.manifest.version + 1, checksum(self._buffer), *self._layout)
        found = encode(old, Held(self._manifest, self._buffer), limit_bytes=self._buffer.size)
        assert found is not None
        self._kept = ray.put(self._buffer)
        return self._manifest, [ray.put(found)], found.size

    def change_buffer(self, seed: int) -> None:
        """Flip a bit of CHANGED of the buffer's elements."""
        flat = self._buffer.view(np.int16)
        flat[np.random.default_rng(seed).random(flat.size) < CHANGED] ^= 1

    def send(self, round_: int, receivers: int, changes: bool) -> Sent:
        terms = Terms(
            name=str(round_), version=round_, receivers=receivers, way="broadcast", limit_s=LIMIT_S, changes=changes
        )
        sent = self._sender.send(terms, self._layout, iter(self._tensors.items()))
        assert sent is not None
        return sent

    def change(self, seed: int) -> None:
        """Flip a bit of CHANGED of the elements."""
        random = torch.Generator().manual_seed(seed)
        for tensor in self._tensors.values():
            flat = tensor.view(-1).view(torch.int16)
            flat[torch.rand(flat.numel(), generator=random) < CHANGED] ^= 1

    @ray.method(tensor_transport="gloo")
    def tensor(self) -> Any:
        """Return all weights as one tensor."""
        return torch.from_numpy(self._buffer)


class Sink:
    """An engine's side."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._targets: dict[str, torch.Tensor] = {}
        self._receiver = Receiver(torch.device("cpu"))
        self._held: WeightsManifest | None = None
        self._base = BaseWeights()

    def prepare(self, mib: int) -> None:
        self._targets, self._held = dict(tensors_of(mib)), None

    def fetch(self, refs: "list[ray.ObjectRef[Any]]") -> int:
        """Fetch the weights. Returns their bytes."""
        return int(ray.get(refs[0]).nbytes)

    def keep(self, manifest: WeightsManifest, refs: "list[ray.ObjectRef[Any]]") -> None:
        """Fetch whole weights as the base of deltas."""
        self._base.keep(manifest, ray.get(refs[0]))

    def change(self, manifest: WeightsManifest, refs: "list[ray.ObjectRef[Any]]") -> int:
        """Make the weights from the held ones and a delta, as a worker does. Returns their bytes."""
        return self._base.change(manifest, [ray.get(refs[0])]).size

    def receive(self, offer: Offer) -> str:
        held, self._held = self._held, None
        found = self._receiver.receive(offer, self._targets, held)
        self._held = WeightsManifest(offer.version, found.checksum, offer.tensors, offer.total_bytes)
        return found.way

    def take(self, tensor: Any) -> int:
        return int(tensor.numel())


def tensors_of(mib: int) -> list[tuple[str, torch.Tensor]]:
    """Return matrices of 4 MiB."""
    return [(f"layers.{i}.weight", torch.zeros(ROWS, 512, dtype=torch.bfloat16)) for i in range(max(1, mib // 4))]


def moved() -> dict[str, dict[str, float]]:
    """Return the bytes that each node's object manager has sent and received so far, by node id."""
    found: dict[str, dict[str, float]] = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if not node["Alive"]:
            continue
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        counts = {"sent": 0.0, "received": 0.0}
        for kind, value in _MOVED.findall(text):
            if kind.startswith("Pushed"):
                counts["sent"] += float(value)
            elif kind == "Received":
                counts["received"] += float(value)
        found[node["NodeID"]] = counts
    return found


def rounds_of(
    ways: Sequence[str], source: Any, sinks: Sequence[Any], numbers: Iterator[int], mib: int, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per way."""
    many = len(sinks)
    offer: Offer = ray.get(source.prepare.remote(mib), timeout=LIMIT_S)
    ray.get([sink.prepare.remote(mib) for sink in sinks], timeout=LIMIT_S)

    def by_store() -> None:
        ray.get([sink.fetch.remote(refs) for sink in sinks], timeout=LIMIT_S)

    delta_bytes: list[int] = []  # of the rounds of deltas

    def by_broadcast(changes: bool = False) -> None:
        number = next(numbers)
        named = replace(offer, name=str(number), version=number)
        sending = source.send.remote(number, many, changes)
        taken = ray.get([s.receive.remote(replace(named, receiver=i)) for i, s in enumerate(sinks)], timeout=LIMIT_S)
        sent: Sent = ray.get(sending, timeout=LIMIT_S)
        assert set(sent.ways) == {"broadcast"}
        assert set(taken) == {"delta" if sent.delta_bytes else "broadcast"}
        if changes:
            delta_bytes.append(sent.delta_bytes)

    def by_delta() -> None:
        manifest, refs, size = ray.get(source.delta.remote(), timeout=LIMIT_S)
        delta_bytes.append(size)
        taken = ray.get([sink.change.remote(manifest, refs) for sink in sinks], timeout=LIMIT_S)
        assert set(taken) == {offer.total_bytes}

    def by_transport() -> None:
        tensor = source.tensor.remote()
        taken = ray.get([sink.take.remote(tensor) for sink in sinks], timeout=LIMIT_S)
        assert set(taken) == {offer.total_bytes}

    calls: dict[str, Callable[[], None]] = {
        "store": by_store,
        "delta": by_delta,
        "broadcast": by_broadcast,
        "changes": partial(by_broadcast, True),
        "transport": by_transport,
    }
    rows = []
    for way in ways:
        before, seconds, puts = moved() if way == "store" else {}, [], []
        delta_bytes.clear()
        if way == "delta":
            manifest, refs = ray.get(source.whole.remote(), timeout=LIMIT_S)
            ray.get([sink.keep.remote(manifest, refs) for sink in sinks], timeout=LIMIT_S)
        for _ in range(rounds + 1):
            if way == "store":
                start_s = time.perf_counter()
                refs = ray.get(source.put.remote(), timeout=LIMIT_S)
                puts.append(time.perf_counter() - start_s)
            if way in ("delta", "changes"):
                change = source.change if way == "changes" else source.change_buffer
                ray.get(change.remote(next(numbers)), timeout=LIMIT_S)
            start_s = time.perf_counter()
            calls[way]()
            seconds.append(time.perf_counter() - start_s)
        row: dict[str, Any] = {
            "way": way,
            "nodes": many,
            "mib": mib,
            "cold_s": round(seconds[0], 4),
            "warm_s": round(median(seconds[1:]), 4),
            "pause_s": round(median(a + b for a, b in zip_longest(seconds[1:], puts[1:], fillvalue=0.0)), 4),
            "gb_s": round(many * mib * 2**20 / median(seconds[1:]) / 1e9, 2),
        }
        if way in ("delta", "changes"):
            row["whole_bytes"], row["delta_bytes"] = offer.total_bytes, int(median(delta_bytes[1:]))
        if way == "store":
            row["put_s"] = round(median(puts[1:]), 4)
            row |= fan_out(before, rounds + 1, mib, many)
        rows.append(row)
    return rows


def fan_out(before: dict[str, dict[str, float]], rounds: int, mib: int, many: int) -> dict[str, Any]:
    """Return copies per round: sent by the node that sends most, sent by all others, and the most received by a node.
    Every receiver's node needs one: raises RuntimeError if others were counted."""
    size, deadline_s, total = mib * 2**20 * rounds, time.monotonic() + REPORTED_S, -1.0
    while True:  # raylets report, then their agents export
        after, last = moved(), total
        total = sum(after[n]["received"] - before.get(n, {}).get("received", 0.0) for n in after) / size
        if (total >= many and total == last) or time.monotonic() > deadline_s:
            break
        time.sleep(2 * REPORT_MS / 1000)
    sent = sorted(((after[n]["sent"] - before.get(n, {}).get("sent", 0.0)) / size for n in after), reverse=True)
    received = [(after[n]["received"] - before.get(n, {}).get("received", 0.0)) / size for n in after]
    if abs(sum(sent) - many) > 0.05 * many or abs(total - many) > 0.05 * many or max(received) > 1.05:
        raise RuntimeError(f"{many} receivers need {many} copies: sent {sent}, received {received}")
    return {
        "copies_sent_by_busiest": round(sent[0], 2),
        "copies_sent_by_others": round(sum(sent[1:]), 2),
        "nodes_that_send": sum(copies > 0.05 for copies in sent),
        "copies_received_at_most": round(max(received), 2),
    }


def main(
    nodes: Annotated[Sequence[int], "receivers"] = (1, 2, 4, 8, 16),
    sizes: Annotated[Sequence[int], "MiB"] = (20, 80),
    rounds: Annotated[int, "warm ones, after a cold one"] = 2,
    ways: Annotated[Sequence[str], "in turn", WAYS] = WAYS,
    out: Path = ROOT / "experiments/results/weights_nodes.json",
) -> int:
    rows: list[dict[str, Any]] = []
    store_bytes = max(3 * max(sizes), 128) * 2**20  # an object, the previous one, and room; Ray needs 75 MiB
    settings = {"metrics_report_interval_ms": REPORT_MS}
    with (
        tempfile.TemporaryDirectory(prefix="plw", dir="/tmp", ignore_cleanup_errors=True) as folder,
        Nodes(Path(folder), cpus=0, store_bytes=store_bytes, settings=settings) as cluster,
    ):
        cluster.add("source", cpus=1, resources={"source": 1})
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            several: Any = ray.remote  # its annotations lack the option
            sink: Any = several(enable_tensor_transport=True)(Sink)  # otherwise a tensor never arrives
            numbers, there = count(1), 0
            for wanted in nodes:
                for index in range(there, there := max(there, wanted)):
                    cluster.add(f"sink-{index}", cpus=1, resources={"sink": 1})
                source: Any = ray.remote(Source).options(num_cpus=0, resources={"source": 1}).remote()
                sinks = [sink.options(num_cpus=0, resources={"sink": 1}).remote() for _ in range(wanted)]
                if "transport" in ways:  # new actors: a process never joins a larger Ray group than its first
                    create_collective_group([source, *sinks], backend="torch_gloo")
                for mib in sizes:
                    found = rounds_of(ways, source, sinks, numbers, mib, rounds)
                    rows += found
                    for row in found:
                        print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
                destroy_all_collective_groups()  # type: ignore[no-untyped-call]
                for actor in (source, *sinks):
                    ray.kill(actor)
                question = "how soon do N nodes hold new weights, and who sends how much?"
                write(out, question, {"rows": rows}, settings={"rounds": rounds, "seed": 0})
        finally:
            ray.shutdown()
    assert not cluster.left, cluster.left
    return 0


if __name__ == "__main__":
    command(main)
