"""Write the newest drafter that a run's trainers have saved as a drafter's folder."""

from pathlib import Path

import torch

from actors.spot.checkpoints import history, newest
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
    checkpoints = history(saved)
    found = newest(checkpoints, {f"model.{name}": tensor for name, tensor in state.items()})
    if found is None:
        return None
    network.load_state_dict({name: found[f"model.{name}"] for name in state})
    save_eagle(network.to(getattr(torch, dtype)), out)
    return len(checkpoints)
