"""Write the task's files: `python -m examples.guess_and_check.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/model/{config.json, tokenizer*}   a Qwen3 configuration without weights (the warm start makes them)
FOLDER/train.jsonl                       problems for RL
FOLDER/eval.jsonl                        held-out problems: neither in train.jsonl nor demonstrated
FOLDER/demos.jsonl                       demonstrations for the warm start

Owns the file formats and the split's sizes; what a problem is and how it is worded is in task.py.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.guess_and_check import task

DEFAULT_FOLDER = Path(__file__).parent / "data"
# Problems per modulus. Small moduli have few problems (12 and 30), so most of both sets have modulus 11 or 13.
TRAIN = {5: 8, 7: 20, 11: 36, 13: 32}  # 96 problems
HELD_OUT = {5: 4, 7: 10, 11: 28, 13: 30}  # 72 problems
# Demonstrations favour small moduli, where the checking skill is learned fastest.
DEMONSTRATION_WEIGHTS = {5: 0.35, 7: 0.35, 11: 0.20, 13: 0.10}

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": task.VOCAB_SIZE,
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


def build_tokenizer(max_tokens: int = MODEL["max_position_embeddings"]) -> PreTrainedTokenizerFast:
    """One token per word of `task.vocabulary()`; `decode` concatenates, so it returns the encoded text exactly."""
    words = task.vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=task.UNK))
    longest_first = sorted(task.WORDS, key=len, reverse=True)
    pattern = "|".join([*(_escape(word) for word in longest_first), "[0-9]+"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=task.EOS,
        pad_token=task.PAD,
        unk_token=task.UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def _escape(word: str) -> str:
    return "".join("\\" + char if char in "\\{}()*." else char for char in word)


def write_jsonl(path: Path, records: Iterable[dict[str, str]]) -> int:
    lines = [json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write every file below `folder`; returns how many records each JSON-lines file has."""
    split = task.split(random.Random(f"split-{seed}"), train=TRAIN, held_out=HELD_OUT)
    by_modulus = {p: [problem for problem in split.demonstrated if problem.p == p] for p in task.PRIMES}
    rng = random.Random(f"demonstrations-{seed}")
    moduli = rng.choices(task.PRIMES, [DEMONSTRATION_WEIGHTS[p] for p in task.PRIMES], k=demonstrations)
    drawn = (rng.choice(by_modulus[p]) for p in moduli)
    style = task.DemonstrationStyle()
    shown = ((problem, task.demonstrate(problem, style, rng)) for problem in drawn)
    return write_files(folder, MODEL, split, shown)


def write_files(
    folder: Path, model: dict[str, Any], split: task.Split, shown: Iterable[tuple[task.Problem, str]]
) -> dict[str, int]:
    """The files of a split and its demonstrations, each a problem and a response; `model`: its config.json.

    Returns how many records each JSON-lines file has.
    """
    model_dir = folder / "model"
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(model["max_position_embeddings"])
    tokenizer.save_pretrained(model_dir)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    (model_dir / "config.json").write_text(json.dumps(model | special, indent=2) + "\n", encoding="utf-8")
    counts = {
        name: write_jsonl(folder / f"{name}.jsonl", (_record(problem) for problem in members))
        for name, members in (("train", split.train), ("eval", split.held_out))
    }
    demos = ({"prompt": problem.prompt, "response": response} for problem, response in shown)
    return counts | {"demos": write_jsonl(folder / "demos.jsonl", demos)}


def _record(problem: task.Problem) -> dict[str, str]:
    return {"id": problem.uid, "prompt": problem.prompt, "answer": str(problem.answer)}


def main(
    write: Callable[..., dict[str, int]] = write_all,
    folder: Path = DEFAULT_FOLDER,
    *,
    demonstrations: int = 22_400,
) -> None:
    """The command line of `write`, which takes a folder, a seed and a number of demonstrations; the rest: defaults."""
    parser = argparse.ArgumentParser(description="Write the files of a guess-and-check example.")
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help="target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the demonstrations (default: 0)")
    parser.add_argument(
        "--demonstrations", type=int, default=demonstrations, help="lines of demos.jsonl (default: %(default)s)"
    )
    options = parser.parse_args()
    counts = write(options.folder, seed=options.seed, demonstrations=options.demonstrations)
    print(f"{options.folder}: " + ", ".join(f"{name}.jsonl {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
