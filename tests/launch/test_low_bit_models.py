"""Models that low-bit rollouts cannot be made of are refused before a run starts, with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.config import check_environment, load_config

Write = Callable[..., Path]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 128),
    "num_attention_heads": 2,
}
VLLM = "rollout.engine.backend=vllm"


@pytest.mark.parametrize(
    ("overrides", "config", "key", "said"),
    [
        (["rollout.quantization=w4a8"], {"hidden_size": 96}, "rollout.quantization", "groups of 128 or 64 inputs"),
        ([VLLM, "rollout.quantization=w8a8"], {"architectures": ["GemmaForCausalLM"]}, "model.path", "none"),
        ([], {"quantization_config": {"bits": 8}}, "model.path", "rollout.quantization"),
        ([VLLM], {"quantization_config": {"bits": 8}}, "model.path", "master"),
    ],
)
def test_a_model_that_low_bit_rollouts_cannot_be_made_of(
    write_config: Write, tmp_path: Path, overrides: list[str], config: dict[str, Any], key: str, said: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA | config))
    loaded = load_config(write_config(), [*overrides, f"model.path={tmp_path / 'model'}"]).config
    found = [issue for issue in check_environment(loaded) if issue.key == key and said in str(issue)]
    assert len(found) == 1
    fine = loaded.model_copy(update={"rollout": loaded.rollout.model_copy(update={"quantization": "none"})})
    if "quantization_config" not in config:
        assert not [issue for issue in check_environment(fine) if said in str(issue)]
