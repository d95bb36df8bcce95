"""GGUF files as models: tensors, layout, tokenizer and template against the network that the file was written from,
every tensor type against the package that reads it, and each refusal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from models.checkpoint import load_model
from models.directory import SafetensorsDirectory
from models.gguf import GgufError, convert
from models.packed import PackedContext

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CONTROL = ("<|im_start|>", "<|im_end|>", "<|unk|>")
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}
NETWORKS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = gguf.GGMLQuantizationType
TYPES = [KINDS.F16, *(kind for kind in KINDS if kind in gguf.quants._type_traits)]


def network(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(NETWORKS[family]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.3))
    return model


def their_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours where Hugging Face rotates halves: the rows of llama's q and k in its order."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    family: str = "llama",
    *,
    kind: Any = None,
    model: Any = None,
    words: int | None = SIZES["vocab_size"],
    **fields: Any,
) -> Path:
    """A file as llama.cpp's own converter writes one. kind: of all matrices but the embedding; default F32. words: of
    its tokenizer; None: it has none."""
    config = NETWORKS[family]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(SIZES["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if family == "qwen3":
        writer.add_key_length(64)
        writer.add_value_length(64)
    if words is not None:
        tokenizer(writer, words)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value) if isinstance(value, str) else writer.add_uint32(
            key.replace("__", "."), value
        )
    for name, tensor in (model or network(family)).state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, 4 if "q_proj" in name else 2)
        if kind is None or values.ndim == 1 or "embed" in name or "lm_head" in name:
            writer.add_tensor(their_name(name), values)
        else:
            writer.add_tensor(their_name(name), blocks(kind, values.shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer(writer: Any, count: int) -> None:
    """Byte-level BPE with one merge and three control tokens, padded to `count` words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, "ab", *CONTROL]
    words += [f"[unused{n}]" for n in range(count - len(words))]
    control = [3 if word in CONTROL else 1 for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types(control)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(words.index(CONTROL[0]))
    writer.add_eos_token_id(words.index(CONTROL[1]))
    writer.add_unk_token_id(words.index(CONTROL[2]))
    writer.add_chat_template(TEMPLATE)


def blocks(kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks of a type. Bytes below 48 make every half-precision scale in them finite and small."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    columns = shape[-1] // count * size
    random = np.random.default_rng(int(kind)).integers(0, 48, (shape[0], columns), dtype=np.uint8)
    return random


@pytest.mark.parametrize("family", NETWORKS)
def test_the_directory_is_the_network_that_was_written(family: str, tmp_path: Path) -> None:
    model = network(family)
    out = tmp_path / "made"
    convert(write(tmp_path / "m.gguf", family, model=model), out)
    ids = torch.randint(SIZES["vocab_size"], (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_model(out)
        found = ours.logits(ours(ids, PackedContext.from_lengths([40])))
        wanted = model(input_ids=ids[None]).logits[0]
        again = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-4)
    loaded = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert loaded.apply_chat_template([{"content": "ab c"}], tokenize=False) == "<|im_start|>ab c<|im_end|>"
    assert loaded.decode(loaded.encode("ab c")) == "ab c"
    assert (loaded.eos_token, loaded.convert_ids_to_tokens(loaded.encode("ab"))[-1:]) == ("<|im_end|>", ["ab"])
    assert max(loaded.get_vocab().values()) < SIZES["vocab_size"], "transformers adds a token that has no embedding"


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_that_can_be_dequantised_is_read(kind: Any, tmp_path: Path) -> None:
    convert(write(tmp_path / "m.gguf", kind=kind), tmp_path / "made")
    wanted = gguf.dequantize(blocks(kind, (256, 256)), kind)
    assert np.isfinite(wanted).all()
    assert len(np.unique(wanted)) > 1
    with SafetensorsDirectory(tmp_path / "made") as made:
        np.testing.assert_array_equal(made["model.layers.1.mlp.down_proj.weight"].numpy(), wanted)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"split__count": 3}, "one of several parts"),
        ({"llama__rope__scaling__type": "yarn"}, "scales positions (yarn)"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", **fields)
    with pytest.raises(GgufError) as raised:
        convert(file, tmp_path / "made")
    assert words in str(raised.value)
    assert str(file) in str(raised.value)
    assert not (tmp_path / "made").exists()


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    """Q8_K is how llama.cpp holds activations: a file may name it, the package gguf does not read it."""
    with pytest.raises(GgufError, match="tensors of type Q8_K cannot be read: quantise it to another type"):
        convert(write(tmp_path / "m.gguf", kind=KINDS.Q8_K), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SIZES["vocab_size"] + 8, "its tokenizer has 296 tokens, its embedding 288 rows: damaged, or edited: copy or"),
        (None, "holds no tokenizer: give the model's Hugging Face directory"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(words: int | None, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", words=words)
    with pytest.raises(GgufError) as raised:
        convert(file, tmp_path / "made")
    assert said in str(raised.value)
    assert str(file) in str(raised.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("shape", [(128, 256), None])
def test_a_weight_that_does_not_fit_or_is_not_there_is_no_random_weight(
    shape: tuple[int, int] | None, tmp_path: Path
) -> None:
    model = network("llama")
    if shape is None:
        del model.model.layers[1].mlp.up_proj
    else:
        model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(shape)
    with pytest.raises(
        GgufError, match=r"1 weights are missing or of another shape, such as .*layers\.1\.mlp\.up_proj"
    ):
        convert(write(tmp_path / "m.gguf", model=model), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_cut_or_none_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 200, 5_000, len(whole) // 2, len(whole) - 1):
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(GgufError, match="cut short or no GGUF"):
            convert(file, tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"m.gguf", "cut.gguf"}


def test_another_architecture_is_named_with_those_that_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match="architecture gpt2 is not supported: it must be one of llama, qwen2, qwen3"):
        convert(tmp_path / "m.gguf", tmp_path / "made")


def test_logits_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: Any, **given: Any) -> Any:
        model = load_model(*args, **given)
        with torch.no_grad():
            model.embed_tokens.weight.mul_(1.01)
        return model

    monkeypatch.setattr("models.gguf.load_model", off)
    with pytest.raises(GgufError, match="logits differ from those of transformers"):
        convert(write(tmp_path / "m.gguf"), tmp_path / "made")
    assert not (tmp_path / "made").exists()
