"""A drafter's directory: weights in safetensors, and a config.json with its kind and its target's shape.

Ours has `drafter: eagle` or `eagle3`. Other files are read as published EAGLE-3 heads (`drafter.published`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from config.catalogue import FRESH_WEIGHTS
from drafter.eagle.model import Drafting, Eagle3Model, Kind, empty_eagle, init_eagle
from drafter.eagle.names import read_head
from drafter.published import CONFIG_FILE, EagleWeightsError, HeadShape, is_published, read_published
from models.config import Llama3RopeScaling, ModelConfig

WEIGHTS_FILE = "model.safetensors"
_IDS = "ids"  # of a head with a smaller vocabulary: see DrafterNetwork
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


_BLOCK_KEYS = (
    *("family", "vocab_size", "num_layers", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *_SHAPE_KEYS,
)
_KINDS: dict[str, Kind] = {"eagle": "eagle", "eagle3": "eagle3"}


def save_eagle(model: Drafting, directory: str | Path) -> None:
    """Write the weights and their shape. Other files in an existing directory stay."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.ids is not None:
        state[_IDS] = model.ids.cpu()
    save_file(state, path / WEIGHTS_FILE)
    (path / WEIGHTS_FILE).chmod(0o644)  # safetensors writes 0600, and engines may run as another user
    own = {"drafter": model.kind, "qk_norm": model.block.q_norm is not None}
    shape = own | ({"layers": list(model.layers)} if model.layers else {}) | _shape(model.config) | _head(model)
    (path / CONFIG_FILE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def load_eagle(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
) -> Drafting:
    """Load the drafter in `directory` for a target of `config`: one of ours, or a published EAGLE-3 head. Raises
    EagleWeightsError naming what does not fit."""
    path = Path(directory)
    try:
        found: dict[str, Any] = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        if is_published(found):
            return _load_published(path, config, dtype=dtype, device=device, batch_invariant=batch_invariant)
        state = load_file(path / WEIGHTS_FILE)
    except EagleWeightsError:
        raise
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
            shape=_shape_of(found.get("head")),
        )
        if isinstance(model, Eagle3Model):
            model.set_ids(state.pop(_IDS, None))
        model.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EagleWeightsError(f"{path}: {error}") from error
    return model


def check_eagle(directory: str | Path, config: ModelConfig) -> None:
    """Raise EagleWeightsError as `load_eagle` would."""
    load_eagle(directory, config, dtype=torch.float32, device="cpu", batch_invariant=False)


def _load_published(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool
) -> Eagle3Model:
    head = read_published(path, config)
    model = Eagle3Model(config, head.layers, head.shape, dtype=dtype, device=device, batch_invariant=batch_invariant)
    state, ids = read_head(path, head.shape, model.state_dict(), config.vocab_size)
    model.load_state_dict(state)
    model.set_ids(ids)
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
    """Return the drafter of rollout.speculation.eagle.path: a directory, or fresh weights of some kind: `random`
    (eagle), `random:eagle3`, `random:eagle3:1,3,4` with the layers it reads. Raises EagleWeightsError."""
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


def _head(model: Drafting) -> dict[str, Any]:
    """Return the part of a head's shape that differs from the target's; empty for heads made here."""
    if not isinstance(model, Eagle3Model) or model.shape == HeadShape.of(model.config):
        return {}
    block = asdict(replace(model.shape.block, source={}))
    return {"head": asdict(model.shape) | {"block": {key: value for key, value in block.items() if key in _BLOCK_KEYS}}}


def _shape_of(head: Mapping[str, Any] | None) -> HeadShape | None:
    if head is None:
        return None
    block = dict(head["block"])
    scaling = block["rope_scaling"]
    block["rope_scaling"] = None if scaling is None else Llama3RopeScaling(**scaling)
    return HeadShape(**{**head, "block": ModelConfig(**block)})
