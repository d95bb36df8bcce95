"""A tokenizer of one's own: bytes as tokens, so that every text has one, with and without a chat template."""

from pathlib import Path
from typing import Any

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def plain_tokenizer(tokenizer_folder: Path) -> Any:
    from actors.data import load_tokenizer

    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer_folder: Path) -> Any:
    from actors.data import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
