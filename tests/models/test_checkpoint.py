"""Checkpoints: round trips with `transformers`, sharding, atomic replacement, and errors that name the tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import models.directory as directory
from models.checkpoint import (
    WeightsMismatchError,
    hf_state_dict,
    init_model,
    load_hf_state_dict,
    load_model,
    parameter_count,
    save_model,
    write_checkpoint,
)
from models.config import read_config
from models.packed import PackedContext
from tests.models.families import CONFIGS, FAMILIES, saved, tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    model = load_model(tmp_path)
    ours = hf_state_dict(model)
    expected = dict(theirs.named_parameters())
    assert sorted(ours) == sorted(expected)
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    assert parameter_count(model) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_we_save(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "in")
    (tmp_path / "in" / "tokenizer_config.json").write_text("{}")
    save_model(load_model(tmp_path / "in"), tmp_path / "out", tokenizer_dir=tmp_path / "in", source_dir=tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", attn_implementation="eager")
    ids = tokens(50)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]  # nothing temporary is left
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_then_load_is_identical(dtype: torch.dtype, tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "in")
    first = load_model(tmp_path / "in", dtype=dtype)
    save_model(first, tmp_path / "out")
    assert read_config(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")
    second = load_model(tmp_path / "out", dtype=dtype)
    assert second.config == first.config
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


def test_shards_in_and_out(tmp_path: Path) -> None:
    theirs = saved("qwen2", tmp_path / "one")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    one, sharded = load_model(tmp_path / "one"), load_model(tmp_path / "theirs")
    for a, b in zip(one.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)

    write_checkpoint(one.hf_config(), hf_state_dict(one).items(), tmp_path / "ours", max_shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    for a, b in zip(theirs.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_redundant_head_of_a_tied_checkpoint_is_accepted(tmp_path: Path) -> None:
    saved("qwen3-tied-biases", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert "lm_head.weight" not in hf_state_dict(model)
    tensors["lm_head.weight"] += 1
    with pytest.raises(WeightsMismatchError, match=r"lm_head\.weight .* tie_word_embeddings"):
        load_hf_state_dict(model, tensors)


def test_wrong_tensors_are_named_and_change_nothing(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    model = load_model(tmp_path)
    before = {name: tensor.clone() for name, tensor in hf_state_dict(model).items()}
    given = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    key = "model.layers.1.self_attn.k_proj.weight"

    missing = {name: tensor for name, tensor in given.items() if name != key}
    with pytest.raises(WeightsMismatchError, match=f"missing tensor {key}"):
        load_hf_state_dict(model, missing)
    with pytest.raises(WeightsMismatchError, match=r"unexpected tensor model\.extra"):
        load_hf_state_dict(model, given | {"model.extra": torch.zeros(1)})
    vocabulary = given | {"model.embed_tokens.weight": torch.zeros(99, 48)}
    with pytest.raises(WeightsMismatchError, match=r"model\.embed_tokens\.weight has shape \[99, 48\].* \[101, 48\]"):
        load_hf_state_dict(model, vocabulary)
    for name, tensor in hf_state_dict(model).items():
        assert torch.equal(tensor, before[name])


def test_loading_is_in_place(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "a", seed=0)
    other = saved("qwen3", tmp_path / "b", seed=1)
    model = load_model(tmp_path / "a")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load_hf_state_dict(model, dict(other.named_parameters()))
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    ids = tokens(20)
    with torch.no_grad():
        found = model.logits(model(ids, PackedContext.from_lengths([20])))
        torch.testing.assert_close(found, other(ids[None]).logits[0], atol=2e-5, rtol=2e-5)


def test_missing_and_corrupt_files(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightsMismatchError, match=r"model\.safetensors cannot be read"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsMismatchError, match=r"has neither model\.safetensors nor"):
        load_model(tmp_path)


def test_a_full_disk_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path / "in")
    model = load_model(tmp_path / "in")
    save_model(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_only_models_are_overwritten(tmp_path: Path) -> None:
    saved("llama", tmp_path / "in")
    model = load_model(tmp_path / "in")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="not a model directory"):
        save_model(model, tmp_path / "home")
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_random_initialisation(tmp_path: Path) -> None:
    CONFIGS["qwen2"].save_pretrained(tmp_path)
    a, b, c = (init_model(tmp_path, seed=seed) for seed in (3, 3, 4))
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(x, y)
        assert x.dim() == 1 or not torch.equal(x, z)
    tensors = hf_state_dict(a)
    assert tensors["lm_head.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(tensors["model.norm.weight"], torch.ones(48))
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.bias"], torch.zeros(48))
    half = init_model(tmp_path, seed=3, dtype=torch.bfloat16)
    assert torch.equal(hf_state_dict(half)["lm_head.weight"], tensors["lm_head.weight"].bfloat16())
