"""Whole steps as replays of captured graphs: forward, head and draws without a launch per kernel (CUDA).

A graph holds steps of up to so many requests and drawn rows, and mixed steps up to so many rows of prompts besides.

Owns the captured graphs: which there are, when they are captured, which one holds a step. The plan's are captured when
the engine starts, the largest first; what comes up besides (truncated draws that nobody announced, what the time did
not suffice for) when it first does. What no graph holds runs eagerly, and after a failed capture everything does.
Weights are loaded in place, so graphs outlive them; a KV cache or buffers that moved make them useless (`forget`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from actors.engine.batch.step.types import StepRows
from actors.engine.native.forward.layout import Array, DeviceStep, StepLayout, StepShape
from contracts.rollout import GraphsFailed
from drafter.protocol import GraphCapture, Replay
from models.ops.triton.operators import kernel_errors, launch_apart
from models.ops.triton.work import WorkList
from models.staging import Upload
from policies.speculation.graph_plan import CapturePlan, GraphShape

_log = logging.getLogger(__name__)
_MOST_FITS = 4096  # remembered: mixed steps have ever new numbers of rows
CAPTURE_LIMIT_S = 60.0  # of one round of captures; the rest are captured at first use


class CudaGraphCapture:
    """torch.cuda.graph over one memory pool. Graphs of a pool must not run concurrently; an engine's never do."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        # A handle whose last graph is gone cannot be captured into again.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Replay:
        """Capture `compute`; where kernels overlap and that fails, once more with kernels one after the other."""
        try:
            return self._recorded(compute)
        except kernel_errors() as error:
            if isinstance(error, torch.OutOfMemoryError) or not launch_apart():
                raise
            _log.warning("a capture failed (%s); kernels do not start early any more", error)
            self.reset()
            return self._recorded(compute)

    def _recorded(self, compute: Callable[[], None]) -> Replay:
        try:
            # Run one-time work first (kernel choices, library handles, tables), which must not be captured. Use the
            # stream of the capture, since the libraries' workspaces belong to a stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads of the process must not make the capture fail
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except kernel_errors():
            torch.cuda.synchronize()  # the caller continues without: nothing of this may still be running
            raise
        replay: Replay = graph.replay
        return replay


@dataclass(slots=True)
class StepGraph:
    """A graph, captured or not yet, and its step's arrays."""

    layout: StepLayout
    hosts: list[dict[str, Array]]  # for each pinned buffer of the upload
    step: DeviceStep
    replay: Replay | None = None

    def write(self, upload: Upload, rows: StepRows | None) -> None:
        """Upload the step's arrays to the device's buffer; None: only padding rows."""
        upload.send(self.layout.write(self.hosts[upload.begin()], rows))


class StepGraphs:
    """The graphs of one engine's steps; a request's table has at most `blocks` blocks of `block_tokens`."""

    def __init__(
        self,
        compute: Callable[[DeviceStep], None],
        graph_capture: GraphCapture,
        *,
        blocks: int,
        block_tokens: int,
        trash_slot: int,
        truncated: bool = False,
        work: WorkList | None = None,
    ) -> None:
        """compute: what a graph does with its step; reads and leaves everything at addresses that stay. truncated: some
        draws will have top-k or top-p, so every graph cuts; a row without either costs it next to nothing."""
        self._truncated, self._work = truncated, work
        self._compute, self._graph_capture = compute, graph_capture
        self._blocks, self._block_tokens, self._trash_slot = blocks, block_tokens, trash_slot
        self._graphs: dict[tuple[GraphShape, bool], StepGraph] = {}
        self._fits: dict[tuple[int, ...], GraphShape | None] = {}
        self._plan = CapturePlan(())
        self.works = True
        self.failure: GraphsFailed | None = None  # why it does not, until somebody takes it

    @property
    def captured(self) -> int:
        """Number of captured graphs."""
        return sum(graph.replay is not None for graph in self._graphs.values())

    def replace(self, plan: CapturePlan) -> None:
        """Replace the plan; captured graphs are kept."""
        self._plan, self._fits = CapturePlan(plan.of("target")), {}

    def forget(self) -> None:
        """Drop the graphs: memory that they use has moved or was freed."""
        if self._graphs:
            self._graphs.clear()
            self._graph_capture.reset()

    def find(self, rows: StepRows) -> tuple[GraphShape, bool] | None:
        """Return the graph (shape, truncated) that fits the step; None: it runs eagerly."""
        if not self.works:
            return None
        arrays = rows.arrays
        mask, chunk = arrays.get("tree_mask"), len(arrays["tokens"]) - rows.sampled
        width = 0 if mask is None else mask.shape[1]
        key = len(arrays["context_lens"]), rows.sampled, max(rows.most, width), width, chunk
        if key not in self._fits:
            if len(self._fits) >= _MOST_FITS:
                self._fits.clear()
            self._fits[key] = self._plan.graph_for("target", *key[:3], tree=width > 0, chunk=chunk)
        shape = self._fits[key]
        return None if shape is None else (shape, rows.truncated or self._truncated)

    def take(self, key: tuple[GraphShape, bool], upload: Upload) -> StepGraph:
        """Return the graph of that shape, captured or not yet, with its arrays in `upload`."""
        graph = self._graphs.get(key)
        if graph is None:
            shape, truncated = key
            layout = StepLayout(
                StepShape(
                    requests=shape.batch,
                    rows=shape.total_rows,
                    draws=shape.drawn_rows,
                    blocks=self._blocks,
                    most=shape.most_rows,
                    max_context=self._blocks * self._block_tokens,
                    mask_width=shape.most_rows if shape.tree else 0,
                    truncated=truncated,
                    picked=shape.chunk > 0,
                ),
                self._trash_slot,
                self._block_tokens,
                self._work,
            )
            hosts = [layout.host(host) for host in upload.hosts]
            graph = self._graphs[key] = StepGraph(layout, hosts, layout.device(upload.device))
        return graph

    def capture(self, graph: StepGraph) -> bool:
        """Capture the graph on its arrays' present contents. False: it failed, and graphs are disabled."""
        try:
            graph.replay = self._graph_capture.record(lambda: self._compute(graph.step))
        except kernel_errors() as error:  # torch.OutOfMemoryError is one
            _log.exception(
                "no CUDA graph of %s; decoding goes on without graphs, several times slower for few requests",
                graph.layout.shape,
            )
            self.works, self.failure = False, GraphsFailed(_named(graph), str(error).partition("\n")[0])
            self.forget()
            return False
        _log.debug("captured %s", graph.layout.shape)
        return True

    def capture_all(self, upload: Upload, limit_s: float = CAPTURE_LIMIT_S) -> None:
        """Capture what the plan has and is not captured yet, the largest first, on rows of nobody."""
        keys = [(shape, self._truncated) for shape in self._plan.graphs]
        missing = [key for key in keys if (graph := self._graphs.get(key)) is None or graph.replay is None]
        if not missing or not self.works:
            return
        on_device = upload.device.device.type == "cuda"
        start_s, free_bytes, done = perf_counter(), torch.cuda.mem_get_info()[0] if on_device else 0, 0
        for key in missing:
            if perf_counter() - start_s > limit_s:
                break
            graph = self.take(key, upload)
            graph.write(upload, None)
            if not self.capture(graph):
                return
            done += 1
        used_bytes = free_bytes - torch.cuda.mem_get_info()[0] if on_device else 0
        _log.info(
            "captured %d of %d CUDA graphs in %.1f s, %.0f MiB of device memory%s",
            done,
            len(missing),
            perf_counter() - start_s,
            used_bytes / 2**20,
            "" if done == len(missing) else "; the rest when they first come up",
        )


def _named(graph: StepGraph) -> str:
    shape = graph.layout.shape
    return f"{shape.rows} rows of {shape.requests} requests"
