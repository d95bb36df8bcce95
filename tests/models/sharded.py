"""What one FSDP2 rank does in test_sharded.py: python -m tests.models.sharded RANK RANKS STORE CASE..."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from models.checkpoint import CausalModel, hf_state_dict, load_causal_model, load_hf_state_dict
from models.packed import PackedContext

VOCAB = 101
LENGTHS = [5, 12, 3, 20]
STEPS = 2


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def shard(model: CausalModel) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "logits")


def loss(model: CausalModel, segment: int) -> torch.Tensor:
    """Summed cross-entropy of one segment of the test batch."""
    length = LENGTHS[segment]
    hidden = model(tokens(length, seed=segment), PackedContext.from_lengths([length]))
    return F.cross_entropy(model.logits(hidden), tokens(length, seed=100 + segment), reduction="sum")


def train(model: CausalModel, segments: list[int], ranks: int) -> list[float]:
    """Plain SGD steps over `segments`, one micro-batch each; FSDP averages gradients over ranks, we want sums."""
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for segment in segments:
            value = loss(model, segment)
            (value * ranks).backward()
            total += value.item()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad)
                parameter.grad = None
        losses.append(total)
    return losses


def run(case: Path, implementation: str, recompute: bool, rank: int, ranks: int) -> None:
    """Train the model in `case`/model and leave losses and gathered weights in `case`/RANK.pt."""
    model = load_causal_model(case / "model", implementation=implementation)
    initial = {name: tensor.clone() for name, tensor in hf_state_dict(model).items()}
    shard(model)
    model.set_activation_checkpointing(recompute)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    load_hf_state_dict(model, {name: torch.zeros_like(tensor) for name, tensor in initial.items()})
    load_hf_state_dict(model, initial)
    losses = train(model, list(range(rank, len(LENGTHS), ranks)), ranks)
    torch.save((losses, hf_state_dict(model)), case / f"{rank}.pt")


def main(rank: int, ranks: int, store: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for case in cases:
        directory, implementation, recompute = case.split(":")
        run(Path(directory), implementation, recompute == "recompute", rank, ranks)
    dist.barrier()  # gloo aborts a rank that leaves while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
