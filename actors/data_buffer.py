"""The online data buffer of one node, as a Ray actor. Owns the copies of the records that it keeps; never trains.

Records come as references to objects of the node's object store and are copied into this process, once: what its makers
put there may go when they do, and the byte limit holds exactly. Answers go through the object store; a reader of the
node maps them without a copy. It outlives trainers and rollout workers; started anew after a loss it is empty.

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
    """See the module docstring. All methods run on one event loop and answer between two copies of a sequence."""

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
        """Keep the records (each reference: a list of them); how many were added. What is lost with its maker, or
        takes longer than FETCH_TIMEOUT_S to come, is left out and logged. `source`: what else comes from it, made again
        after a loss, is left out."""
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
        """See DataBuffer.sample."""
        return self._buffer.sample(tokens, version)

    @ray.method
    async def stats(self) -> BufferStats:
        return self._buffer.stats
