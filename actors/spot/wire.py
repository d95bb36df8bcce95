"""What passes between a spot trainer and its child over `actors.processes.link`. Plain data; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.processes.link import Bytes
from config.drafter import DrafterOptions
from config.model import ModelOptions
from contracts.records import SequenceRecord
from contracts.spot import TrainSession
from models.manifest import WeightsManifest, aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message to a child."""

    model: ModelOptions
    options: DrafterOptions
    init: str | int  # directory of a drafter, or seed of a fresh one
    checkpoint_dir: str
    host: str  # where other members reach this one
    threads: int | None
    device: str
    niceness: int


@dataclass(frozen=True, slots=True)
class SetTarget:
    """With what `cut_head` left of the target's weights as memory."""

    manifest: WeightsManifest


@dataclass(frozen=True, slots=True)
class Train:
    session: TrainSession


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """A record without its arrays: those lie in the memory that came with it."""

    tokens: int
    prompt_length: int
    first: int
    rows: int
    row_bytes: int
    dtype: str
    width: int
    target_version: int
    request_id: int


@dataclass(frozen=True, slots=True)
class Feed:
    """With the records' arrays as memory."""

    heads: tuple[RecordHead, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    at_s: float  # time.time() of the command


@dataclass(frozen=True, slots=True)
class Publish:
    pass


@dataclass(frozen=True, slots=True)
class Load:
    """With the drafter's weights as memory."""

    manifest: WeightsManifest


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Start | SetTarget | Train | Feed | Stop | Publish | Load | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """First message from a child that came up."""

    step: int  # of the checkpoint that it goes on from, or 0


def to_memory(records: Sequence[SequenceRecord]) -> tuple[tuple[RecordHead, ...], Bytes]:
    """The arrays of all records in one, states before tokens, each at a multiple of 64 bytes."""
    heads = tuple(
        RecordHead(
            tokens=len(r.tokens),
            prompt_length=r.prompt_length,
            first=r.first,
            rows=r.rows,
            row_bytes=r.states.shape[1] if r.states.ndim == 2 else 0,
            dtype=r.dtype,
            width=r.width,
            target_version=r.target_version,
            request_id=r.request_id,
        )
        for r in records
    )
    memory = np.empty(sum(size for head in heads for size in _sizes(head)), np.uint8)
    offset = 0
    for head, record in zip(heads, records, strict=True):
        tokens = np.ascontiguousarray(record.tokens, np.int32).view(np.uint8)
        for array, size in zip((record.states.reshape(-1), tokens), _sizes(head), strict=True):
            memory[offset : offset + array.size] = array
            offset += size
    return heads, memory


def from_memory(heads: Sequence[RecordHead], memory: Bytes) -> list[SequenceRecord]:
    """Views of the memory, which lives as long as one of them."""
    records, offset = [], 0
    for head in heads:
        states_size, tokens_size = _sizes(head)
        states = memory[offset : offset + head.rows * head.row_bytes].reshape(head.rows, head.row_bytes)
        offset += states_size
        tokens = memory[offset : offset + 4 * head.tokens].view(np.int32)
        offset += tokens_size
        records.append(
            SequenceRecord(
                tokens=tokens,
                prompt_length=head.prompt_length,
                first=head.first,
                states=states,
                dtype=head.dtype,
                width=head.width,
                target_version=head.target_version,
                request_id=head.request_id,
            )
        )
    return records


def _sizes(head: RecordHead) -> tuple[int, int]:
    sizes = head.rows * head.row_bytes, 4 * head.tokens
    states, tokens = (aligned(size) for size in sizes)
    return states, tokens
