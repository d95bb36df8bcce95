"""Senders and receivers of hand-offs in one process or in children, over gloo and shared memory."""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.board import connect
from actors.handoff.receive import Receiver
from actors.handoff.send import Sender
from contracts.handoff import HandOffError, Offer, Received, Sent, Terms, Way
from models.manifest import WeightsManifest
from models.pieces import HOST
from models.weights import pack

LIMIT_S = 60.0
_names = itertools.count()


def some_weights(seed: int = 0) -> dict[str, Tensor]:
    """Some 700 kB: eleven pieces of the smallest size, borders in the middle of tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 257), "norm": (33,), "q": (64, 128), "k": (7, 128), "empty": (0, 4), "down": (400, 255)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Meeting:
    """A learner's store, and hand-offs over it. `store` is closed with the test's process."""

    def __init__(self, ranks: int = 1) -> None:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        self.address = f"127.0.0.1:{self.store.port}"
        self.senders = [Sender(index, ranks, HOST, self.address) for index in range(ranks)]
        for sender in self.senders:
            sender._client = connect(self.address)  # before clocks run: a slow name server may cost seconds

    def receiver(self) -> Receiver:
        receiver = Receiver(HOST)
        receiver._client, receiver._store = connect(self.address), self.address  # likewise, and not again
        return receiver

    def terms(self, receivers: int, way: Way = "auto", version: int = 1, *, changes: bool = False) -> Terms:
        name = f"{version}.{next(_names)}"
        return Terms(name=name, version=version, receivers=receivers, way=way, limit_s=LIMIT_S, changes=changes)

    def offer(self, terms: Terms, receiver: int, manifest: WeightsManifest) -> Offer:
        return Offer(
            store=self.address,
            name=terms.name,
            version=terms.version,
            tensors=manifest.tensors,
            total_bytes=manifest.total_bytes,
            receiver=receiver,
            limit_s=LIMIT_S,
        )

    def hand_over(
        self,
        weights: dict[str, Tensor],
        receivers: list["Receiver | None"],
        way: Way,
        targets: list[dict[str, Tensor]],
        *,
        tensors: Callable[[int], Iterator[tuple[str, Tensor]]] | None = None,
        held: "list[WeightsManifest | None] | None" = None,
    ) -> tuple[list[Sent | None], list[Received | HandOffError | None]]:
        """What each rank sent and each receiver got; None: a receiver that did not come. `held`: what each holds, if
        only changes are wanted."""
        manifest, _ = pack(weights, 1)
        terms = self.terms(len(receivers), way, changes=held is not None)
        sent: list[Sent | None] = [None] * len(self.senders)
        got: list[Received | HandOffError | None] = [None] * len(receivers)

        def send(rank: int) -> None:
            threading.current_thread().name = f"rank {rank}"
            given = tensors(rank) if tensors is not None else iter(weights.items())
            sent[rank] = self.senders[rank].send(terms, (manifest.tensors, manifest.total_bytes), given)

        def receive(index: int, receiver: Receiver) -> None:
            threading.current_thread().name = f"receiver {index}"
            try:
                holds = held[index] if held is not None else None
                got[index] = receiver.receive(self.offer(terms, index, manifest), targets[index], holds)
            except HandOffError as error:
                got[index] = error

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(len(self.senders))]
        threads += [
            threading.Thread(target=receive, args=(index, receiver))
            for index, receiver in enumerate(receivers)
            if receiver is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"{thread.name} still waits"
        return sent, got


def like(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 7.0) for name, tensor in weights.items()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def slow_down(
    tensors: Iterator[tuple[str, Tensor]], at: str, reached: Callable[[], Any]
) -> Iterator[tuple[str, Tensor]]:
    """`reached` is called before the tensor `at` comes."""
    for name, tensor in tensors:
        if name == at:
            reached()
        yield name, tensor


def child_receives(arguments: list[str]) -> None:
    """python -m tests.handoff.tools STORE NAME RECEIVER: take weights, and say so on stdout at the first piece."""
    address, name, receiver = arguments
    weights = some_weights()
    manifest, _ = pack(weights, 1)
    offer = Offer(
        store=address,
        name=name,
        version=1,
        tensors=manifest.tensors,
        total_bytes=manifest.total_bytes,
        receiver=int(receiver),
        limit_s=LIMIT_S,
    )
    from models import pieces

    take = pieces.Scatter.take

    def told(self: pieces.Scatter, piece: Tensor) -> None:
        print("piece", flush=True)
        take(self, piece)

    pieces.Scatter.take = told  # type: ignore[method-assign]
    taking = Receiver(HOST)
    try:
        taking.receive(offer, like(weights))
        print("whole", flush=True)
    except HandOffError as error:
        print(f"failed {error.began} {error}", flush=True)
    os._exit(0)  # a broken group's own end would wait for its collective


if __name__ == "__main__":
    child_receives(sys.argv[1:])
