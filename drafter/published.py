"""Read the config.json of published EAGLE-3 heads, in its several forms. Owns their keys, and which heads our networks
can compute; reads no weights and needs no torch.

Three forms are read: `speculators` (0.9: `speculators_model_type`, the decoder layer in `transformer_layer_config`),
SpecForge's (`LlamaForCausalLMEagle3`, also written by `paceline export-drafter`) and the EAGLE authors'
(`LlamaForCausalLM`, one layer, `draft_vocab_size`). Missing keys have transformers' defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.config import ModelConfig, ModelConfigError, read_config

CONFIG_FILE = "config.json"
Form = Literal["speculators", "specforge"]
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
_AUTHORS = "LlamaForCausalLM"
_IDS = "eagle_aux_hidden_state_layer_ids"
# Defaults of transformers 5 for the two kinds of decoder layers in heads: `speculators` leaves them out of the file.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}


class EagleWeightsError(ValueError):
    """A drafter directory that is unreadable or does not fit the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The computation of an EAGLE-3 head besides fusing three layers. Source: speculators 0.9 (its eagle3 model); the
    heads of SpecForge and of the EAGLE authors are special cases."""

    block: ModelConfig  # of its decoder layer: own heads, MLP width, biases, norms' eps and RoPE; the target's width
    draft_vocab: int | None = None  # rows of its own LM head; None: it drafts through the target's
    norm_before_residual: bool = False  # the residual stream is the normed feature
    norm_before_fc: bool = False  # one norm over the three layers together, before fusion
    fc_norm: bool = False  # one norm for each of them
    norm_output: bool = False  # the fed-back state is taken after the final norm

    @classmethod
    def of(cls, target: ModelConfig) -> "HeadShape":
        """Return the shape of heads made here: a block like the target's, and the target's LM head."""
        return cls(block=target)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedHead:
    """A head's config.json, for one target."""

    form: Form
    layers: tuple[int, int, int]  # of the target, from 0
    shape: HeadShape


def is_published(found: Mapping[str, Any]) -> bool:
    """Whether a config.json is a published head's, readable or not. Ours have the key `drafter`."""
    return "drafter" not in found and ("speculators_model_type" in found or bool(found.get("architectures")))


def read_published(directory: str | Path, target: ModelConfig) -> PublishedHead:
    """Read the head in `directory`, for a target of `target`. Raises EagleWeightsError naming file and key, for an
    unsupported kind of speculator, or another target's head."""
    path = Path(directory) / CONFIG_FILE
    try:
        return _read(path, read_config(path), target)
    except ModelConfigError as error:
        raise EagleWeightsError(f"{path}: {error}") from error


def _read(path: Path, found: Mapping[str, Any], target: ModelConfig) -> PublishedHead:
    form = form_of(path, found)
    layer: Mapping[str, Any] = found
    if form == "speculators":
        layer = found.get("transformer_layer_config") or {}
        if not isinstance(layer, Mapping) or not layer:
            raise EagleWeightsError(f"{path}: transformer_layer_config is missing: the file is not whole")
        if (algorithm := (found.get("speculators_config") or {}).get("algorithm", "eagle3")) != "eagle3":
            raise EagleWeightsError(f"{path}: speculators_config.algorithm is {algorithm!r}, not eagle3")
    block = _block(path, layer)
    eagle: Mapping[str, Any] = found.get("eagle_config") or {}
    for key, value, wanted in (
        ("vocab_size", block.vocab_size, target.vocab_size),
        ("hidden_size", block.hidden_size, target.hidden_size),
        ("target_hidden_size", found.get("target_hidden_size") or target.hidden_size, target.hidden_size),
    ):
        if value != wanted:
            raise EagleWeightsError(
                f"{path}: made for another target: its {key} is {value}, and the model has {wanted}"
                + (" (heads narrower than their target are not computed here)" if key == "hidden_size" else "")
            )
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise EagleWeightsError(f"{path}: eagle_config.use_aux_hidden_state=false: only heads that fuse three layers")
    if found.get("embed_requires_grad"):
        raise EagleWeightsError(
            f"{path}: embed_requires_grad=true: its embedding is not the target's, which these networks share"
        )
    if found.get("parallel_drafting") or found.get("mask_token_id") is not None:
        raise EagleWeightsError(f"{path}: mask_token_id: a head that drafts in parallel (P-EAGLE) is not computed here")
    draft = found.get("draft_vocab_size") or block.vocab_size
    if not isinstance(draft, int) or not 1 <= draft <= target.vocab_size:
        raise EagleWeightsError(f"{path}: draft_vocab_size is {draft}, and the target has {target.vocab_size} tokens")
    if form == "speculators" and FLAGS[0] not in found:
        raise EagleWeightsError(f"{path}: {FLAGS[0]} is missing: speculators takes false, vLLM true; write which it is")
    flags = {flag: bool(found.get(flag) or eagle.get(flag)) for flag in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise EagleWeightsError(f"{path}: norm_before_fc and fc_norm exclude each other")
    return PublishedHead(
        form=form,
        layers=_layers(path, found.get(_IDS) or eagle.get(_IDS), target.num_layers),
        shape=HeadShape(block=block, draft_vocab=draft, **flags),
    )


def form_of(path: Path, found: Mapping[str, Any]) -> Form:
    """Return the form, by the keys of a config.json. Raises EagleWeightsError if it is no EAGLE-3 head."""
    kind = found.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise EagleWeightsError(
                f"{path}: speculators_model_type is {kind!r}, and this engine computes eagle3 heads only: give one, or "
                "fit one with paceline warmup-drafter --algorithm eagle3"
            )
        return "speculators"
    name = (found.get("architectures") or [None])[0]
    if name in _ARCHITECTURES:
        return "specforge"
    if name == _AUTHORS and "draft_vocab_size" in found:
        return "specforge"
    if name == _AUTHORS and found.get("num_hidden_layers") == 1:
        raise EagleWeightsError(
            f"{path}: draft_vocab_size is missing: an EAGLE-1 or EAGLE-2 head, of which only those made here are read"
        )
    raise EagleWeightsError(
        f"{path}: architectures is {name!r}, which is no EAGLE-3 head: {', '.join(_ARCHITECTURES)} or "
        "speculators_model_type=eagle3 are"
    )


def _block(path: Path, layer: Mapping[str, Any]) -> ModelConfig:
    kind = layer.get("model_type", "llama")
    if kind not in _DEFAULTS:
        raise EagleWeightsError(f"{path}: model_type is {kind!r}: heads have a decoder layer of llama or qwen3")
    given = {key: value for key, value in layer.items() if value is not None and key != "architectures"}
    whole: dict[str, Any] = {**_DEFAULTS[kind], **given, "model_type": kind}
    if (count := whole.get("num_hidden_layers", 32)) != 1:
        raise EagleWeightsError(f"{path}: num_hidden_layers is {count}, and heads of one decoder layer are computed")
    return ModelConfig.from_hf(whole)


def _layers(path: Path, ids: Any, count: int) -> tuple[int, int, int]:
    """Return our layers: vLLM's id i is the residual stream before layer i, so the output of layer i - 1."""
    default = ids is None
    ids = [2, count // 2, count - 3] if default else ids
    if not isinstance(ids, list) or len(ids) != 3 or not all(isinstance(one, int) for one in ids):
        raise EagleWeightsError(f"{path}: {_IDS} is {ids}: heads that fuse three layers are computed")
    if ids != sorted(set(ids)) or ids[0] < 1 or ids[2] > count:
        said = "is left out, which means" if default else "is"
        raise EagleWeightsError(
            f"{path}: {_IDS} {said} {ids}: they must ascend from 1 to {count}, the layers of the target"
        )
    return ids[0] - 1, ids[1] - 1, ids[2] - 1
