"""New weights for a running vLLM engine, in place: the target's and its drafter's. Checks them before any change, gives
them to every process that executes the model, and invalidates cached prefixes.

In one process, the worker reads the memory that came with the command. With several ranks, the bytes are written once
to a file in shared memory. Each rank maps it and reads its own part; only the path is sent.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engine.vllm.worker import Converter, PacelineWorker, WeightsSource
from drafter.foreign import is_beyond
from models.checkpoint import check_tensors
from models.config import read_config
from models.directory import SafetensorsDirectory, WeightsMismatchError
from models.manifest import WeightsManifest
from models.weights import Buffer, unpack

SHARED_MEMORY = Path("/dev/shm")
LOW_BIT_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class WeightsLoader:
    """Operates on vLLM's EngineCore, whose workers have the extension PacelineWorker; between two of its steps.

    `model`: the directory that the engine was started with. `follower`: derives the drafter's tensors from the
    target's, so that it changes with the target. `through_file`: as with several ranks; default: if there are several.
    """

    def __init__(
        self,
        core: Any,
        model: str | os.PathLike[str],
        *,
        follower: Converter | None = None,
        through_file: bool | None = None,
    ) -> None:
        self.model = Path(model)
        self._core = core
        self._follower = follower
        self._shapes, self._low_bit, self._tied = _expected(self.model)
        several: bool = core.vllm_config.parallel_config.world_size > 1
        self._through_file = several if through_file is None else through_file

    def load_target(self, manifest: WeightsManifest, buffer: Buffer) -> list[str]:
        """Load the target's weights. Running requests continue with them on their present K/V. Returns the ids of
        requests without draws, which start again.

        Raises WeightsCorruptError or WeightsMismatchError before any change; after any other exception the model's
        state is undefined.
        """
        with self._source(manifest, buffer) as source:
            named = dict(source.tensors())
            _check_precision(self._low_bit, named)
            check_tensors(self._shapes, named, tied=self._tied)
            self._core.collective_rpc(PacelineWorker.paceline_load_target.__name__, args=(source,))
            if self._follower is not None:
                self._core.collective_rpc(PacelineWorker.paceline_load_drafter.__name__, args=(source, self._follower))
        return forget_prefixes(self._core.scheduler)

    def load_drafter(
        self,
        manifest: WeightsManifest,
        buffer: Buffer,
        convert: Converter,
        shapes: Mapping[str, torch.Size],
    ) -> list[str]:
        """Load a drafter's weights. `shapes`: required tensors by name; `convert` gives them vLLM's names, in every
        rank.

        Returns and raises as `load_target`: the drafter's K/V are in the same blocks."""
        with self._source(manifest, buffer) as source:
            check_tensors(shapes, dict(source.tensors()), tied=False)
            self._core.collective_rpc(PacelineWorker.paceline_load_drafter.__name__, args=(source, convert))
        return forget_prefixes(self._core.scheduler)

    @contextmanager
    def _source(self, manifest: WeightsManifest, buffer: Buffer) -> Iterator[WeightsSource]:
        """Yield the workers' source of weights, with a verified checksum. Raises WeightsCorruptError."""
        if not self._through_file:
            unpack(manifest, buffer)
            yield WeightsSource(manifest, buffer)
            return
        with tempfile.NamedTemporaryFile(prefix="paceline-weights-", dir=_roomy(buffer.size)) as file:
            np.ascontiguousarray(buffer).tofile(file)
            file.flush()
            unpack(manifest, np.memmap(file.name, np.uint8, mode="r", shape=(buffer.size,)))
            yield WeightsSource(manifest, file.name)


def forget_prefixes(scheduler: Any) -> list[str]:
    """Invalidate cached prefixes in vLLM's scheduler: requests that start later reuse no present K/V; running ones keep
    theirs.

    vLLM's own reset refuses while a block is in use, or recomputes every running request. Here all blocks lose the
    hashes by which they are found. Blocks that running requests add later are hashed with a salt of their own, because
    they continue old K/V. Requests without draws are preempted: they start again, on new K/V only. Returns their ids.
    """
    restarted = [request for request in scheduler.running if request.num_output_tokens == 0]
    for request in reversed(restarted):  # each is put before the other waiting ones
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    for request in scheduler.running:
        request.cache_salt = f"before {request.request_id}"
        request.block_hashes.clear()
        request.update_block_hashes()
    return [request.request_id for request in restarted]


def _expected(model: Path) -> tuple[dict[str, torch.Size], dict[str, torch.dtype], bool]:
    """Return shapes by name of the tensors in a checkpoint of this model, dtypes of the low-bit ones, and whether the
    head shares the embedding. Learners compute no MTP layers, so theirs are not expected."""
    config = read_config(model)
    tied = bool(config.get("tie_word_embeddings", False))
    layers = (config.get("text_config") or config).get("num_hidden_layers", math.inf)
    with SafetensorsDirectory(model) as tensors:
        names = [name for name in tensors if not name.endswith("rotary_emb.inv_freq") and not is_beyond(name, layers)]
        shapes = {name: torch.Size(tensors.shape_of(name)) for name in names}
        dtypes = {name: tensors.dtype_of(name) for name in names}
        low_bit = {name: dtype for dtype in LOW_BIT_DTYPES for name in names if dtypes[name] == dtype}
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes, low_bit, tied


def _check_precision(expected: Mapping[str, torch.dtype], given: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsMismatchError if a tensor's precision, low-bit or not, differs from vLLM's."""
    for name, tensor in given.items():
        found = tensor.dtype if tensor.dtype in LOW_BIT_DTYPES else None
        if found != expected.get(name):
            raise WeightsMismatchError(
                f"{name} came as {tensor.dtype}, but this engine holds it as {expected.get(name, 'floats')}: vLLM "
                "stays in the precision that it was started in (rollout.quantization); rollout.engine.backend=native "
                "follows the weights"
            )


def _roomy(size_bytes: int) -> Path | None:
    """Return shared memory if it has this much room, else None: the directory for temporary files."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size_bytes:
        return SHARED_MEMORY
    return None
