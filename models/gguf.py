"""Convert a GGUF file (llama.cpp's format, one file with quantised weights, tokenizer and chat template) to a model
directory.

Decides which files are accepted and checks the result. transformers maps tensors and tokenizer, the package `gguf`
dequantises; both are imported only when a file is converted. Never downloads.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import load_model
from models.directory import write_checkpoint
from models.packed import PackedContext

FAMILIES = ("llama", "qwen2", "qwen3")  # general.architecture; Mistral models are llama there
PROBE_TOKENS = 64
WIDEST_GAP = 1e-3  # of a logit, relative to the largest: rounding gives about 1e-6, a wrong rope base or layout 1e-1


class GgufError(ValueError):
    """The file cannot be used as a model; the message says why and what to do."""


def convert(file: Path, out: Path) -> None:
    """Write `file` as a Hugging Face directory `out`: float32 safetensors, config.json, tokenizer, chat template.

    `out` appears only when it is complete and its logits match those of the model that transformers reads from the file
    itself: float32, 64 token ids, largest difference at most 1e-3 of the largest logit. Raises GgufError for a damaged
    or split file, an unsupported architecture, tensor type or position scaling, a tokenizer that does not fit, and
    logits that differ; OSError if `out` cannot be written.
    """
    names, words, head_dim = _inspect(file)
    tokenizer, model = _load(file, head_dim)
    rows = model.get_input_embeddings().num_embeddings
    if words > rows:
        raise GgufError(
            f"{file}: its tokenizer has {words} tokens, its embedding {rows} rows: damaged, or edited: "
            "copy or download it again, or give the model's Hugging Face directory"
        )
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    config["architectures"] = [type(model).__name__]
    config["tie_word_embeddings"] = "output.weight" not in names
    config.pop("quantization_config", None)  # weights are float32 now
    tensors = model.state_dict()
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=out.parent) as folder:
        tokenizer.save_pretrained(Path(folder) / "tokenizer")
        _without_added(Path(folder) / "tokenizer" / "tokenizer.json", words)
        made = Path(folder) / "model"
        write_checkpoint(config, tensors.items(), made, tokenizer_dir=Path(folder) / "tokenizer")
        _compare(file, made, model)
        made.rename(out)


def _load(file: Path, head_dim: int | None) -> tuple[Any, Any]:
    """Return transformers' tokenizer and float32 model, with every weight from the file.

    head_dim: the file's value, if transformers does not read it (Qwen3)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    where = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **where)
        config: Any = AutoConfig.from_pretrained(file.parent, **where)
        if head_dim is not None:
            config.head_dim = head_dim
        model, found = AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **where,
        )
    except Exception as error:  # transformers raises ValueError, KeyError, RuntimeError, ImportError
        raise GgufError(f"{file}: transformers cannot read it: {type(error).__name__}: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    # transformers would initialise such weights randomly
    if strange := [
        *map(str, found["mismatched_keys"]),
        *(key for key in found["missing_keys"] if "lm_head" not in key),
    ]:
        raise GgufError(f"{file}: {len(strange)} weights are missing or of another shape, such as {strange[0]}")
    return tokenizer, model


def _without_added(file: Path, words: int) -> None:
    """Remove the tokens that transformers adds beyond the file's own (`<|endoftext|>`): they have no embedding."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < words]
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def _inspect(file: Path) -> tuple[set[str], int, int | None]:
    """Return the file's tensor names, number of tokens, and head size if stored. Raises GgufError for unsupported
    content."""
    try:
        import gguf
    except ImportError:
        raise GgufError(f"{file}: reading GGUF needs the package gguf: pip install 'paceline[gguf]'") from None
    try:
        reader = gguf.GGUFReader(file)
        fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    except Exception as error:  # ValueError for a wrong magic, IndexError and numpy's own for a cut file
        raise GgufError(f"{file} is cut short or no GGUF file ({error}): copy or download it again") from error
    if int(fields.get("split.count") or 1) > 1:
        raise GgufError(f"{file} is one of several parts: merge them (llama-gguf-split --merge) and give the result")
    family = str(fields.get("general.architecture"))
    if family not in FAMILIES:
        raise GgufError(f"{file}: architecture {family} is not supported: it must be one of {', '.join(FAMILIES)}")
    names = {tensor.name for tensor in reader.tensors}
    scaling = fields.get(f"{family}.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in names:
        raise GgufError(
            f"{file}: it scales positions ({scaling or 'rope_freqs.weight'}), which transformers does not read from "
            "GGUF: give the model's Hugging Face directory"
        )
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(torch.zeros(1, size, dtype=torch.uint8).numpy(), kind)
        except NotImplementedError:
            raise GgufError(
                f"{file}: tensors of type {kind.name} cannot be read: quantise it to another type"
            ) from None
    if "tokenizer.ggml.tokens" not in reader.fields:
        raise GgufError(f"{file} holds no tokenizer: give the model's Hugging Face directory")
    return names, len(reader.fields["tokenizer.ggml.tokens"].data), fields.get(f"{family}.attention.key_length")


@torch.no_grad()
def _compare(file: Path, made: Path, theirs: Any) -> None:
    """Raise GgufError unless the directory's logits match those of transformers' model from the file."""
    ours = load_model(made, dtype=torch.float32)
    ids = torch.randint(theirs.config.vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    context = PackedContext.from_lengths([PROBE_TOKENS])
    found: Tensor = ours.logits(ours(ids, context))
    wanted: Tensor = theirs(input_ids=ids[None]).logits[0]
    gap = float((found - wanted).abs().max() / wanted.abs().max())
    if not gap <= WIDEST_GAP:  # also for NaN
        raise GgufError(
            f"{file}: converted, its logits differ from those of transformers by {gap:.1e} of the largest: please "
            "report it, and give the model's Hugging Face directory meanwhile"
        )
