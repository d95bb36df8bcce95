"""learner.lora in the configuration: what is refused, with which words, and what the memory plan makes of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from config.model import LoraOptions
from launch.config import ConfigError, check_environment, load_config
from launch.config.memory import learner_shape, misfit
from models.peft import CONFIG_FILE, WEIGHTS_FILE
from policies.roofline.devices import DEVICES
from tests.launch.test_memory import COLOCATED, write_model

Write = Callable[..., Path]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["learner.lora.targets=[q_proj, w_proj]"], "learner.lora.targets", "q_proj, k_proj, v_proj, o_proj"),
        (["learner.lora.targets=[q_proj, q_proj]"], "learner.lora.targets", "twice"),
        (["learner.lora.targets=[]"], "learner.lora.targets", "at least 1"),
        (["learner.lora.rank=0"], "learner.lora.rank", ">= 1"),
        (["learner.lora.dropout=0.05"], "learner.lora.dropout", "must agree"),
        (["learner.lora.rank=4", "model.implementation=transformers"], "model.implementation", "does not adapt"),
        (["learner.lora.rank=4", "learner.autocast_bf16=true"], "learner.autocast_bf16", "float32"),
        (["lora_alpha=8"], "lora_alpha", "use learner.lora.alpha"),
    ],
)
def test_what_cannot_work_is_refused(write_config: Write, overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), overrides)
    assert any(issue.key.startswith(key) and words in str(issue) for issue in caught.value.issues), caught.value


def test_what_works_passes(write_config: Write) -> None:
    config = load_config(write_config(), ["learner.lora={rank: 4, targets: [q_proj, up_proj], rslora: true}"]).config
    assert config.learner.lora is not None
    assert config.learner.lora.scale == 16
    bf16 = ["learner.lora.rank=4", "learner.autocast_bf16=true", "model.dtype=bfloat16"]
    assert load_config(write_config(), bf16).config.learner.lora == LoraOptions(rank=4)
    assert load_config(write_config()).config.learner.lora is None


def test_a_rank_no_matrix_has_and_a_network_that_is_not_ours_are_faults(write_config: Write, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()

    def found(*overrides: str, **changes: object) -> list[tuple[str, str]]:
        (model / "config.json").write_text(json.dumps(LLAMA | changes))
        issues = check_environment(load_config(write_config(), overrides).config)
        return [(issue.key, str(issue)) for issue in issues if issue.key.startswith("learner.lora")]

    ((key, text),) = found("learner.lora.rank=9")
    assert key == "learner.lora.rank"
    assert "8 of k_proj's smaller side" in text
    assert not found("learner.lora.rank=8")
    assert not found("learner.lora={rank: 16, targets: [q_proj, gate_proj]}")
    ((key, text),) = found("learner.lora.rank=2", architectures=["GemmaForCausalLM"])
    assert (key, "our own architectures" in text) == ("learner.lora", True)


def test_an_adapter_to_go_on_from_is_looked_at(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "own").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}

    def found(**changes: object) -> list[tuple[str, str]]:
        (tmp_path / "own" / CONFIG_FILE).write_text(json.dumps(config | changes))
        # Relative: looked up beside the configuration file.
        asked = load_config(write_config(), ["learner.lora={rank: 2, targets: [q_proj], path: own}"]).config
        issues = [issue for issue in check_environment(asked) if issue.key.startswith("learner.lora")]
        return [(issue.key, f"{issue.message} {issue.remedy}") for issue in issues]

    ((key, text),) = found()
    assert (key, WEIGHTS_FILE in text) == ("learner.lora.path", True)
    assert ("learner.lora.rank", True) in [(key, "set learner.lora.rank=4" in text) for key, text in found(r=4)]
    assert any("use_dora" in text for _, text in found(use_dora=True))
    assert any("set learner.lora.targets=['k_proj']" in text for _, text in found(target_modules=["k_proj"]))


def test_a_model_too_large_for_all_its_weights_fits_with_adapters(write_config: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "7b")
    options = [*COLOCATED, "learner.activation_checkpointing=true"]
    full = load_config(write_config(), options).config
    issue = misfit(full, DEVICES["A100"])
    assert issue is not None
    adapters = load_config(
        write_config(), [*options, "learner.lora.rank=16", "objective.kl=k3", "objective.kl_coef=0.1"]
    )
    shape = learner_shape(adapters.config)
    assert shape is not None
    assert shape.adapters is not None
    assert 30e6 < shape.adapters < 60e6  # of Qwen2.5-7B at rank 16
    assert misfit(adapters.config, DEVICES["A100"]) is None
