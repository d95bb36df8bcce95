"""What ends a response: the tokenizer's token, the model's own list, and the chat template's end of turn."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from actors.data import DataError, end_tokens, note_end_tokens
from config.data import DataOptions

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT, PLAIN = DataOptions(train="t"), DataOptions(train="t", template="plain")
VOCABULARY = 400


@pytest.fixture
def chatml(plain_tokenizer: Any) -> Any:
    """A base model's: texts end with <eos>, turns of the template with <|im_end|>."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def write(folder: Path, **keys: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(keys))
    return folder


def test_a_base_model_with_a_chat_template_ends_at_the_end_of_its_turn(tmp_path: Path, chatml: Any) -> None:
    eos, turn = chatml.eos_token_id, chatml.convert_tokens_to_ids("<|im_end|>")
    assert eos != turn
    assert end_tokens(CHAT, chatml, tmp_path, VOCABULARY) == (eos, turn)
    assert end_tokens(PLAIN, chatml, tmp_path, VOCABULARY) == (eos,)
    given = CHAT.model_copy(update={"chat_template": CHATML.replace("<|im_end|>", "</turn>")})
    assert end_tokens(given, chatml, tmp_path, VOCABULARY) == (eos,)  # ordinary text: no token of its own


def test_a_template_for_prompts_only_has_no_end_of_turn(tmp_path: Path, chatml: Any) -> None:
    refusing = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ raise_exception('prompts only') }}{% endif %}",
    )
    given = CHAT.model_copy(update={"chat_template": refusing})
    assert end_tokens(given, chatml, tmp_path, VOCABULARY) == (chatml.eos_token_id,)


@pytest.mark.parametrize(("named", "more"), [([7, 9], (7, 9)), (7, (7,)), ([], ()), (None, ())])
def test_the_models_own_list_is_read(
    tmp_path: Path, plain_tokenizer: Any, named: object, more: tuple[int, ...]
) -> None:
    eos = plain_tokenizer.eos_token_id
    assert end_tokens(PLAIN, plain_tokenizer, write(tmp_path, eos_token_id=named), VOCABULARY) == (eos, *more)
    assert end_tokens(PLAIN, plain_tokenizer, write(tmp_path, eos_token_id=[eos]), VOCABULARY) == (eos,)


def test_bad_lists_are_named(tmp_path: Path, plain_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"model\.path: eos_token_id in generation_config\.json: 400 is outside"):
        end_tokens(PLAIN, plain_tokenizer, write(tmp_path, eos_token_id=[1, 400]), VOCABULARY)
    with pytest.raises(DataError, match=r"eos_token_id is \['x'\], not a token id"):
        end_tokens(PLAIN, plain_tokenizer, write(tmp_path, eos_token_id="x"), VOCABULARY)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"model\.path: .*generation_config\.json cannot be read"):
        end_tokens(PLAIN, plain_tokenizer, tmp_path, VOCABULARY)


def exported(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        write(folder, **generation)
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "tokens", "written"),
    [
        ({"eos_token_id": 2, "bos_token_id": 1}, None, (2, 7), {"bos_token_id": 1, "eos_token_id": [2, 7]}),
        ({"eos_token_id": 2}, {"eos_token_id": 5, "top_p": 0.8}, (2, 7), {"eos_token_id": [5, 2, 7], "top_p": 0.8}),
        ({}, None, (7,), {"eos_token_id": [7]}),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (2, 7), None),
        ({"eos_token_id": 2}, None, (2,), None),
    ],
)
def test_an_exported_model_says_what_ended_its_responses(
    tmp_path: Path,
    config: dict[str, object],
    generation: dict[str, object] | None,
    tokens: tuple[int, ...],
    written: dict[str, object] | None,
) -> None:
    """None: nothing is written where the model's files say so already."""
    file = exported(tmp_path, config, generation) / "generation_config.json"
    before = file.read_text() if file.is_file() else None
    note_end_tokens(tmp_path, tokens)
    if written is None:
        assert (file.read_text() if file.is_file() else None) == before
    else:
        assert json.loads(file.read_text()) == written
