"""A paged cache with anything in it that a kernel must not read, for the tests of attention."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.ops.triton import launch, operators
from models.ops.triton.work import WorkList

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Arguments of paged_attention; the cache is NaN and tables are far off wherever nothing may be read."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    offsets: Tensor
    contexts: Tensor
    mask: Tensor | None

    def attend(self, max_query: int | None = None, max_context: int | None = None, *, listed: bool = False) -> Tensor:
        """By the kernels, which Triton's interpreter runs where there is no device. listed: by a work list."""
        kernels = launch if self.q.device.type == "cpu" else operators
        work = self.work(max_query) if listed else None
        found: Tensor = kernels.paged_attention(*self._arguments(max_query, max_context), work)
        return found

    def work(self, max_query: int | None = None) -> Tensor:
        """The list that the engine would upload."""
        rows, query_heads, _ = self.q.shape
        work = WorkList.of(query_heads, self.keys.shape[1], self.q.dtype)
        offsets, contexts = self.offsets.cpu().numpy(), self.contexts.cpu().numpy()
        most = max_query or int(self.offsets.diff().max())
        numbers = np.full(work.size(len(contexts), rows, most), 2**30, np.int32)
        work.write(numbers, offsets, contexts, tree=self.mask is not None)
        return torch.from_numpy(numbers).to(self.q.device)

    def expected(self) -> Tensor:
        found: Tensor = operators.paged_attention(*self._arguments(None, None))
        return found

    def _arguments(self, max_query: int | None, max_context: int | None) -> tuple[Any, ...]:
        most, longest = int(self.offsets.diff().max()), int(self.contexts.max())
        lengths = self.tables, self.offsets, self.contexts, self.mask
        bounds = BLOCK_TOKENS, max_query or most, max_context or longest, self.q.shape[2] ** -0.5
        return self.q, self.keys, self.values, *lengths, *bounds

    def on(self, device: str) -> "Paged":
        """The same on another device."""
        tensors = {part.name: getattr(self, part.name) for part in fields(self)}
        return Paged(**{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})

    def alone(self, request: int) -> tuple["Paged", slice]:
        """One request by itself, and where its rows are in the batch."""
        rows = slice(int(self.offsets[request]), int(self.offsets[request + 1]))
        only = replace(
            self,
            q=self.q[rows],
            tables=self.tables[request : request + 1],
            offsets=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=self.q.device),
            contexts=self.contexts[request : request + 1],
            mask=None if self.mask is None else self.mask[rows],
        )
        return only, rows


def paged(
    queries: Sequence[int],
    contexts: Sequence[int],
    *,
    heads: tuple[int, int, int] = (4, 2, 16),
    tree: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    """Requests of `queries` rows at the end of `contexts` tokens, and `padding` rows behind them; heads are (query
    heads, KV heads, head_dim); `tree` > 0: random trees in a mask of that many columns."""
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads, head_dim = heads
    blocks = [-(-context // BLOCK_TOKENS) for context in contexts]
    free = (1 + torch.randperm(sum(blocks), generator=generator)).tolist()
    tables = torch.full((len(contexts), max(blocks) + 1), 2**30, dtype=torch.int32)
    slots = (sum(blocks) + 1) * BLOCK_TOKENS
    shape = slots, kv_heads, head_dim
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    written = torch.zeros(slots, dtype=torch.bool)
    for request, (count, context) in enumerate(zip(blocks, contexts, strict=True)):
        mine, free = free[:count], free[count:]
        tables[request, :count] = torch.tensor(mine, dtype=torch.int32)
        at = torch.tensor(mine).repeat_interleave(BLOCK_TOKENS) * BLOCK_TOKENS
        at = (at + torch.arange(BLOCK_TOKENS).repeat(count))[:context]
        written[at] = True
    keys[~written] = values[~written] = torch.nan
    rows = sum(queries)
    mask = None
    if tree:
        mask = torch.zeros(rows + padding, tree, dtype=torch.uint8)
        row = 0
        for count in queries:
            for node in range(count):
                if node:
                    parent = int(torch.randint(node, (), generator=generator))
                    mask[row + node] = mask[row + parent]
                mask[row + node, node] = 1
            row += count
    return Paged(
        q=torch.randn((rows + padding, query_heads, head_dim), generator=generator).to(dtype),
        keys=keys,
        values=values,
        tables=tables,
        offsets=torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32),
        contexts=torch.tensor(contexts, dtype=torch.int32),
        mask=mask,
    )
