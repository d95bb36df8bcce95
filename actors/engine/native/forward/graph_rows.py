"""The rows of a step laid out for a captured graph: as many requests, and as many rows of each, as were captured.

Owns where padding goes; decides nothing. Padding rows write their K/V into a reserved block and are read by nobody:
a real row's keys, and so its result, are those it has without them.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from policies.speculation.graph_plan import GraphShape

# Blocks behind those that the scheduler hands out.
RESERVED_BLOCKS = 2
TRASH, ZERO = 0, 1  # where padding writes; never written, so that reading it is harmless


def reserved_block(blocks: int, which: int) -> int:
    """Number of a reserved block of a cache with `blocks` blocks for requests."""
    return blocks + which


def padded_rows(
    arrays: Mapping[str, NDArray[np.generic]], graph: GraphShape, context: int, block_tokens: int, blocks: int
) -> dict[str, NDArray[np.generic]]:
    """`arrays` as in `StepRows`, of a step that draws from every row, as those of `graph` at context length `context`.

    Request r's rows start at r * graph.rows. `query_offsets` [B + 1] keep counting real rows (padding requests have
    one). tree_mask [B * n, n] is there exactly where n > 1. sample_rows int64 [T]: where the real rows are, unless all
    are real. Arrays of the draws stay as they are.
    """
    batch, width, total = graph.batch, graph.rows, graph.total_rows
    offsets = arrays["query_offsets"].astype(np.int64)
    requests, rows = len(offsets) - 1, int(offsets[-1])
    counts = np.diff(offsets)
    owner = np.arange(requests).repeat(counts)
    place = np.arange(rows) - offsets[owner]
    real = owner * width + place

    trash = reserved_block(blocks, TRASH)
    tokens, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
    kv_slots = trash * block_tokens + np.arange(total) % block_tokens
    tokens[real], positions[real], kv_slots[real] = arrays["tokens"], arrays["positions"], arrays["kv_slots"]
    query_offsets = np.arange(batch + 1, dtype=np.int32) + np.int32(rows - requests)
    query_offsets[: requests + 1] = offsets
    context_lens = np.ones(batch, np.int32)
    context_lens[:requests] = arrays["context_lens"]
    tables = np.full((batch, context // block_tokens), trash, np.int32)
    given = arrays["block_tables"]
    columns = min(given.shape[1], tables.shape[1])
    tables[:requests, :columns] = given[:, :columns]

    names = ("tokens", "positions", "kv_slots", "query_offsets", "context_lens", "block_tables", "tree_mask")
    out = {name: array for name, array in arrays.items() if name not in names}
    out |= {"tokens": tokens, "positions": positions, "kv_slots": kv_slots}
    out |= {"query_offsets": query_offsets, "context_lens": context_lens, "block_tables": tables}
    if width > 1:
        mask = np.zeros((total, width), np.uint8)
        mask[:, 0] = 1  # a row that sees nothing would be NaN
        given_mask = arrays.get("tree_mask")
        if given_mask is None:
            mask[real] = np.arange(width) <= place[:, None]
        else:
            mask[real, : given_mask.shape[1]] = given_mask
        out["tree_mask"] = mask
    if rows < total:
        out["sample_rows"] = real
    return out
