"""What passes between a process engine and its child: pickled dataclasses, and weights as shared memory.

Weights travel as an anonymous memory file whose descriptor is sent over the socket: it has no name that could be left
behind, and its memory is free once both sides have closed it, however they end.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from actors.engine.options import EngineOptions
from actors.engine.types import Capabilities, IntArray, Request
from models.manifest import WeightsManifest
from models.options import ModelOptions
from policies.speculation.options import SpeculationOptions


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a child."""

    model: ModelOptions
    options: EngineOptions
    seed: int
    weights_version: int
    niceness: int
    speculation: SpeculationOptions


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Followed by a descriptor of `total_bytes` of memory."""

    manifest: WeightsManifest
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Sleep:
    pass


@dataclass(frozen=True, slots=True)
class Wake:
    pass


@dataclass(frozen=True, slots=True)
class Remember:
    """Rollouts that other engines finished, for the drafters."""

    prompts: tuple[IntArray, ...]
    responses: tuple[IntArray, ...]


@dataclass(frozen=True, slots=True)
class SaveDrafters:
    directory: str


@dataclass(frozen=True, slots=True)
class LoadDrafters:
    directory: str


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Start | Submit | Abort | UpdateWeights | Sleep | Wake | Remember | SaveDrafters | LoadDrafters | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """First message from a child that came up."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class Ended:
    """The pipe is closed (made by the parent's reader, never sent)."""


def send(connection: Connection, message: Command, descriptor: int | None = None) -> None:
    """Send a message, and a file descriptor behind it. Callers hold a lock: the two must stay together."""
    connection.send(message)
    if descriptor is not None:
        reduction.send_handle(connection, descriptor, os.getpid())


def share_bytes(buffer: NDArray[np.uint8]) -> int:
    """A descriptor of memory that holds a copy of `buffer` (at least one byte)."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        size = max(buffer.size, 1)
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            memory[: buffer.size] = np.ascontiguousarray(buffer).data
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def shared_bytes(descriptor: int, total_bytes: int) -> NDArray[np.uint8]:
    """The memory behind a descriptor, which is closed. Stays mapped as long as the array lives."""
    try:
        memory = mmap.mmap(descriptor, max(total_bytes, 1))
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, np.uint8, count=total_bytes)
