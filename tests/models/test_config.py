"""config.json: both spellings, round trips, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, MistralConfig

from models.checkpoint import read_config
from models.config import (
    ARCHITECTURES,
    Llama3RopeScaling,
    ModelConfig,
    ModelConfigError,
    UnsupportedModelError,
    attention_heads,
    longest_sequence,
)
from tests.models.families import CONFIGS

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_transformers(name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(CONFIGS[name].to_dict())
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is type(CONFIGS[name])
    assert ModelConfig.from_hf(theirs.to_dict()) == config
    assert theirs.eos_token_id == 1  # a key that means nothing to us survives


def test_spelling_of_transformers_4() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = MINIMAL | {"rope_theta": 500_000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    new = MINIMAL | {"rope_parameters": scaling | {"rope_theta": 500_000.0}, "dtype": "bfloat16"}
    config = ModelConfig.from_hf(old)
    assert config == ModelConfig.from_hf(new)
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_defaults_of_minimal_configs() -> None:
    config = ModelConfig.from_hf(MINIMAL)
    assert (config.num_kv_heads, config.head_dim, config.qkv_bias, config.qk_norm) == (2, 4, False, False)
    qwen2 = ModelConfig.from_hf(MINIMAL | {"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    assert ModelConfig.from_hf(MINIMAL | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    by_type = {key: value for key, value in MINIMAL.items() if key != "architectures"} | {"model_type": "qwen3"}
    assert ModelConfig.from_hf(by_type).family == "qwen3"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "gemma2"}, "gemma2"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}, "sliding"),
    ],
)
def test_unsupported_models_say_so_and_which_are_supported(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=", ".join(ARCHITECTURES)) as caught:
        ModelConfig.from_hf(MINIMAL | change)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
        {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 4096},
    ],
)
def test_a_window_that_no_layer_uses_is_accepted(harmless: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(MINIMAL | harmless) == ModelConfig.from_hf(MINIMAL)


MISTRAL = MINIMAL | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": None},  # from 0.2 on
        {"sliding_window": None, "max_position_embeddings": 32768},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"max_position_embeddings": 1024},  # 4096 where it is left out
        {"sliding_window": None, "attention_bias": True, "mlp_bias": True},  # keys that this architecture does not have
    ],
)
def test_mistral_without_a_window_is_llama(harmless: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig.from_hf(MISTRAL | harmless)
    llama = MINIMAL | {"num_key_value_heads": 2, "max_position_embeddings": config.max_position_embeddings}
    assert dataclasses.replace(config, family="llama") == ModelConfig.from_hf(llama)
    assert ModelConfig.from_hf(config.to_hf()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.sliding_window is None or theirs.sliding_window >= theirs.max_position_embeddings
    assert theirs.architectures == ["MistralForCausalLM"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"sliding_window": 4096, "max_position_embeddings": 32768},
            ("sliding_window=4096", "max_position_embeddings=32768"),
        ),
        ({"sliding_window": 4096}, ("sliding_window=4096", "max_position_embeddings=131072")),
        ({}, ("sliding_window=4096", "max_position_embeddings=131072")),
        ({"sliding_window": 16, "layer_types": ["full_attention"]}, ("sliding_window=16",)),
        ({"sliding_window": 16, "use_sliding_window": False}, ("sliding_window=16",)),
    ],
)
def test_a_window_that_hides_keys_is_refused_with_the_way_out(change: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_hf(MISTRAL | change)
    message = str(caught.value)
    assert all(part in message for part in named)
    window = change.get("sliding_window", 4096)
    assert f"set max_position_embeddings to {window} in config.json" in message
    assert ModelConfig.from_hf(MISTRAL | change | {"max_position_embeddings": window}).max_position_embeddings == window


def test_mistrals_default_heads_are_transformers_own() -> None:
    config = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    wide = config | {"num_attention_heads": 16, "hidden_size": 64, "sliding_window": None}
    assert ModelConfig.from_hf(wide).num_kv_heads == MistralConfig(**wide).num_key_value_heads == 8
    assert ModelConfig.from_hf(wide | {"num_key_value_heads": None}).num_kv_heads == 16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 9}, "hidden_size=9"),
        ({"head_dim": 5}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "give the checkpoint that it was made from"),
    ],
)
def test_impossible_values_name_the_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelConfigError, match=named):
        ModelConfig.from_hf(MINIMAL | change)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="JSON object"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "limits"),
    [
        ({"max_position_embeddings": 99}, (99, 2)),
        ({"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 99}, (99, 2)),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"max_position_embeddings": 7}},
            (7, None),
        ),
        ({"architectures": ["GPT2LMHeadModel"], "num_attention_heads": None}, (None, None)),
    ],
)
def test_limits_are_known_of_any_architecture_that_says_them(
    change: dict[str, Any], limits: tuple[int | None, int | None]
) -> None:
    config = MINIMAL | change
    assert (longest_sequence(config), attention_heads(config)) == limits


def test_limits_of_one_of_ours_that_is_not_usable_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="num_attention_heads"):
        attention_heads(MINIMAL | {"num_attention_heads": 0})
