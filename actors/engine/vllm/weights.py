"""New weights for a running vLLM engine, in place: the target's and its drafter's. Owns what is checked before anything
changes, how the weights reach every process that executes the model, and what of the prefix cache is then forgotten.

In one process the ranks' worker reads the memory that came with the command. With several ranks the bytes are written
once to a file in shared memory that each maps and reads its own part of: nothing is sent to any of them but its path.
"""

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
from models.checkpoint import check_tensors
from models.config import read_config
from models.directory import SafetensorsDirectory, WeightsMismatchError
from models.manifest import WeightsManifest
from models.weights import Buffer, unpack

SHARED_MEMORY = Path("/dev/shm")
LOW_BIT_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class WeightsLoader:
    """Over vLLM's EngineCore, whose workers have the extension PacelineWorker; between two of its steps.

    `model`: the directory that the engine was started with. `follower`: makes the drafter's tensors of the target's, so
    that it changes whenever the target does. `through_file`: as with several ranks; default: if there are several.
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
        """Running requests go on with the new weights and the K/V they have. Returns the ids of those that had drawn
        nothing yet, and start again.

        Raises WeightsCorruptError or WeightsMismatchError before anything changed; whatever else is raised leaves a
        model of which nobody knows what it holds.
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
        """`shapes` by name are those of the tensors that must come, `convert` gives them vLLM's names, in every rank.
        Returns and raises as `load_target`: the drafter's K/V lies in the same blocks."""
        with self._source(manifest, buffer) as source:
            check_tensors(shapes, dict(source.tensors()), tied=False)
            self._core.collective_rpc(PacelineWorker.paceline_load_drafter.__name__, args=(source, convert))
        return forget_prefixes(self._core.scheduler)

    @contextmanager
    def _source(self, manifest: WeightsManifest, buffer: Buffer) -> Iterator[WeightsSource]:
        """What the workers read, its checksum computed. Raises WeightsCorruptError."""
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
    """Of vLLM's scheduler: no request that starts from now on reuses K/V that is there; running ones keep theirs.

    vLLM's own reset refuses while a block is in use, or computes every running request again. Here all blocks lose the
    hashes by which they are found, and what running requests add later is hashed with a salt of their own, because it
    continues old K/V. Requests that have not drawn anything yet are preempted: they start again, on new K/V alone.
    Returns their ids.
    """
    restarted = [request for request in scheduler.running if request.num_output_tokens == 0]
    for request in reversed(restarted):  # each is put before the others that wait
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
    """Shapes by name of the tensors that a checkpoint of this model has, dtypes of those in few bits, and whether its
    head is its embedding."""
    tied = bool(read_config(model).get("tie_word_embeddings", False))
    with SafetensorsDirectory(model) as tensors:
        names = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
        shapes = {name: torch.Size(tensors.shape_of(name)) for name in names}
        dtypes = {name: tensors.dtype_of(name) for name in names}
        low_bit = {name: dtype for dtype in LOW_BIT_DTYPES for name in names if dtypes[name] == dtype}
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes, low_bit, tied


def _check_precision(expected: Mapping[str, torch.dtype], given: Mapping[str, torch.Tensor]) -> None:
    """WeightsMismatchError if a tensor came in few bits that vLLM does not hold so, or the other way round."""
    for name, tensor in given.items():
        found = tensor.dtype if tensor.dtype in LOW_BIT_DTYPES else None
        if found != expected.get(name):
            raise WeightsMismatchError(
                f"{name} came as {tensor.dtype}, but this engine holds it as {expected.get(name, 'floats')}: vLLM "
                "stays in the precision that it was started in (rollout.quantization); rollout.engine.backend=native "
                "follows the weights"
            )


def _roomy(size_bytes: int) -> Path | None:
    """Shared memory if there is room for so much, else None: the directory for temporary files."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size_bytes:
        return SHARED_MEMORY
    return None
