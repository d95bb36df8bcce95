"""Write the newest drafter that a run's trainers have saved as a drafter's folder."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from actors.spot.checkpoints import history, restore
from drafter.eagle import save_eagle
from drafter.eagle.files import eagle_at
from models.config import ModelConfig, read_config


def write_newest(saved: Path, path: str, target: Path, out: Path, *, dtype: str, seed: int) -> int | None:
    """Write `out` from the checkpoints below `saved`, in `dtype`. Returns their number, or None if none fits.

    path: the initial weights, as in rollout.speculation.eagle.path. Raises EagleWeightsError, ModelConfigError."""
    network = eagle_at(
        path,
        ModelConfig.from_hf(read_config(target)),
        seed,
        dtype=torch.float32,
        device="cpu",
        batch_invariant=False,
    ).requires_grad_(False)
    state = network.state_dict()

    def load(found: Mapping[str, Tensor]) -> None:
        network.load_state_dict({name: found[f"model.{name}"] for name in state})

    checkpoints = history(saved)
    if restore(checkpoints, load, {f"model.{name}": tensor for name, tensor in state.items()}) is None:
        return None
    save_eagle(network.to(getattr(torch, dtype)), out)
    return len(checkpoints)
