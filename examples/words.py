"""Shared code of the examples that make their own task: a tokenizer of whole words, a small Qwen3, files, options.

Same arguments, same bytes; no network. Owns no task.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tasks import this module too, and transformers takes seconds
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 228,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "use_cache": True,
}


def word_tokenizer(
    vocabulary: Sequence[str], words: Iterable[str], *, numbers: str = "[0-9]+", max_tokens: int
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per word. `decode` concatenates, so it returns the encoded text exactly.

    `vocabulary`: all tokens in the order of their ids, with PAD, EOS and UNK. `words`: those into which texts are
    split, besides matches of the expression `numbers`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNK))
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join([*(_escape(word) for word in longest_first), numbers])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def _escape(word: str) -> str:
    return "".join("\\" + char if char in "\\{}()*.+?[]|" else char for char in word)


def write_model(folder: Path, model: Mapping[str, Any], tokenizer: "PreTrainedTokenizerFast") -> None:
    """Write FOLDER/model/{config.json, tokenizer*}: a configuration without weights, which the warm start makes."""
    model_dir = folder / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(model_dir)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    (model_dir / "config.json").write_text(json.dumps({**model, **special}, indent=2) + "\n", encoding="utf-8")


def write_records(folder: Path, files: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, int]:
    """Write FOLDER/NAME.jsonl for each. Returns the number of records of each file."""
    counts: dict[str, int] = {}
    for name, records in files.items():
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[name] = len(lines)
    return counts


def main(write: Callable[..., dict[str, int]], folder: Path, *, demonstrations: int | None = None) -> None:
    """Run the command line of `write`, which takes a folder, a seed and, if there is a default, a number of
    demonstrations. `rest`: defaults."""
    parser = argparse.ArgumentParser(description="Write the files of an example.")
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the demonstrations (default: 0)")
    if demonstrations is not None:
        lines = "lines of demos.jsonl (default: %(default)s)"
        parser.add_argument("--demonstrations", type=int, default=demonstrations, help=lines)
    given = vars(parser.parse_args())
    folder = given.pop("folder")
    counts = write(folder, **given)
    print(f"{folder}: " + ", ".join(f"{name}.jsonl {count}" for name, count in counts.items()))
