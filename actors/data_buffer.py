"""The online data buffer of one node, as a Ray actor. Holds copies of the records; never trains.

Records arrive as references to objects of the node's object store and are copied once into this process. The originals
can thus disappear with their owners, and the byte limit is exact. Answers go through the object store; a reader on the
node maps them without a copy. The buffer outlives trainers and rollout workers; it is empty after a restart.

    buffer = ray.remote(DataBufferActor).options(num_cpus=0, max_restarts=-1).remote(options, seed=0)
    buffer.add.remote([ray.put(records)])                              # records: list[SequenceRecord]
    records = ray.get(buffer.sample.remote(4096, version=7))           # read-only arrays
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from actors.identity import log_to
from config.drafter import BufferOptions
from contracts.records import SequenceRecord
from drafter.training.buffer import BufferStats, DataBuffer

FETCH_TIMEOUT_S = 30.0
_SOURCES = 1024
_log = logging.getLogger(__name__)


class DataBufferActor:
    """See the module docstring. All methods run on one event loop and yield between copies of sequences."""

    def __init__(self, options: BufferOptions, seed: int = 0, name: str = "buffer", log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, name)
        self._name = name
        self._buffer = DataBuffer(options, seed)
        self._lost = 0
        self._sources: deque[str] = deque(maxlen=_SOURCES)

    def __repr__(self) -> str:
        return self._name

    @ray.method
    async def add(self, refs: Sequence[Any], source: str = "") -> int:
        """Add the records (each reference: a list of them) and return how many were added.

        A list is skipped and logged if its owner is lost or the fetch exceeds FETCH_TIMEOUT_S. `source`: a later list
        with the same source, repeated after a loss, is skipped."""
        added = 0
        for ref in refs:
            try:
                records: list[SequenceRecord] = await asyncio.wait_for(ref, FETCH_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                self._lost += 1
                _log.warning("recorded sequences were lost before they were read: %s", error)
                continue
            if not isinstance(records, list) or not all(isinstance(r, SequenceRecord) for r in records):
                raise TypeError(
                    f"the data buffer takes references to lists of SequenceRecord, got {type(records).__name__}"
                )
            if source and source in self._sources:
                continue
            self._sources.append(source)
            for record in records:
                self._buffer.add([replace(record, tokens=record.tokens.copy(), states=record.states.copy())])
                added += 1
                await asyncio.sleep(0)
        return added

    @ray.method
    async def sample(self, tokens: int, version: int) -> list[SequenceRecord]:
        """Return sampled records; see DataBuffer.sample."""
        return self._buffer.sample(tokens, version)

    @ray.method
    async def stats(self) -> BufferStats:
        return self._buffer.stats
