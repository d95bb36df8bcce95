"""The export: exactly the tensors that vLLM has, and the same numbers as our network when computed its way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter.eagle import Drafting, EagleModel, EagleWeightsError, init_eagle, save_eagle
from drafter.export import ExportError, export_drafter
from launch.errors import as_expected
from models.checkpoint import init_model, save_model
from models.packed import PackedContext
from models.transformer import Transformer
from tests.drafter.vllm_blocks import VllmDrafter
from tests.engine.support import write_config

H, HEADS, KV, D, MLP, VOCAB, LAYERS = 32, 4, 2, 16, 48, 61, 6
SETTINGS: Any = {"dtype": torch.float32, "device": "cpu", "batch_invariant": False}
# Written down from vLLM's modules, independently of models/layout.py.
COMMON = {
    "self_attn.k_proj.weight": [KV * D, H], "self_attn.o_proj.weight": [H, HEADS * D],
    "self_attn.q_proj.weight": [HEADS * D, H], "self_attn.v_proj.weight": [KV * D, H],
    "mlp.gate_proj.weight": [MLP, H], "mlp.up_proj.weight": [MLP, H], "mlp.down_proj.weight": [H, MLP],
    "post_attention_layernorm.weight": [H],
}  # fmt: skip
QKV_BIAS = {f"self_attn.{name}_proj.bias": [size * D] for name, size in (("q", HEADS), ("k", KV), ("v", KV))}
WIDE = {f"self_attn.{name}_proj.weight": [size * D, 2 * H] for name, size in (("q", HEADS), ("k", KV), ("v", KV))}
EAGLE3 = {**WIDE, "input_layernorm.weight": [H], "hidden_norm.weight": [H]}
QK_NORM = {"self_attn.q_norm.weight": [D], "self_attn.k_norm.weight": [D]}
TABLE: dict[tuple[str, str], tuple[str, str, dict[str, list[int]]]] = {
    ("eagle", "llama"): ("LlamaForCausalLM", "llama", COMMON),
    ("eagle", "qwen2"): ("LlamaForCausalLM", "llama", COMMON | QKV_BIAS),
    ("eagle", "qwen3"): ("LlamaForCausalLM", "llama", COMMON),
    ("eagle3", "llama"): ("LlamaForCausalLMEagle3", "llama", COMMON | EAGLE3),
    ("eagle3", "qwen2"): (
        "LlamaForCausalLMEagle3", "llama", COMMON | EAGLE3 | QKV_BIAS | {"self_attn.o_proj.bias": [H]}
    ),
    ("eagle3", "qwen3"): ("Eagle3Qwen3ForCausalLM", "qwen3", COMMON | EAGLE3 | QK_NORM),
}  # fmt: skip


def target_of(directory: Path, family: str, **changes: Any) -> Transformer:
    source = write_config(directory / "source", family, num_hidden_layers=LAYERS, head_dim=D, **changes)
    model = init_model(source, 0, batch_invariant=False)
    save_model(model, directory / "target")
    return model


def drafter_of(target: Transformer, kind: Any, directory: Path) -> Drafting:
    """Every weight counts: norms and biases are random too."""
    model = init_eagle(target.config, 3, kind, **SETTINGS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    save_eagle(model, directory)
    return model


def exported(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("kind", "family"), TABLE)
def test_the_tensors_are_those_of_vllm(tmp_path: Path, kind: str, family: str) -> None:
    target = target_of(tmp_path, family)
    drafter_of(target, kind, tmp_path / "drafter")
    done = export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    config, tensors = exported(tmp_path / "out")
    architecture, model_type, layer = TABLE[kind, family]
    prefix = "midlayer." if kind == "eagle3" else "layers.0."
    expected = {prefix + name: shape for name, shape in layer.items()}
    expected["fc.weight"] = [H, (3 if kind == "eagle3" else 2) * H]
    if kind == "eagle3":
        expected |= {"norm.weight": [H], "lm_head.weight": [VOCAB, H]}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (done.method, done.tensors) == (kind, len(expected))
    assert config["architectures"] == [architecture]
    assert (config["model_type"], config["num_hidden_layers"]) == (model_type, 1)
    assert config["draft_vocab_size"] == config["vocab_size"] == VOCAB
    assert config["dtype"] == "float32"
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    assert ids == ([1, 3, 6] if kind == "eagle3" else None)


@pytest.mark.parametrize(("kind", "family"), TABLE)
def test_vllm_computes_what_we_compute(tmp_path: Path, kind: str, family: str) -> None:
    """Two steps: from the target's states, then from the drafter's own output."""
    target = target_of(tmp_path, family)
    model = drafter_of(target, kind, tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    theirs = VllmDrafter(*exported(tmp_path / "out"))
    tokens = torch.randint(0, VOCAB, (19,), generator=torch.Generator().manual_seed(2))
    context = PackedContext.from_lengths([len(tokens)])
    rotation = target.rope.at(context.positions)
    with torch.no_grad():
        rows = _rows(target, tokens, context, model)
        embedded = target.embed_tokens(tokens)
        ours, fed = model.features(rows), theirs.combine(rows)
        for _ in range(2):
            ours = model.advance(embedded, ours, rotation, context)
            read, fed = theirs.forward(embedded, fed)
            torch.testing.assert_close(ours.double(), fed, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(model.readout(ours).double(), read, rtol=1e-4, atol=1e-4)
    if kind == "eagle3":
        head = target.embed_tokens if target.lm_head is None else target.lm_head
        assert torch.equal(theirs.tensors["lm_head.weight"], head.weight.double())


def _rows(target: Transformer, tokens: torch.Tensor, context: PackedContext, model: Drafting) -> torch.Tensor:
    """Inputs of vLLM's combine: outputs of the recorded layers, ids ascending, or the final states."""
    x, outputs = target.embed_tokens(tokens), []
    for block in target.blocks:
        x = block(x, target.rope.at(context.positions), context)
        outputs.append(x)
    return torch.cat([outputs[layer] for layer in model.layers], -1) if model.layers else target.norm(x)


def test_bfloat16_and_biases_stay(tmp_path: Path) -> None:
    target = target_of(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    model = init_eagle(target.config, 0, dtype=torch.bfloat16, device="cpu", batch_invariant=False)
    save_eagle(model, tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "out")
    config, tensors = exported(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (config["dtype"], config["attention_bias"], config["qkv_bias"]) == ("bfloat16", True, True)
    assert VllmDrafter(config, tensors).expected_names() == set(tensors)


def test_what_vllm_would_not_load_is_refused(tmp_path: Path) -> None:
    target = target_of(tmp_path, "qwen3")
    save_eagle(EagleModel(target.config, qk_norm=True, **SETTINGS).requires_grad_(False), tmp_path / "normed")
    with pytest.raises(ExportError, match="norms its queries and keys"):
        export_drafter(tmp_path / "normed", tmp_path / "target", tmp_path / "out")
    shallow = init_eagle(target.config, 0, "eagle3", (2, 2, 4), **SETTINGS)
    save_eagle(shallow, tmp_path / "twice")
    with pytest.raises(ExportError, match=r"\[2, 2, 4\].*some twice"):
        export_drafter(tmp_path / "twice", tmp_path / "target", tmp_path / "out")
    biased = target_of(tmp_path / "biased", "qwen3", attention_bias=True)
    drafter_of(biased, "eagle3", tmp_path / "with_bias")
    with pytest.raises(ExportError, match="attention_bias"):
        export_drafter(tmp_path / "with_bias", tmp_path / "biased" / "target", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_directories_are_named(tmp_path: Path) -> None:
    target = target_of(tmp_path, "qwen3")
    drafter_of(target, "eagle", tmp_path / "drafter")
    cases: list[tuple[str, str, str, type[Exception], str]] = [
        ("nothing", "target", "out", ExportError, "holds no drafter"),
        ("drafter", "target", "drafter", ExportError, "drafter's own directory"),
        ("drafter", "target", "target", ExportError, "target's own directory"),
    ]
    for drafter, model, out, kind, text in cases:
        with pytest.raises(kind, match=text) as caught:
            export_drafter(tmp_path / drafter, tmp_path / model, tmp_path / out)
        assert as_expected(caught.value) is not None
    with pytest.raises(ExportError, match="method eagle, not eagle3"):
        export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "out", method="eagle3")
    target_of(tmp_path / "other", "qwen3", hidden_size=64)
    with pytest.raises(EagleWeightsError, match="hidden_size is 32, not 64"):
        export_drafter(tmp_path / "drafter", tmp_path / "other" / "target", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not a model directory"):
        export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path / "mine")
