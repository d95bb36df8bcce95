"""A follower rank in its child process. It runs forwards over its part of the model, and has no requests."""

import queue
from typing import Any, assert_never

import torch

from actors.engine.batch.early import ROWS
from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.build import step_arrays
from actors.engine.native.forward.runner import ModelRunner
from actors.engine.native.ranks.join import join_ranks, open_store
from actors.engine.native.ranks.orders import (
    BeginPieces,
    CopyBlocks,
    EndPieces,
    LoadWeights,
    Move,
    Order,
    RankStart,
    Resize,
    Step,
    TakePiece,
)
from actors.processes.child import hear, parent_link
from actors.processes.link import Close, Link, Ready
from config.model import batch_invariance
from contracts.engine import Sleep, Wake
from contracts.rollout import EngineFailed
from drafter.build import history_tokens
from models.checkpoint import load_packed
from models.device import choose_device
from models.dtypes import DTYPES
from models.tensor_parallel import PartScatter, load_rank


def main() -> None:
    with parent_link(EngineFailed) as link:
        serve(link)


def serve(link: Link) -> None:
    """Execute rank 0's orders until it closes this process, or ends."""
    start = link.receive()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hear(link, inbox)  # from here on, the end of rank 0 ends this process, whatever it waits for
    follower = Follower(start)
    link.send([Ready()])
    while True:
        order = inbox.get()
        if isinstance(order, Close):
            return
        answer = follower.obey(order)
        if answer is not None:
            link.send([answer])


class Follower:
    """One rank's part of the model and of the KV cache."""

    def __init__(self, start: RankStart) -> None:
        """Raises whatever keeps the rank from starting."""
        engine, key = start.start, "rollout.engine.device"
        options = engine.options
        device = choose_device(options.device, key)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        group = join_ranks(open_store(start.port), start.rank, start.ranks, device)
        self._model = load_rank(
            engine.model.path,
            group,
            dtype=DTYPES[engine.model.dtype],
            device=device,
            batch_invariant=batch_invariance(engine.model, device, key, engine=True),
        )
        block_tokens, blocks = options.block_tokens, options.kv_tokens // options.block_tokens
        max_tokens = history_tokens(self._model, options)
        table = SlotTable(options.max_running, max_tokens, -(-max_tokens // block_tokens))
        self._runner = ModelRunner(
            self._model,
            table,
            blocks,
            block_tokens,
            options.prefill_chunk_tokens,
            0,
            steps=step_arrays(table, block_tokens),
            keep_rows=False,
            checked_rows=ROWS,
            follows=True,
        )

    def obey(self, order: Order) -> Ready | None:
        """Execute an order. An exception ends the rank, and with it the engine."""
        match order:
            case Step(rows):
                self._runner.follow(rows)
            case CopyBlocks(pairs):
                self._runner.copy_block_pairs(pairs)
            case Move(moves):
                self._runner.compact(moves)
            case Resize(max_nodes):
                self._runner.resize(max_nodes)
            case LoadWeights(manifest, buffer):
                load_packed(self._model, manifest, buffer)
                self._runner.weights_changed()
                return Ready()
            case BeginPieces(tensors):
                self._scatter = PartScatter(tensors, self._model)
            case TakePiece(size_bytes):
                piece = torch.empty(size_bytes, dtype=torch.uint8, device=self._model.head_weight.device)
                self._model.group.broadcast(piece)
                self._scatter.take(piece)
            case EndPieces():
                self._runner.weights_changed()
                return Ready()
            case Sleep():
                self._runner.sleep()
                return Ready()
            case Wake():
                self._runner.wake()
                return Ready()
            case _:
                assert_never(order)
        return None
