"""EAGLE's drafts on a device: one upload of the host's data, passes that feed each other, one download at the end.

Owns the frames, the graphs captured for them, and the passes' output buffers. Drawn tokens stay on the device until the
draft is complete, so nothing waits between two tokens. A draft is one replay if a graph was captured for its shape, and
so is catching up with a usual step. Everything else runs the same computation eagerly.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.strategy import Strategy
from drafter.eagle.cache import EagleCache
from drafter.eagle.frames import Frame, Frames, Outputs, Size
from drafter.eagle.model import Drafting
from drafter.eagle.passes import Passes
from drafter.eagle.shapes import DraftShape, belonging
from drafter.eagle.work import Work
from drafter.protocol import GraphCapture, Replay
from models.ops.triton.operators import kernel_errors
from models.transformer import Transformer
from policies.speculation.graph_plan import batch_buckets

_LOG = logging.getLogger(__name__)
Int64Array = NDArray[np.int64]
_Key = tuple[Size, bool]  # of a graph; plain or not


@dataclass(frozen=True, slots=True)
class Drafted:
    """R' drafts of K nodes on the host, valid until the next ones."""

    tokens: Int64Array  # [R', K]
    parents: Int64Array | None  # of trees
    scores: NDArray[np.float32]  # log-probabilities: of each token of a chain, of the path to each node of a tree
    soft: Tensor | None  # [R, depth, V] for sampled chains: on the device, valid until the next drafts
    captured: bool  # a graph was captured first


class DeviceDrafts:
    """Drafts by `model` for `target` through `cache`, whose tensors are on one device.

    columns: maximum of the block tables. noise: draws have the target's noise; sampled, scale: see `EagleDrafter`.
    """

    def __init__(
        self,
        model: Drafting,
        target: Transformer,
        cache: EagleCache,
        columns: int,
        most_fed: int,
        *,
        noise: bool,
        sampled: bool,
        scale: float,
    ) -> None:
        self._model, self._target, self._cache, self._most_fed = model, target, cache, most_fed
        self._device = cache.keys.device
        self._buckets = batch_buckets(cache.slots)
        self._last_position = target.config.max_position_embeddings - 1
        self._passes = Passes(
            model,
            target,
            cache,
            columns * cache.block_tokens,
            cache.slots * most_fed,
            noise=noise,
            sampled=sampled,
            scale=scale,
        )
        self._frames = Frames(self._device, columns)
        self._graph_capture: GraphCapture | None = None
        self._truncated = False
        self._replays: dict[_Key, Replay] = {}
        self._planned: dict[int, int] = {}  # by requests: rows for which catching up is captured
        self._rows = self._passes.features(0)
        self._outputs, self._spare_outputs = self._outputs_for(set()), self._outputs_for(set())

    # Graphs.

    @torch.inference_mode()
    def plan(
        self, drafts: Sequence[tuple[int, Strategy]], graph_capture: GraphCapture, truncated: bool = False
    ) -> None:
        """See `Drafter.plan_graphs`."""
        self._graph_capture, self._truncated = graph_capture, truncated
        shapes = {self._shape(strategy, requests) for requests, strategy in drafts}
        # A usual step gives a request its drafted tokens and one more.
        deepest = {n: max(shape.levels for shape in shapes if shape.requests == n) for n, _ in drafts}
        planned = {requests: requests * (levels + 1) for requests, levels in deepest.items()}
        sizes = {Size(shape.requests, planned[shape.requests], shape) for shape in shapes}
        if any(self._frames.planned(size) is None for size in sizes):
            self._replays.clear()  # addresses change
            self._planned = planned
            self._frames.plan(sizes)
            self._rows = self._passes.features(max(planned.values()), max(1, len(self._model.layers)))
            self._outputs = self._outputs_for(shapes)
        for size in sorted(sizes, key=lambda size: (-size.requests, str(size))):
            assert size.shape is not None
            frame = self._frames.of(size)
            self._fill(frame, None, not truncated)
            frame.send(0)
            self._replayable(
                (Size(size.requests, size.rows, None), True), partial(self._passes.catch_up, frame, self._rows)
            )
            plain = not truncated
            self._replayable((size, plain), partial(self._passes.draft, frame, plain, self._outputs))

    def _replayable(self, key: _Key, compute: Callable[[], None]) -> bool:
        """Ensure a graph for `key`, unless its capture failed. Returns whether it had to be captured now."""
        if key in self._replays or self._graph_capture is None:
            return False
        try:
            self._replays[key] = self._graph_capture.record(compute)
        except kernel_errors():  # torch.OutOfMemoryError is one
            _LOG.exception("no CUDA graph of an EAGLE draft of %s; those not captured so far draft without", key[0])
            self._graph_capture = None
        return True

    def _run(self, key: _Key, planned: bool, compute: Callable[[], None]) -> bool:
        """Compute, by a graph if there is or may be one. Returns whether it was captured now."""
        captured = planned and self._replayable(key, compute)
        replay = self._replays.get(key) if planned else None
        (replay or compute)()
        return captured

    # Drafts.

    def catch_up(self, work: Work) -> None:
        """Catch up without drafting, since no request may draft."""
        frame = self._frames.of(self._size(len(work.index), len(work.tokens), None))
        self._upload(frame, work, True)
        self._feed(frame, work, planned=False)

    def draft(self, work: Work, strategy: Strategy, requests: int) -> Drafted:
        """Catch up, then draft by the strategy to its full depth. requests: R, of the batch."""
        present, rows = len(work.index), len(work.tokens)
        size = self._size(present, rows, strategy)
        shape = size.shape
        assert shape is not None
        planned = self._frames.planned(size) is not None
        frame = self._frames.of(size)
        cut = work.truncated or (planned and self._truncated)
        plain = not (cut or (self._passes.sampled and bool((work.temperatures == 0).any())))
        captured = False
        if rows > size.rows:
            # More rows than in a usual step: they are fed separately, and the draft's own inputs follow.
            wide = self._frames.of(Size(size.requests, _room_for(rows), None))
            self._upload(wide, work, True)
            self._feed(wide, work, planned=False)
            self._upload(frame, work, plain)
        else:
            self._upload(frame, work, plain)
            captured = self._feed(frame, work, planned=planned)
        outputs = self._outputs
        if not planned:
            if not self._spare_outputs.hold(shape):
                self._spare_outputs = self._outputs_for({shape})
            outputs = self._spare_outputs
        captured |= self._run((size, plain), planned, partial(self._passes.draft, frame, plain, outputs))
        tokens, parents, scores = outputs.fetch(shape)
        soft: Tensor | None = None
        if self._passes.sampled and shape.k == 1:
            soft = outputs.soft(shape).transpose(0, 1)[:present]
            if soft.shape[:2] != (requests, strategy.depth):
                whole = soft.new_zeros((requests, strategy.depth, soft.shape[2]))
                whole[:, : shape.levels].index_copy_(0, frame.tensors["ready"][:present], soft)
                soft = whole
        return Drafted(
            tokens[:present], parents[:present] if strategy.is_tree else None, scores[:present], soft, captured
        )

    def _shape(self, strategy: Strategy, requests: int) -> DraftShape:
        return DraftShape.of(strategy, requests, self._target.config.vocab_size, self._most_fed)

    def _size(self, present: int, rows: int, strategy: Strategy | None) -> Size:
        """Return the smallest planned size that fits, or else an unplanned one."""
        if strategy is not None:
            for requests in sorted(n for n in self._planned if n >= present):
                size = Size(requests, self._planned[requests], self._shape(strategy, requests))
                if self._frames.planned(size) is not None:
                    return size
        requests = next(bucket for bucket in self._buckets if bucket >= present)
        shape = None if strategy is None else self._shape(strategy, requests)
        return Size(requests, max(requests, _room_for(rows)), shape)

    def _outputs_for(self, shapes: set[DraftShape]) -> Outputs:
        return Outputs(shapes, self._target.config.vocab_size if self._passes.sampled else 0, self._device)

    # Host side.

    def _upload(self, frame: Frame, work: Work, plain: bool) -> None:
        self._fill(frame, work, plain)
        frame.send(work.places.tables.shape[1])

    def _fill(self, frame: Frame, work: Work | None, plain: bool) -> None:
        """Write every region completely, so that nothing of an earlier draft remains. None: no request drafts, as in a
        capture."""
        arrays, present = frame.begin(), 0 if work is None else len(work.index)
        reserved = self._cache.reserved_slot
        rows = 0 if work is None else len(work.tokens)
        ends = np.zeros(0, np.int64) if work is None else work.rows.cumsum()
        committed = np.zeros(0, np.int64) if work is None else work.places.committed
        nothing = np.zeros(0, np.int64)
        _put(arrays["ready"], nothing if work is None else work.index, 0)
        if rows <= frame.size.rows:
            own = (nothing,) * 4 if work is None else (work.kept.index, work.tokens, work.positions, work.slots)
            for name, values in zip(("picked", "tokens", "positions", "slots"), own, strict=True):
                _put(arrays[name], values, reserved if name == "slots" else 0)
            _put(arrays["last"], ends - 1, 0)
            _put(arrays["lens"], committed, 0)
            arrays["offsets"][0] = 0
            _put(arrays["offsets"][1:], ends, rows)
        if work is not None:
            arrays["tables"][: work.places.tables.shape[1], :present] = work.places.tables.T
        shape = frame.size.shape
        if shape is None:
            return
        own_of = belonging(shape, present)
        row, draw = own_of.row_request, own_of.draw_request
        lengths = np.zeros(0, np.int64) if work is None else work.lengths
        positions = _with(lengths, 2)[row] - 2 + own_of.row_depth
        np.minimum(positions, self._last_position, out=arrays["row_positions"])
        arrays["row_slots"].fill(reserved)
        if work is not None and len(row):
            local = _with(committed, 0)[row] + own_of.row_place
            slots = work.places.slots(np.minimum(row, present - 1), local)
            np.copyto(arrays["row_slots"], slots, where=own_of.row_real)
        arrays["level_lens"][:, :present] = committed + own_of.level_ends
        arrays["level_lens"][:, present:] = 0
        arrays["level_offsets"][:] = own_of.level_offsets
        if work is None:
            for name, fill in (
                ("keys", 0),
                ("noise_positions", 0),
                ("temperature", 0),
                ("divisor", 1),
                ("top_k", 0),
                ("top_p", 1),
            ):
                arrays[name].fill(fill)
            return
        arrays["keys"][:] = _with(work.keys, 0)[draw]
        arrays["noise_positions"][:] = _with(work.noise_positions, 0)[draw] + own_of.draw_level
        temperature = (
            work.temperatures if self._passes.noise or self._passes.sampled else np.zeros_like(work.temperatures)
        )
        arrays["temperature"][:] = _with(temperature, 0)[draw]
        if self._passes.sampled:
            arrays["divisor"][:] = np.where(arrays["temperature"] == 0, 1, arrays["temperature"])
        if not plain:
            arrays["top_k"][:] = _with(work.top_k, 0)[draw]
            arrays["top_p"][:] = _with(work.top_p, 1)[draw]

    def _feed(self, frame: Frame, work: Work, *, planned: bool) -> bool:
        """Catch up. Returns whether a graph was captured."""
        model, source, picked = self._model, work.kept.source(), frame.tensors["picked"]
        hidden = self._target.config.hidden_size
        width = hidden * max(1, len(model.layers))
        taken = source[:, :width] if model.layers else source[:, source.shape[1] - width :]
        if taken.shape[1] < width:
            model.features(source)  # raises if something is missing
        if not planned:
            self._passes.catch_up(frame, taken.index_select(0, picked))
            return False
        torch.index_select(taken, 0, picked, out=self._rows[: len(picked)])
        key = Size(frame.size.requests, frame.size.rows, None), True
        return self._run(key, True, partial(self._passes.catch_up, frame, self._rows))


def _room_for(rows: int) -> int:
    """Round up to few sizes, none of which wastes much where rows take much memory."""
    most_doubled = 1024
    return 1 << max(rows - 1, 0).bit_length() if rows <= most_doubled else -(-rows // most_doubled) * most_doubled


def _with(values: NDArray[Any], fill: float) -> NDArray[Any]:
    """Return the values followed by padding."""
    return np.append(values, np.array(fill, values.dtype))


def _put(region: NDArray[np.generic], values: NDArray[np.generic], fill: int) -> None:
    region[: len(values)] = values
    region[len(values) :] = fill
