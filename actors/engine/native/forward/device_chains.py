"""Chains of draws by a copy of the target on a device, over the target's own KV cache: one upload of the host's arrays,
passes that feed each other, one download at the end.

Manages the buffers of chains, and their graphs: one per number of requests and depth, in the memory shared with the
target's graphs. A request with less room than the others also runs all passes. Its rows beyond that room write into the
trash block and see only valid keys, so that no shape depends on room. Chains without a graph run eagerly; after a
failed capture all do. The copy's weights are changed in place, so graphs stay valid; a moved KV cache invalidates them
(`forget`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.types import Int64Array
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.device_steps import Forward, forward_of, has_kernels
from actors.engine.native.forward.layout import Array, DeviceStep, Layout, Part
from config.strategy import Strategy
from drafter.protocol import BatchView, GraphCapture, Replay
from models import ops
from models.ops.triton.operators import kernel_errors
from models.staging import Download, Upload
from models.transformer import Transformer
from policies.speculation.graph_plan import batch_buckets

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class ChainShape:
    """Shape of a chain: `depth` draws for up to `requests` requests."""

    requests: int
    depth: int
    columns: int  # of the block tables
    truncated: bool = False


class ChainLayout(Layout):
    """Positions of one shape's arrays; arrays that differ per pass are stored pass by pass."""

    def __init__(self, shape: ChainShape, trash_slot: int, block_tokens: int) -> None:
        self.shape, self._block_tokens = shape, block_tokens
        requests, each = shape.requests, (shape.depth, shape.requests)
        self._trash: Int64Array = trash_slot + np.arange(requests) % block_tokens
        parts: list[Part] = [
            ("tokens", np.int64, (requests,), 0),
            ("positions", np.int64, each, 0),
            ("kv_slots", np.int64, each, 0),
            ("noise_keys", np.int64, (requests,), 0),
            ("noise_positions", np.int64, each, 0),
            ("temperature", np.float32, (requests,), 0.0),
            ("query_offsets", np.int32, (requests + 1,), 0),
            ("context_lens", np.int32, each, 0),
        ]
        if shape.truncated:
            parts += [("top_k", np.int64, (requests,), 0), ("top_p", np.float32, (requests,), 1.0)]
        super().__init__([*parts, ("block_tables", np.int32, (shape.columns, requests), 0)])

    def passes(self, memory: Tensor) -> list[DeviceStep]:
        """Return each pass's arrays as views of a device buffer; `tokens` are those of the first."""
        views: dict[str, Any] = dict.fromkeys(("top_k", "top_p")) | self.tensors(memory)
        tables = views.pop("block_tables").t()
        own = {name: views.pop(name) for name in ("positions", "kv_slots", "noise_positions", "context_lens")}
        return [
            DeviceStep(
                **views,
                **{name: each[level] for name, each in own.items()},
                block_tables=tables,
                sample_rows=None,
                tree_mask=None,
                max_query=1,
                max_context=self.shape.columns * self._block_tokens,
            )
            for level in range(self.shape.depth)
        ]

    def write(
        self, views: Mapping[str, Array], batch: BatchView | None, tables: NDArray[np.int32], last_position: int
    ) -> int:
        """Write the batch's arrays, or only padding, into `views` of `host`; return the number of used bytes.

        tables: of the batch's requests, [R, used columns]. Every region is written whole."""
        shape, views = self.shape, dict(views)
        table_view, places = views.pop("block_tables"), self._offsets["block_tables"]
        for name, view in views.items():
            view[...] = self._parts[name][2]
        kv_slots = views["kv_slots"]
        kv_slots[:] = self._trash
        if batch is None:
            return places
        present, lengths = len(batch.slots), batch.lengths
        levels = np.arange(shape.depth)[:, None]
        # The last known token's slot exists, whatever the room. A row beyond the room attends to the same keys as the
        # last row within it, which exist.
        rows = np.clip(np.minimum(batch.room, shape.depth), 1, None)
        positions = np.minimum(lengths - 1 + levels, last_position)
        owned = lengths - 1 + np.minimum(levels, rows - 1)
        block, within = np.divmod(owned, self._block_tokens)
        slots = tables[np.arange(present), block].astype(np.int64) * self._block_tokens + within
        views["tokens"][:present] = batch.history[batch.slots, lengths - 1]
        views["positions"][:, :present] = positions
        kv_slots[:, :present] = np.where(levels < rows, slots, self._trash[:present])
        views["context_lens"][:, :present] = owned + 1
        views["noise_keys"][:present] = batch.noise_keys
        views["noise_positions"][:, :present] = lengths - batch.prompt_lengths + levels
        views["temperature"][:present] = batch.temperatures
        views["query_offsets"][:] = np.minimum(np.arange(shape.requests + 1), present)
        if shape.truncated:
            views["top_k"][:present], views["top_p"][:present] = batch.top_k, batch.top_p
        columns = int(owned.max()) // self._block_tokens + 1
        table_view[:columns, :present] = tables[:, :columns].T
        return places + columns * shape.requests * 4


@dataclass(slots=True)
class _Frame:
    """A layout in the present buffers, and the chain's graph, if captured."""

    layout: ChainLayout
    hosts: list[dict[str, Array]]  # for each pinned buffer of the upload
    passes: list[DeviceStep]
    replay: Replay | None = None


class DeviceChains:
    """`TargetPasses` of an engine on a device, for the requests in the slots of `table`.

    trash_slot: the first K/V slot behind those of requests. keep_logits: captured chains store logits, for verification
    by rejection.
    """

    def __init__(
        self, table: SlotTable, cache: KVCache, device: torch.device, *, trash_slot: int, keep_logits: bool
    ) -> None:
        self.captured = False
        self._table, self._cache, self._device = table, cache, device
        self._slots, self._columns = table.block_tables.shape
        self._trash_slot, self._keep_logits = trash_slot, keep_logits
        self._buckets = batch_buckets(self._slots)
        self._graph_capture: GraphCapture | None = None
        self._truncated = False
        self._planned: list[tuple[int, int]] = []  # requests and depth, the largest first
        self._frames: dict[ChainShape, _Frame] = {}
        self._depth = 0
        self._copy: Transformer | None = None

    # Graphs.

    def plan_graphs(
        self,
        copy: Transformer,
        drafts: Sequence[tuple[int, Strategy]],
        graph_capture: GraphCapture,
        truncated: bool = False,
    ) -> None:
        """See `TargetPasses`."""
        self._truncated = truncated
        self._use(copy)
        if not has_kernels(copy):
            return
        self._graph_capture = graph_capture
        self._planned = sorted({(requests, strategy.depth) for requests, strategy in drafts}, reverse=True)
        self._make_room(max((depth for _, depth in self._planned), default=0))
        self.capture()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the planned chains that are missing, on padding rows."""
        for requests, depth in self._planned:
            frame = self._frame(ChainShape(requests, depth, self._columns, self._truncated))
            if frame.replay is None and self._graph_capture is not None:
                self._upload.send(frame.layout.write(frame.hosts[self._upload.begin()], None, _NO_TABLES, 0))
                self._record(frame)

    def forget(self) -> None:
        """Drop the graphs: memory that they use has moved or was freed."""
        if any(frame.replay is not None for frame in self._frames.values()) and self._graph_capture is not None:
            self._graph_capture.reset()
        self._frames.clear()

    def _record(self, frame: _Frame) -> None:
        assert self._graph_capture is not None
        try:
            kept = self._kept(frame) if self._keep_logits else None
            frame.replay = self._graph_capture.record(partial(self._compute, frame, kept))
        except kernel_errors():  # torch.OutOfMemoryError is one
            _log.exception("no CUDA graph of a draft of %s; from now on all are drafted without", frame.layout.shape)
            self.forget()
            self._graph_capture = None
        self.captured = True

    def _use(self, copy: Transformer) -> None:
        if copy is not self._copy:
            self.forget()
            self._copy = copy
            self._forward: Forward = forward_of(copy)
            self._vocab, self._last_position = copy.config.vocab_size, copy.config.max_position_embeddings - 1

    def _make_room(self, depth: int) -> None:
        """Allocate buffers for chains of this depth by all requests. Larger buffers have new addresses."""
        if depth <= self._depth:
            return
        self.forget()
        self._depth = depth
        largest = ChainLayout(
            ChainShape(self._slots, depth, self._columns, truncated=True), self._trash_slot, self._cache.block_tokens
        )
        self._upload = Upload(largest.size_bytes, self._device)
        draws = depth * self._slots
        self._tokens = torch.empty(2 * draws, dtype=torch.int32, device=self._device)
        self._download = Download(2 * draws, self._device)
        # outside of the graphs' memory, so valid until the next chain
        kept = draws * self._vocab if self._keep_logits else 0
        self._logits = torch.empty(kept, dtype=torch.float32, device=self._device)
        self._no_cutoff = torch.full((self._slots,), -torch.inf, device=self._device)

    def _frame(self, shape: ChainShape) -> _Frame:
        frame = self._frames.get(shape)
        if frame is None:
            layout = ChainLayout(shape, self._trash_slot, self._cache.block_tokens)
            hosts = [layout.host(host) for host in self._upload.hosts]
            frame = self._frames[shape] = _Frame(layout, hosts, layout.passes(self._upload.device))
        return frame

    # Chains.

    @torch.inference_mode()
    def chain(
        self, copy: Transformer, batch: BatchView, depth: int, *, logits: bool = False
    ) -> tuple[Int64Array, Tensor | None]:
        """See `TargetPasses`."""
        self.captured = False
        self._use(copy)
        self._make_room(depth)
        present = len(batch.slots)
        truncated = bool(batch.top_k.any() or (batch.top_p < 1).any())
        tables = self._table.block_tables[batch.slots]
        planned = [n for n, each in self._planned if n >= present and each == depth]
        whole = bool(planned) and self._graph_capture is not None and (self._keep_logits or not logits)
        requests = min(planned) if whole else next(bucket for bucket in self._buckets if bucket >= present)
        frame = self._frame(ChainShape(requests, depth, self._columns, truncated or (whole and self._truncated)))
        used = frame.layout.write(frame.hosts[self._upload.begin()], batch, tables, self._last_position)
        self._upload.send(used)
        if whole and frame.replay is None:
            self._record(frame)
        kept: Tensor | None = None
        if whole and frame.replay is not None:
            frame.replay()
            kept = self._kept(frame) if logits else None
        else:
            if logits:
                kept = torch.empty(depth, requests, self._vocab, dtype=torch.float32, device=self._device)
            self._compute(frame, kept)
        words = self._download.fetch(self._tokens[: 2 * depth * requests])
        tokens = words.view(np.int64).reshape(depth, requests)[:, :present].T
        counts = np.clip(np.minimum(batch.room, depth), 0, None)
        found: Int64Array = np.where(np.arange(depth) < counts[:, None], tokens, -1)
        return found, None if kept is None else kept[:, :present].transpose(0, 1)

    def _kept(self, frame: _Frame) -> Tensor:
        """Logits of a captured chain, [depth, requests, V]."""
        shape, vocab = frame.layout.shape, self._vocab
        return self._logits[: shape.depth * shape.requests * vocab].view(shape.depth, shape.requests, vocab)

    def _compute(self, frame: _Frame, kept: Tensor | None) -> None:
        """Run all passes, as in a graph. Stores the tokens, and the logits in `kept` [depth, requests, V]."""
        copy, shape = self._copy, frame.layout.shape
        assert copy is not None
        drawn: list[Tensor] = []
        for level, step in enumerate(frame.passes):
            fed = step if level == 0 else replace(step, tokens=drawn[-1])
            _, hidden = self._forward(fed, self._cache)
            logits = copy.logits(hidden)
            cutoff = self._no_cutoff[: shape.requests]
            if step.top_k is not None and step.top_p is not None:
                cutoff = ops.cutoff(logits, step.temperature, step.top_k, step.top_p)
            tokens, _, _ = ops.sample(logits, cutoff, step.temperature, step.noise_keys, step.noise_positions)
            drawn.append(tokens)
            if kept is not None:
                kept[level].copy_(logits)
                if step.top_k is not None:
                    kept[level].masked_fill_(logits < cutoff[:, None], -torch.inf)
        out = self._tokens[: 2 * shape.depth * shape.requests].view(torch.int64).view(shape.depth, shape.requests)
        torch.stack(drawn, out=out)


_NO_TABLES = np.zeros((0, 0), np.int32)
