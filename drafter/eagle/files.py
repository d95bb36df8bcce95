"""A drafter's directory: weights in safetensors, and a config.json that says what it is and which target it fits."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from config.catalogue import FRESH_WEIGHTS
from drafter.eagle.model import Drafting, Kind, empty_eagle, init_eagle
from models.config import ModelConfig

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_SHAPE_KEYS = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
)


_KINDS: dict[str, Kind] = {"eagle": "eagle", "eagle3": "eagle3"}


class EagleWeightsError(ValueError):
    """A drafter directory that is unreadable or does not fit the target."""


def save_eagle(model: Drafting, directory: str | Path) -> None:
    """Write weights and the shape they need; a directory that exists keeps its other files."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path / WEIGHTS_FILE)
    (path / WEIGHTS_FILE).chmod(0o644)  # safetensors writes 0600, and engines may run as another user
    own = {"drafter": model.kind, "qk_norm": model.block.q_norm is not None}
    shape = own | ({"layers": list(model.layers)} if model.layers else {}) | _shape(model.config)
    (path / CONFIG_FILE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def load_eagle(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
) -> Drafting:
    """The drafter in `directory` for a target of `config`. Raises EagleWeightsError naming what does not fit."""
    path = Path(directory)
    try:
        found: dict[str, Any] = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        state = load_file(path / WEIGHTS_FILE)
    except PermissionError as error:
        raise EagleWeightsError(f"{path} cannot be read by this user ({error}): check the permissions") from error
    except Exception as error:
        raise EagleWeightsError(
            f"{path} holds no EAGLE drafter ({error}): rollout.speculation.eagle.path must name a directory with "
            f"{CONFIG_FILE} and {WEIGHTS_FILE}, or be 'random'"
        ) from error
    for key, value in _shape(config).items():
        if found.get(key) != value:
            raise EagleWeightsError(f"{path} was made for another target: its {key} is {found.get(key)}, not {value}")
    try:
        layers = tuple(found["layers"]) if "layers" in found else None
        model = empty_eagle(
            found["drafter"],
            config,
            layers,
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
            qk_norm=found["qk_norm"],
        )
        model.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EagleWeightsError(f"{path}: {error}") from error
    return model


def eagle_at(
    path: str,
    config: ModelConfig,
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
) -> Drafting:
    """What rollout.speculation.eagle.path means: a directory, or fresh weights of some kind: `random` (eagle),
    `random:eagle3`, `random:eagle3:1,3,4` with the layers it reads. Raises EagleWeightsError."""
    word, _, kind = path.partition(":")
    if word != FRESH_WEIGHTS:
        return load_eagle(path, config, dtype=dtype, device=device, batch_invariant=batch_invariant)
    name, _, layers = kind.partition(":")
    try:
        given = tuple(int(layer) for layer in layers.split(",")) if layers else None
        return init_eagle(
            config,
            seed,
            _KINDS[name or "eagle"],
            given,  # type: ignore[arg-type]  # checked by the network
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
        )
    except (KeyError, ValueError) as error:
        raise EagleWeightsError(
            f"rollout.speculation.eagle.path={path}: {error}; fresh weights are random, random:eagle3 or "
            "random:eagle3:LOW,MIDDLE,HIGH"
        ) from error


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _SHAPE_KEYS}
