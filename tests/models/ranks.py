"""The slow, obvious reference of a model over several ranks, in one process; and ranks as threads over gloo."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from actors.engine.native.ranks.join import join_ranks, open_store
from models import ops
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
    store = open_store()
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            group = join_ranks(open_store(store.port), rank, ranks, "cpu")
            with torch.inference_mode():
                results[rank] = work(group)
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
