"""The slow, obvious reference of a model over several ranks, in one process; and ranks as threads over gloo."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from models import ops
from models.process_groups import gloo_group
from models.tensor_parallel import RankGroup
from models.transformer import Block, Projection, Transformer

T = TypeVar("T")


class SummedInParts(Projection):
    """A whole projection whose sums are taken as `ranks` ranks take them: part by part, then in their order."""

    def __init__(self, of: Projection, ranks: int) -> None:
        super().__init__(of.inputs, of.outputs, of.bias is not None, of.invariant, dtype=of.weight.dtype, device="meta")
        self.weight, self.bias, self.ranks = of.weight, of.bias, ranks

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.chunk(self.ranks, dim=1), self.weight.chunk(self.ranks, dim=1), strict=True)
        total = torch.zeros(len(x), self.outputs)
        for rows, weight in pairs:
            total += ops.linear(rows, weight.contiguous(), None, invariant=self.invariant).float()
        total = total.to(x.dtype)
        return total if self.bias is None else total + self.bias


class PartedTransformer(Transformer):
    """Of another class than Transformer, so that no fused kernel takes it."""


def summed_in_parts(model: Transformer, ranks: int) -> Transformer:
    """`model`, changed in place."""
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in ("o_proj", "down_proj"):
            setattr(block, name, SummedInParts(getattr(block, name), ranks))
    model.__class__ = PartedTransformer
    return model


def on_ranks(ranks: int, work: Callable[[RankGroup], T]) -> list[T]:
    """`work` on each rank, each in a thread; what they return, by rank. Raises what the first raises."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=60))
            group = gloo_group(client, rank, ranks, "127.0.0.1", 60.0)
            with torch.inference_mode():
                results[rank] = work(RankGroup(group, rank, ranks))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
