"""Inflation keeps the function: logits before and after, for every family and every way to grow."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.tools.inflating import PRESETS, inflate, inflated_config
from models.checkpoint import hf_state_dict, init_model, load_hf_state_dict, load_model, parameter_count, save_model
from models.config import ModelConfig, ModelConfigError
from models.packed import PackedContext
from models.transformer import Transformer
from tests.models.families import CONFIGS, saved, tokens

DEMO = ModelConfig(
    family="qwen3",
    vocab_size=228,
    hidden_size=128,
    intermediate_size=384,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=512,
    tied=True,
)
GROWTH: dict[str, dict[str, int]] = {
    "hidden": {"hidden_size": 96},
    "intermediate": {"intermediate_size": 200},
    "layers": {"num_layers": 4},
    "query heads": {"num_heads": 12},
    "kv heads": {"num_heads": 24, "num_kv_heads": 4},
    "head_dim": {"head_dim": 96},
    "all": {
        "hidden_size": 144,
        "intermediate_size": 130,
        "num_layers": 3,
        "num_heads": 24,
        "num_kv_heads": 4,
        "head_dim": 96,
    },
}


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(tokens(150), PackedContext.from_lengths([100, 50])))


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_stay(name: str, growth: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = load_model(tmp_path)
    sizes = GROWTH[growth]
    if "head_dim" in sizes:
        sizes = sizes | {"head_dim": 3 * model.config.head_dim}
    target = inflated_config(model.config, **sizes)
    larger = Transformer(target)
    load_hf_state_dict(larger, inflate(model.config, hf_state_dict(model), target, seed=1))
    assert parameter_count(larger) > parameter_count(model)
    torch.testing.assert_close(logits(larger), logits(model), atol=5e-5, rtol=5e-5)


def test_small_activations_need_the_smaller_eps(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(1e-2)  # mean square near eps = 1e-5
    target = inflated_config(model.config, hidden_size=192)
    larger = Transformer(target)
    load_hf_state_dict(larger, inflate(model.config, hf_state_dict(model), target))
    torch.testing.assert_close(logits(larger), logits(model), atol=5e-5, rtol=5e-5)


def test_weights_are_not_mostly_zero(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    model = load_model(tmp_path)
    target = inflated_config(model.config, hidden_size=96, intermediate_size=160)
    tensors = inflate(model.config, hf_state_dict(model), target)
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        zeros = (tensors[f"model.layers.0.{name}.weight"] == 0).float().mean()
        assert zeros <= 0.5, name


@pytest.mark.parametrize(("size", "millions"), [("20m", 20), ("100m", 100)])
def test_presets_reach_their_sizes(size: str, millions: float) -> None:
    model = Transformer(inflated_config(DEMO, **PRESETS[size]), device="meta")
    assert parameter_count(model) / 1e6 == pytest.approx(millions, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size=64 is smaller"),
        ({"num_kv_heads": 2}, "as many query heads per KV head"),
        ({"head_dim": 96}, "not a multiple of 64"),
    ],
)
def test_impossible_growth(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        inflated_config(DEMO, **sizes)


def test_command_line(tmp_path: Path) -> None:
    CONFIGS["qwen3-tied-biases"].save_pretrained(tmp_path / "config")
    save_model(init_model(tmp_path / "config", seed=0), tmp_path / "small")
    command = [sys.executable, "-m", "benchmarks.tools.inflate", str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(
        [*command, "--hidden-size", "64", "--num-layers", "3"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "largest logit difference" in done.stdout
    large, small = load_model(tmp_path / "large"), load_model(tmp_path / "small")
    assert (large.config.hidden_size, large.config.num_layers) == (64, 3)
    torch.testing.assert_close(logits(large), logits(small), atol=1e-4, rtol=1e-4)
