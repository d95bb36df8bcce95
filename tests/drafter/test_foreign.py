"""Speculators that vLLM computes: their config.json is read, and what does not fit is named with file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from config.catalogue import CATALOGUE
from drafter.foreign import FOREIGN, MTP_LAYERS, ForeignSpeculator, is_beyond, read_speculator
from drafter.published import EagleWeightsError

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 6,
}
MTP = {**TARGET, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2}
DFLASH = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 4]},
}
PEAGLE = {
    "speculators_model_type": "peagle",
    "transformer_layer_config": {**TARGET, "num_hidden_layers": 1},
    "mask_token_id": 60,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 6],
}
LAYERS = ["fc.weight", "norm.weight", "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"]


def folder(path: Path, config: dict[str, Any], names: list[str] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if names is not None:
        save_file({name: torch.zeros(1) for name in names}, path / "model.safetensors")
    return path


def read(tmp_path: Path, name: str, config: dict[str, Any], names: list[str] | None = None) -> ForeignSpeculator:
    target = folder(tmp_path / "target", TARGET)
    return read_speculator(name, folder(tmp_path / "head", config), target, names)


def test_each_kind_is_drafted_with_vllms_own_method(tmp_path: Path) -> None:
    assert read(tmp_path, "mtp", MTP, ["model.mtp_layers.0.input_proj.weight"]) == ForeignSpeculator(
        method="mtp", multiple=2
    )
    assert read(tmp_path, "dflash", DFLASH, LAYERS) == ForeignSpeculator(method="dflash", block=7)
    assert read(tmp_path, "peagle", PEAGLE, LAYERS[:3]) == ForeignSpeculator(method="eagle3", parallel=True)
    published = {
        **PEAGLE,
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 6],
        "block_size": 8,
        "sample_from_anchor": True,
    }
    assert read(tmp_path, "dflash", published) == ForeignSpeculator(method="dflash", block=8)
    nested = {"model_type": "qwen3_5", "text_config": {**TARGET, "mtp_num_hidden_layers": 1}}
    assert read(tmp_path, "mtp", nested) == ForeignSpeculator(method="mtp")


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("mtp", TARGET, "architectures is 'Qwen3ForCausalLM', of which vLLM knows no MTP layers"),
        ("mtp", MTP | {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ("mtp", MTP | {"hidden_size": 128}, "another target: its hidden_size is 128, and the model has 64"),
        ("mtp", MTP | {"num_hidden_layers": 5}, "another target: its num_hidden_layers is 5"),
        ("dflash", PEAGLE, "speculators_model_type is 'peagle', which is no dflash speculator"),
        ("dflash", TARGET, r"architectures is \['Qwen3ForCausalLM'\], which is no dflash speculator"),
        ("peagle", PEAGLE | {"speculators_model_type": "xpress"}, "speculators_model_type is 'xpress'"),
        ("peagle", PEAGLE | {"transformer_layer_config": {}}, "transformer_layer_config is missing"),
        ("peagle", PEAGLE | {"target_hidden_size": 32}, "another target: its target_hidden_size is 32"),
        ("peagle", PEAGLE | {"mask_token_id": 61}, "mask_token_id is 61, and the target has 61 tokens"),
        ("peagle", PEAGLE | {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, "they must be from 1 to 6"),
        ("dflash", DFLASH | {"vocab_size": 60}, "another target: its vocab_size is 60"),
        (
            "dflash",
            DFLASH | {"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 6]}},
            r"target_layer_ids is \[1, 6\]: they must be from 0 to 5",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_file_and_key(
    tmp_path: Path, name: str, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(EagleWeightsError, match=f"head/config.json: .*{said}"):
        read(tmp_path, name, config)


@pytest.mark.parametrize("part", LAYERS)
def test_half_a_checkpoint_is_named(tmp_path: Path, part: str) -> None:
    left = [name for name in LAYERS if name != part]
    with pytest.raises(EagleWeightsError, match="half a checkpoint"):
        read(tmp_path, "dflash", DFLASH, left)
    with pytest.raises(EagleWeightsError, match="hold no MTP layer"):
        read(tmp_path, "mtp", MTP, ["model.embed_tokens.weight", "model.layers.5.mlp.up_proj.weight"])


def test_mtp_layers_are_told_from_the_targets() -> None:
    assert is_beyond("model.mtp_layers.0.input_proj.weight", 6)
    assert is_beyond("mtp.fc.weight", 6)
    assert is_beyond("model.layers.6.eh_proj.weight", 6)
    assert not is_beyond("model.layers.5.mlp.up_proj.weight", 6)
    assert not is_beyond("model.embed_tokens.weight", 6)


def test_the_catalogue_has_them_and_only_vllm_can() -> None:
    from actors.engine.capabilities import NATIVE, VLLM

    assert FOREIGN == ("mtp", "dflash", "peagle")
    assert set(FOREIGN).isdisjoint(NATIVE.drafters)
    assert set(FOREIGN) <= set(VLLM.drafters) == set(CATALOGUE)
    assert len(MTP_LAYERS) == 17
