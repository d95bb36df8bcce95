"""Load tokenizers from local folders, and check that a tokenizer fits its model. Never downloads."""

from pathlib import Path
from typing import Any

from actors.data.errors import DataError

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", ".model", ".tiktoken")
Tokenizer = Any  # transformers.PreTrainedTokenizerBase; transformers is imported only when one is loaded


def load_tokenizer(path: str) -> Tokenizer:
    """Return the Hugging Face tokenizer of a local folder (model.tokenizer, default model.path)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"model.tokenizer: {folder.absolute()} is not a folder; download the model first "
            "(`hf download ORGANISATION/MODEL --local-dir FOLDER`) and give its folder"
        )
    present = sorted(file.name for file in folder.iterdir())
    held = ", ".join(present[:12]) or "nothing"
    unusable = (
        f"model.tokenizer: no tokenizer can be loaded from {folder.absolute()} (it holds {held}); it "
        "needs tokenizer.json and tokenizer_config.json"
    )
    # transformers silently makes an empty tokenizer from a lone config.json
    if not any(name.endswith(_VOCABULARIES) for name in present):
        raise DataError(unusable)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its backends' own
        raise DataError(f"{unusable}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.tokenizer: {folder.absolute()} has no end-of-text token, so no response could end; set eos_token "
            "in its tokenizer_config.json"
        )
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise DataError if the tokenizer has ids without an embedding in the model (vocab_size of its config.json).

    More embeddings than tokens are fine: vocabularies are padded to round numbers.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise DataError(
            f"vocabulary mismatch: the tokenizer has token ids up to {largest} ({token!r}), the model has {vocab_size} "
            f"embeddings; name the model's own tokenizer in model.tokenizer, or give the model more embeddings "
            f"(transformers: model.resize_token_embeddings({largest + 1}), then save_pretrained)"
        )
