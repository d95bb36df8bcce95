"""Rank 0's end of its followers: their start, orders, answers and end. Never computes.

A lost follower ends the engine: the next step raises RankLostError, which names it. If rank 0 hangs in a collective or
has no step to run, a thread ends the process after `_GRACE_S` with the reason on stderr.
"""

import os
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.native.ranks.join import device_environment, join_ranks, open_store
from actors.engine.native.ranks.orders import BeginPieces, LoadWeights, Order, RankStart, TakePiece
from actors.engine.wire import Start
from actors.processes.link import Ready
from actors.processes.parent import ChildProcess
from contracts.rollout import EngineFailed
from models.checkpoint import load_packed
from models.manifest import TensorSpec, WeightsManifest
from models.tensor_parallel import PartScatter, RankGroup, RankGroupError, RankTransformer, check_whole, parts_of
from models.weights import pack, unpack

Bytes = NDArray[np.uint8]

_FOLLOWER = "actors.engine.native.follower"  # imports what this module must not
_POLL_S = 0.5
_GRACE_S = 5.0  # for the main thread to raise the error itself
_CLOSE_S = 5.0


class RankLostError(RuntimeError):
    """A rank of this engine has ended or failed; the message names it and the cause."""


class Followers:
    """Followers 1 .. ranks - 1 of this process. They receive orders in the order sent."""

    def __init__(self, start: Start, ranks: int, device: str) -> None:
        """Start the followers; they load their parts while rank 0 loads its own."""
        self.ranks, self._device = ranks, device
        self._store: Any = open_store()
        self._lost = threading.Event()
        self._reason = ""
        self._closing = False
        self._answers: list[queue.SimpleQueue[Ready | None]] = []
        self._children: list[ChildProcess] = []
        for rank in range(1, ranks):
            child = ChildProcess(
                _FOLLOWER,
                RankStart(start, rank, ranks, self._store.port),
                f"tensor-parallel rank {rank} of {ranks}",
                died=RankLostError,
                environment=device_environment(rank, device),
            )
            answers: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
            self._children.append(child)
            self._answers.append(answers)
            threading.Thread(target=self._read, args=(child, answers), name=child.name, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, from 1."""
        return [child.pid for child in self._children]

    def join(self) -> RankGroup:
        """Return rank 0's collectives. Blocks until all followers have joined; one that ends first ends this
        process."""
        return join_ranks(self._store, 0, self.ranks, self._device)

    def tell(self, order: Order) -> None:
        """Send the same order to all. Raises RankLostError."""
        for child in self._children:
            child.send(order)

    def ask(self, order: Order) -> None:
        """Same as `tell`, and wait for all answers; the engine's caller sets the deadline."""
        self.tell(order)
        self.wait()

    def wait(self) -> None:
        """Wait for one answer of each follower, such as the first, sent when it is up. Raises RankLostError."""
        for queued in self._answers:
            if queued.get() is None:
                raise RankLostError(self._reason)

    def load(self, model: RankTransformer, manifest: WeightsManifest, buffer: Bytes) -> None:
        """Load new weights of the whole model: send each rank its parts; `model` is rank 0's. Raises
        WeightsCorruptError and WeightsMismatchError before any change, RankLostError."""
        whole = dict(unpack(manifest, buffer))
        check_whole(model.whole, whole)
        for rank, child in enumerate(self._children, 1):
            child.send(LoadWeights(*pack(parts_of(whole, model.whole, rank, self.ranks), manifest.version)))
        load_packed(model, *pack(parts_of(whole, model.whole, 0, self.ranks), manifest.version))
        self.wait()

    def pieces(self, model: RankTransformer, tensors: Sequence[TensorSpec]) -> "RelayedPieces":
        """Return the receiver of new weights in pieces. Raises ValueError for another model's weights."""
        return RelayedPieces(self, model, tensors)

    def explain(self, error: Exception) -> NoReturn:
        """Raise the cause of a failed collective: RankLostError if a rank was lost, else the error itself."""
        if self._lost.wait(_GRACE_S):
            raise RankLostError(self._reason) from error
        raise error

    def close(self) -> None:
        """End the followers. Idempotent."""
        self._closing = True
        for child in self._children:
            child.close(_CLOSE_S)
        self._children = []

    def _read(self, child: ChildProcess, answers: "queue.SimpleQueue[Ready | None]") -> None:
        try:
            while not self._closing:
                for message in child.poll(_POLL_S):
                    for answer in message:
                        if isinstance(answer, EngineFailed):
                            self._lose(f"{child.name} (process {child.pid}): {answer.reason}")
                        else:
                            answers.put(answer)
        except RankLostError as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        if self._closing:
            return
        if not self._lost.is_set():
            self._reason = reason
            self._lost.set()
        for answers in self._answers:
            answers.put(None)
        threading.Event().wait(_GRACE_S)
        if not self._closing:
            print(f"{RankLostError.__name__}: {self._reason}", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread hangs in a collective, or waits for requests that it cannot compute


class RelayedPieces:
    """Rank 0's end of weights that arrive in pieces: each rank keeps its parts of every piece."""

    def __init__(self, followers: Followers, model: RankTransformer, tensors: Sequence[TensorSpec]) -> None:
        self._followers, self._group, self._device = followers, model.group, model.head_weight.device
        self._scatter = PartScatter(tensors, model)
        followers.tell(BeginPieces(tuple(tensors)))

    def take(self, piece: Tensor) -> None:
        """Relay the next piece, uint8. Raises RankLostError."""
        piece = piece.to(self._device)
        self._followers.tell(TakePiece(piece.numel()))
        try:
            self._group.broadcast(piece)
        except RankGroupError as error:
            self._followers.explain(error)
        self._scatter.take(piece)
