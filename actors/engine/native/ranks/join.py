"""How the ranks of one engine find each other on their machine. Owns the store; what they do together is
models.tensor_parallel's."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from models.nccl import nccl_group
from models.process_groups import gloo_group
from models.tensor_parallel import RankGroup

_HOST = "127.0.0.1"
_STORE_S = 600.0  # a store's patience; whoever starts the engine has a shorter one (cluster.start_timeout_s)
_COLLECTIVE_S = 600.0  # of one collective; a rank that ends breaks it at once on gloo, and ends rank 0 on NCCL


def open_store(port: int = 0) -> Any:
    """Rank 0's store, on a free port; with a port, a client of it. Raises RuntimeError."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, is_master=port == 0, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S)
    )


def join_ranks(store: Any, rank: int, ranks: int, device: str) -> RankGroup:
    """This rank's collectives: gloo on CPU, NCCL on GPUs. Blocks until all ranks have come. Raises RuntimeError."""
    if device == "cpu":
        return RankGroup(gloo_group(store, rank, ranks, _HOST, _COLLECTIVE_S), rank, ranks)
    return RankGroup(nccl_group(store, rank, ranks, torch.device(device, 0), _COLLECTIVE_S), rank, ranks)


def device_environment(rank: int, device: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What makes a rank see its own GPU alone: that of this number among those that rank 0 sees."""
    if device == "cpu":
        return {}
    seen = [part.strip() for part in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return {"CUDA_VISIBLE_DEVICES": seen[rank] if seen else str(rank)}


def require_devices(ranks: int, device: str) -> None:
    """ValueError where this process sees fewer GPUs than ranks."""
    if device != "cpu" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"rollout.engine.tensor_parallel={ranks}, but the engine sees {torch.cuda.device_count()} GPUs: set "
            "cluster.gpus_per_worker to the number of ranks"
        )
