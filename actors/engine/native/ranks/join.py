"""Connection of one engine's ranks on their machine: the store and the process group (models.tensor_parallel uses
it)."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from models.nccl import nccl_group
from models.process_groups import gloo_group
from models.tensor_parallel import RankGroup

_HOST = "127.0.0.1"
_STORE_S = 600.0  # timeout of a store; the engine's start has a shorter one (cluster.start_timeout_s)
_COLLECTIVE_S = 600.0  # of one collective; an ended rank breaks it at once on gloo, and ends rank 0 on NCCL


def open_store(port: int = 0) -> Any:
    """Open rank 0's store on a free port; with a port, connect to it. Raises RuntimeError."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, is_master=port == 0, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S)
    )


def join_ranks(store: Any, rank: int, ranks: int, device: str) -> RankGroup:
    """Return this rank's collectives: gloo on CPU, NCCL on GPUs. Blocks until all ranks have joined. Raises
    RuntimeError."""
    if device == "cpu":
        return RankGroup(gloo_group(store, rank, ranks, _HOST, _COLLECTIVE_S), rank, ranks)
    return RankGroup(nccl_group(store, rank, ranks, torch.device(device, 0), _COLLECTIVE_S), rank, ranks)


def device_environment(rank: int, device: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables that show a rank only its own GPU: the one of its number among rank 0's."""
    if device == "cpu":
        return {}
    seen = [part.strip() for part in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return {"CUDA_VISIBLE_DEVICES": seen[rank] if seen else str(rank)}


def require_devices(ranks: int, device: str) -> None:
    """Raise ValueError if this process sees fewer GPUs than ranks."""
    if device != "cpu" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"rollout.engine.tensor_parallel={ranks}, but the engine sees {torch.cuda.device_count()} GPUs: set "
            "cluster.gpus_per_worker to the number of ranks"
        )
