"""Ranks of the learner: rendezvous, sharding (FSDP2), and the two reductions of a step. Independent of the maths.

One rank has no process group and is not sharded: FSDP2 around a single rank computes the same numbers and costs time
(see docs/concepts/learning.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from models.checkpoint import is_sharded

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's position in the learner group."""

    index: int = 0
    size: int = 1
    device: torch.device = CPU

    def sum(self, values: Tensor) -> Tensor:
        """Sum element-wise over ranks, in place; the same on all of them."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Take the element-wise maximum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        """Wait for every rank; bounded by the process group's timeout."""
        if self.size > 1:
            dist.barrier()


def open_store(host: str, size: int, timeout_s: float) -> TCPStore:
    """Open rank 0's rendezvous store on a free port (`.port`). Does not wait for the others."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)


def join_store(host: str, port: int, size: int, timeout_s: float) -> TCPStore:
    """Connect another rank to that store."""
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, is_master=False, timeout=timeout)


def join_group(store: TCPStore, rank: Rank, *, timeout_s: float) -> None:
    """Form the process group; the timeout applies to every collective. All ranks must call it."""
    dist.init_process_group(
        BACKENDS[rank.device.type],
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=rank.device if rank.device.type == "cuda" else None,
    )


def leave_group() -> None:
    """Dissolve the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(root: nn.Module, blocks: Iterable[nn.Module], rank: Rank, *, compute_dtype: torch.dtype | None) -> None:
    """Shard each block and then the rest of the root over all ranks, in place.

    compute_dtype: parameters are cast to it for forward and backward; gradients are reduced in float32 and applied to
    the master weights in their own dtype. None: everything stays in the parameters' dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # slow, and not for a single rank

    mesh = init_device_mesh(rank.device.type, (rank.size,))
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def frozen_sums(module: nn.Module, rank: Rank) -> Tensor:
    """Return checksums of the frozen parameters, which no checkpoint contains: the sum of each one's bits, int64
    [frozen parameters].

    Equal for any number of ranks; all of them call it."""
    frozen = [p.detach() for p in module.parameters() if not p.requires_grad]
    local: list[Any] = [cast(Any, p).to_local() if is_sharded(p) else p for p in frozen]
    words = {2: torch.int16, 4: torch.int32}
    sums = [p.contiguous().view(words[p.element_size()]).sum(dtype=torch.int64) for p in local]
    return rank.sum(torch.stack(sums)).cpu()
