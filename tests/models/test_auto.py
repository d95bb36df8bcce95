"""Other architectures through transformers: the same interface, right for packed sequences, saved as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from models.auto import AutoTransformer
from models.checkpoint import hf_state_dict, load_causal_model, load_hf_state_dict, load_model, save_model
from models.config import UnsupportedModelError
from models.packed import PackedContext
from models.transformer import Transformer
from tests.models.families import saved, tokens

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OTHERS: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(
        **_SIZES, head_dim=8, final_logit_softcapping=3.0, attn_logit_softcapping=0.5, sliding_window=5
    ),
    "gemma3": Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=5),
    "mistral": MistralConfig(**_SIZES, head_dim=8, sliding_window=5),
    "phi3": Phi3Config(**_SIZES),
    "gpt2": GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1),
    "granite": GraniteConfig(**_SIZES, logits_scaling=2.0),
    "cohere": CohereConfig(**_SIZES, logit_scale=0.5),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
}


def other(name: str, directory: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(OTHERS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_packed_segments_equal_separate_sequences(name: str, tmp_path: Path) -> None:
    theirs = other(name, tmp_path)
    ours = load_causal_model(tmp_path)
    assert isinstance(ours, AutoTransformer)
    assert len(ours.blocks) == 2
    lengths, ids = [7, 1, 20], tokens(28)
    with torch.no_grad():
        found = ours.logits(ours(ids, PackedContext.from_lengths(lengths))).split(lengths)
        for piece, logits in zip(ids.split(lengths), found, strict=True):
            torch.testing.assert_close(logits, theirs(piece[None]).logits[0], atol=2e-5, rtol=2e-5)


def test_gradients_flow_to_every_weight_and_only_through_real_tokens(tmp_path: Path) -> None:
    theirs = other("gemma2", tmp_path)
    ours = load_causal_model(tmp_path)
    ours.set_activation_checkpointing(True)
    ours.train()
    lengths, ids = [7, 1, 20], tokens(28)
    F.cross_entropy(ours.logits(ours(ids, PackedContext.from_lengths(lengths))), ids, reduction="sum").backward()
    for piece in ids.split(lengths):
        F.cross_entropy(theirs(piece[None]).logits[0], piece, reduction="sum").backward()
    found = {name.removeprefix("model."): parameter for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_saved_as_it_was(name: str, tmp_path: Path) -> None:
    theirs = other(name, tmp_path / "in")
    save_model(load_causal_model(tmp_path / "in"), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again) is type(theirs)
    ids = tokens(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits)
    for extension in ("in", "out"):
        assert (tmp_path / extension / "model.safetensors").is_file()
    assert stored_names(tmp_path / "in") == stored_names(tmp_path / "out")


def stored_names(directory: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_weights_load_in_place(tmp_path: Path) -> None:
    other("granite", tmp_path)
    model = load_causal_model(tmp_path)
    doubled = {name: 2 * tensor for name, tensor in hf_state_dict(model).items()}
    load_hf_state_dict(model, doubled)
    for name, tensor in hf_state_dict(model).items():
        assert torch.equal(tensor, doubled[name])


def test_which_implementation_is_chosen(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "qwen3")
    assert isinstance(load_causal_model(tmp_path / "qwen3"), Transformer)
    assert isinstance(load_causal_model(tmp_path / "qwen3", implementation="transformers"), AutoTransformer)
    other("gemma2", tmp_path / "gemma2")
    for refuse in (lambda path: load_causal_model(path, implementation="native"), load_model):
        with pytest.raises(
            UnsupportedModelError, match=r"Gemma2ForCausalLM .*LlamaForCausalLM, MistralForCausalLM, Qwen2"
        ):
            refuse(tmp_path / "gemma2")


def test_a_head_that_we_do_not_know_is_refused(tmp_path: Path) -> None:
    theirs = other("gemma2", tmp_path)
    theirs.config.final_logit_softcapping = None
    AutoTransformer(theirs)
    plain = theirs.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits + 1.0
        return output

    theirs.forward = shifted
    with pytest.raises(UnsupportedModelError, match="Gemma2ForCausalLM, which computes more than"):
        AutoTransformer(theirs)
