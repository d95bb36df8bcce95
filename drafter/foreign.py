"""Read the config.json of speculators that vLLM computes itself: MTP layers, DFlash and P-EAGLE. Owns their keys, and
which fit a target; computes none, and needs no torch.

Sources: vLLM 0.32 and 0.33 (its speculative configuration, and its reader of speculators' files); speculators 0.9.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from config.catalogue import CATALOGUE
from drafter.published import CONFIG_FILE, EagleWeightsError
from models.config import ModelConfigError, read_config

FOREIGN = tuple(name for name, entry in CATALOGUE.items() if entry.foreign)
# By architecture or model_type, whichever vLLM goes by: the key with the number of MTP layers in its checkpoints.
_COUNT = "num_nextn_predict_layers"
MTP_LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("MiMoForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), _COUNT),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "hy_v3", "longcat_flash"), _COUNT),
    **dict.fromkeys(("nemotron_h", "pangu_ultra_moe", "qwen3_next", "step3p5"), _COUNT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers"),
}
_KIND, _LAYER = "speculators_model_type", "transformer_layer_config"
_IDS = {"dflash": "aux_hidden_state_layer_ids", "peagle": "eagle_aux_hidden_state_layer_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSpeculator:
    """How vLLM drafts with it."""

    method: Literal["mtp", "dflash", "eagle3"]  # of vLLM's speculative_config
    parallel: bool = False  # EAGLE's method, but all drafts in one pass
    multiple: int = 1  # vLLM accepts only such multiples as the deepest draft
    block: int = 0  # tokens that it was trained to draft in one pass; 0: any number


def read_speculator(
    name: str, directory: str | Path, target: str | Path, tensors: Collection[str] | None = None
) -> ForeignSpeculator:
    """Read the speculator of catalogue name `name` for the model in `target`. `tensors`: names of those beside it;
    None: they are not checked.

    Raises EagleWeightsError naming file and key, for another kind of speculator, one of another target, and one whose
    weights are not all there.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        found, model = read_config(path.parent), _text(read_config(target))
    except ModelConfigError as error:
        raise EagleWeightsError(f"{path}: {error}") from error
    if name == "mtp":
        return ForeignSpeculator(method="mtp", multiple=_mtp_layers(path, found, model, tensors))
    kind = found.get(_KIND) or ("dflash" if isinstance(found.get("dflash_config"), Mapping) else None)
    if kind != name:
        there = f"{_KIND} is {kind!r}" if kind else f"architectures is {found.get('architectures')}"
        raise EagleWeightsError(f"{path}: {there}, which is no {name} speculator")
    _check_shape(path, name, found, model)
    layer = found[_LAYER] if _KIND in found else found
    if tensors is not None:
        _check_names(path, tensors, int(layer.get("num_hidden_layers", 1)))
    if name == "peagle":
        return ForeignSpeculator(method="eagle3", parallel=True)
    block = found.get("block_size") or 0
    own = found.get("dflash_config") or found
    return ForeignSpeculator(method="dflash", block=max(block - (not own.get("sample_from_anchor")), 0))


def is_beyond(name: str, layers: float) -> bool:
    """Whether a checkpoint's tensor belongs to MTP layers, which a target of `layers` layers does not compute."""
    parts = name.split(".")
    if any(part.startswith("mtp") for part in parts):
        return True
    after = [number for part, number in pairwise(parts) if part == "layers"]
    return bool(after) and after[0].isdigit() and int(after[0]) >= layers


def _mtp_layers(path: Path, found: Mapping[str, Any], model: Mapping[str, Any], tensors: Collection[str] | None) -> int:
    """Return how many MTP layers the checkpoint has."""
    kinds = [*(found.get("architectures") or ())[:1], found.get("model_type")]
    key = next((MTP_LAYERS[kind] for kind in kinds if kind in MTP_LAYERS), None)
    if key is None:
        raise EagleWeightsError(f"{path}: architectures is {kinds[0]!r}, of which vLLM knows no MTP layers")
    text = _text(found)
    count = text.get(key)
    if not isinstance(count, int) or count < 1:
        raise EagleWeightsError(f"{path}: {key} is {count}: this checkpoint has no MTP layers")
    _check_sizes(path, text, model, ("vocab_size", "hidden_size", "num_hidden_layers"))
    layers = int(text["num_hidden_layers"])
    if tensors is not None and not any(is_beyond(name, layers) for name in tensors):
        raise EagleWeightsError(f"{path}: {key} is {count}, but the weights beside it hold no MTP layer")
    return count


def _check_shape(path: Path, name: str, found: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    layer = found.get(_LAYER) if _KIND in found else found
    if not isinstance(layer, Mapping) or not layer:
        raise EagleWeightsError(f"{path}: {_LAYER} is missing: the file is not whole")
    _check_sizes(path, layer, model, ("vocab_size",))
    wide = "target_hidden_size" if found.get("target_hidden_size") is not None else "hidden_size"
    width = (found if wide in found else layer).get(wide)
    if width != model["hidden_size"]:
        raise EagleWeightsError(_other(path, wide, width, model["hidden_size"]))
    own: Mapping[str, Any] = found.get("dflash_config") or found
    mask = own.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < model["vocab_size"]:
        raise EagleWeightsError(f"{path}: mask_token_id is {mask}, and the target has {model['vocab_size']} tokens")
    key, first = (_IDS[name], 1) if _KIND in found else ("target_layer_ids", 0)
    ids, layers = own.get(key), int(model["num_hidden_layers"])
    if name == "peagle" and ids is None:
        return  # vLLM's default
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and first <= i < layers + first for i in ids):
        raise EagleWeightsError(
            f"{path}: {key} is {ids}: they must be from {first} to {layers + first - 1}, the layers of the target"
        )


def _check_sizes(path: Path, have: Mapping[str, Any], want: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if have.get(key) != want.get(key):
            raise EagleWeightsError(_other(path, key, have.get(key), want.get(key)))


def _other(path: Path, key: str, have: object, want: object) -> str:
    return f"{path}: made for another target: its {key} is {have}, and the model has {want}"


def _check_names(path: Path, names: Collection[str], layers: int) -> None:
    """Check that no part of the speculator is missing."""
    for part in ("fc.", "norm.", *(f"layers.{i}." for i in range(layers))):
        if not any(f".{part}" in f".{name}" for name in names):
            raise EagleWeightsError(f"{path}: the weights beside it hold no {part}*: half a checkpoint")


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def foreign_paths(options: Any) -> Iterator[tuple[str, str]]:
    """Yield name and path of the foreign speculators that a configuration names (SpeculationOptions)."""
    for name in FOREIGN:
        path = getattr(options, name).path
        if path is not None and options.mode != "off":
            yield name, path
