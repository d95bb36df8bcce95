"""Tokens that end a response: from the tokenizer, its chat template and generation_config.json.

A base model's tokenizer may end texts with one token while its chat template ends turns with another. Such a model
learns to end its responses with the second. An engine that knew only the first would sample on to the limit.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from actors.data.errors import DataError
from actors.data.templates import make_template
from actors.data.tokenizers import Tokenizer
from config.data import DataOptions

GENERATION_CONFIG = "generation_config.json"


def end_tokens(options: DataOptions, tokenizer: Tokenizer, model_dir: str | Path, vocab_size: int) -> tuple[int, ...]:
    """Return the tokenizer's end-of-text token, those in the model's generation_config.json, and for a chat template
    the special token behind an assistant's message. Raises DataError if the model has no such token."""
    turn = make_template(options, tokenizer).turn_end()
    named = _named(Path(model_dir).expanduser() / GENERATION_CONFIG)
    check_stop_tokens(named, vocab_size, f"model.path: eos_token_id in {GENERATION_CONFIG}")
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *named, *([] if turn is None else [turn])]))


def note_end_tokens(model_dir: Path, tokens: Sequence[int]) -> None:
    """Make other programs end responses where the run did: add `tokens` to eos_token_id in generation_config.json of a
    newly written model directory. No change if its files already name them all."""
    file, config = model_dir / GENERATION_CONFIG, json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    own = ("bos_token_id", "eos_token_id", "pad_token_id")
    there = file.is_file()
    known = json.loads(file.read_text(encoding="utf-8")) if there else {k: config[k] for k in own if k in config}
    named = known.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if set(tokens) <= set(ids):
        return
    known["eos_token_id"] = list(dict.fromkeys([*ids, *tokens]))
    file.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def check_stop_tokens(ids: Sequence[int], vocab_size: int, key: str) -> None:
    """Raise DataError, which begins with `key`, if the model has no such token: it could never end a response."""
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise DataError(f"{key}: {outside[0]} is outside the model's vocabulary (0 to {vocab_size - 1})")


def _named(path: Path) -> list[int]:
    """Return eos_token_id of a generation_config.json: a number, a list, or nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"model.path: {path} cannot be read: {error}") from error
    ids = found.get("eos_token_id") if isinstance(found, dict) else None
    if ids is None:
        return []
    ids = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) for i in ids):
        raise DataError(f"model.path: {path}: eos_token_id is {ids}, not a token id or a list of them")
    return ids
