"""Pack records of many sequences into one batch. Owns each row's input and supervision.

A record with n rows of states gives n - 1 rows. Row i has position p = first + i. Its input is the embedding of
tokens[p + 1] and states[i]. It is supervised by token p + 2 and states[i + 1]. Segments are concatenated without
padding. Nothing here looks across a segment's end, and RoPE uses the true positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.records import SequenceRecord
from models.dtypes import DTYPES
from models.ops import Segments
from models.transfer import upload

MIN_ROWS = 3  # shorter records cost more than they teach


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """T rows of S segments. `states` has one more row per segment, whose last one only supervises."""

    states: Tensor  # [T + S, width], in the dtype of the records
    at: Tensor  # int64 [T], each row's input row of `states`; at + 1 is its supervision
    tokens: Tensor  # int64 [T], input token p + 1
    labels: Tensor  # int64 [T], token p + 2
    positions: Tensor  # int64 [T], p
    left: Tensor  # int64 [T], rows after this one in its segment
    fresh: Tensor  # bool [T], computed by the target's present version
    fresh_rows: Tensor  # int64, the indices of fresh rows
    segments: Segments  # rows of each
    cu_seqlens: Tensor  # int32 [S + 1]

    @property
    def rows(self) -> int:
        """T; all rows are supervised."""
        return len(self.tokens)

    def ahead(self, count: int) -> tuple[Tensor, Tensor]:
        """Return (the row `count` rows after each in its segment, whether it exists); both [T]."""
        row = torch.arange(self.rows, device=self.left.device)
        return row + self.left.clamp(max=count), self.left >= count

    def rows_ahead(self, count: int) -> Tensor:
        """Return int64, the rows with at least `count` rows after them: `ahead`'s mask as indices, computed without
        waiting for the device."""
        ends = np.cumsum(self.segments.lengths)
        rows = [np.arange(end - n, end - count) for end, n in zip(ends, self.segments.lengths, strict=True)]
        return upload({"rows": np.concatenate(rows)}, self.left.device)["rows"]


def usable(record: SequenceRecord) -> bool:
    """Whether a record is long enough to be trained on."""
    return record.rows >= MIN_ROWS


def pack_records(
    records: Sequence[SequenceRecord], version: int, device: torch.device | str = "cpu"
) -> PackedBatch | None:
    """Pack all records of at least MIN_ROWS rows, in order, into one batch; None if there are none.

    `version`: the target's present one, whose records give soft targets. Raises ValueError for records that cannot be
    batched together or that are inconsistent.
    """
    records = [record for record in records if usable(record)]
    if not records:
        return None
    kinds = {(record.width, record.dtype) for record in records}
    if len(kinds) > 1:
        raise ValueError(f"records of different widths or dtypes cannot be packed together: {sorted(kinds)}")
    for record in records:
        if record.first < 0 or record.first + record.rows >= len(record.tokens):
            raise ValueError(
                f"a record of request {record.request_id} has states for positions {record.first} to "
                f"{record.first + record.rows - 1} of {len(record.tokens)} tokens, the last of which is never fed"
            )
    rows = np.array([record.rows for record in records])
    ends = rows.cumsum()
    at = np.concatenate([np.arange(end - count, end - 1) for end, count in zip(ends, rows, strict=True)])
    fed = np.concatenate([r.tokens[r.first + 1 : r.first + r.rows] for r in records])
    labels = np.concatenate([r.tokens[r.first + 2 : r.first + r.rows + 1] for r in records])
    lengths = rows - 1
    cu_seqlens = np.concatenate(([0], lengths.cumsum()))
    segment = np.repeat(np.arange(len(records)), lengths)
    place = np.arange(len(at)) - cu_seqlens[segment]
    fresh = np.array([record.target_version == version for record in records])
    first = np.array([record.first for record in records])

    drawn_now = fresh[segment]
    there = upload(
        {
            "states": [record.states for record in records],
            "at": at,
            "tokens": fed.astype(np.int64),
            "labels": labels.astype(np.int64),
            "positions": first[segment] + place,
            "left": lengths[segment] - 1 - place,
            "fresh": drawn_now,
            "fresh_rows": np.flatnonzero(drawn_now),
            "cu_seqlens": cu_seqlens.astype(np.int32),
        },
        device,
    )
    states = there.pop("states")
    ((_, dtype),) = kinds
    return PackedBatch(states=states.view(DTYPES[dtype]), segments=Segments(lengths.tolist()), **there)
