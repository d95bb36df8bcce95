"""Prompts, templates, demonstrations and tokenizers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.data import DataError, check_vocabulary, load_demonstrations, load_prompts, load_tokenizer
from config.data import DataOptions
from config.learner import WarmupOptions

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl.gz"


def options(tmp_path: Path, records: list[Any], **more: Any) -> DataOptions:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return DataOptions(train=str(path), **more)


def test_chat(tmp_path: Path, chat_tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    made = load_prompts(
        options(tmp_path, [{"prompt": "Hi"}, {"prompt": messages}], system_prompt="Be brief."), "train", chat_tokenizer
    )
    assert [p.text for p in made] == [
        "<system>Be brief.</system><user>Hi</user><assistant>",
        "<system>Be brief.</system><user>a</user><assistant>b</assistant><user>c</user><assistant>",
    ]
    assert [p.where for p in made] == [f"{tmp_path / 'data.jsonl'}, line {i}" for i in (1, 2)]
    for prompt in made:
        assert prompt.tokens.dtype == np.int32
        assert chat_tokenizer.decode(prompt.tokens.tolist()) == prompt.text


def test_plain(tmp_path: Path, plain_tokenizer: Any) -> None:
    made = load_prompts(options(tmp_path, [{"prompt": "1 + 1 ="}], template="plain"), "train", plain_tokenizer)
    assert made[0].text == "1 + 1 ="
    assert plain_tokenizer.decode(made[0].tokens.tolist()) == "1 + 1 ="
    assert len(made[0].tokens) == 7


def test_a_template_of_ones_own(tmp_path: Path, plain_tokenizer: Any) -> None:
    chosen = options(tmp_path, [{"prompt": "Hi"}], chat_template="Q: {{ messages[0]['content'] }} A:")
    assert load_prompts(chosen, "train", plain_tokenizer)[0].text == "Q: Hi A:"


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}"
    "<assistant>{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_variables_of_the_chat_template(tmp_path: Path, plain_tokenizer: Any) -> None:
    """As Qwen3's template has it: thinking is on unless it is switched off."""
    ends = {}
    for given in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        chosen = options(tmp_path, [{"prompt": "Hi"}], chat_template=THINKS, chat_template_kwargs=given)
        ends[str(given)] = load_prompts(chosen, "train", plain_tokenizer)[0].text.rpartition("<assistant>")[2]
    assert list(ends.values()) == ["", "", "<think></think>"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_thinkin": False}, "enable_thinkin: the chat template (data.chat_template) reads no such variable; "),
        ({"enable_thinkin": False}, "it reads enable_thinking"),
        ({"eos_token": "x"}, "data.chat_template_kwargs.eos_token: Paceline or the tokenizer gives"),
        ({"messages": []}, "data.chat_template_kwargs.messages: Paceline or the tokenizer gives"),
    ],
)
def test_variables_that_no_template_reads(tmp_path: Path, plain_tokenizer: Any, given: Any, words: str) -> None:
    chosen = options(tmp_path, [{"prompt": "Hi"}], chat_template=THINKS, chat_template_kwargs=given)
    with pytest.raises(DataError) as caught:
        load_prompts(chosen, "train", plain_tokenizer)
    assert words in str(caught.value)


def test_identity_and_answers(tmp_path: Path, plain_tokenizer: Any) -> None:
    records = [{"q": "x" * n, "gold": n, "name": f"p{n}"} for n in (3, 30, 4)]
    chosen = options(tmp_path, records, template="plain", prompt_field="q", answer_field="gold", max_prompt_tokens=10)
    made = load_prompts(chosen, "train", plain_tokenizer)
    assert [(p.prompt_id, p.uid, p.record["answer"], p.record["name"]) for p in made] == [
        (0, "train/0", 3, "p3"),
        (1, "train/2", 4, "p4"),
    ]
    assert (made.report.records, made.report.used, made.report.too_long, made.report.bad) == (3, 2, 1, 0)
    assert made.report.summary() == "2 of 3 records used; 1 prompts too long, 0 bad records skipped"
    named = load_prompts(chosen.model_copy(update={"id_field": "name"}), "train", plain_tokenizer)
    assert [p.uid for p in named] == ["p3", "p4"]


def test_limit_counts_records(tmp_path: Path, plain_tokenizer: Any) -> None:
    chosen = options(
        tmp_path, [{"prompt": "x" * n} for n in (1, 99, 1, 1)], template="plain", max_prompt_tokens=9, limit=3
    )
    made = load_prompts(chosen, "train", plain_tokenizer)
    assert (made.report.records, made.report.used, made.report.too_long) == (3, 2, 1)


BAD = [
    ({"text": "a", "n": 1}, {}, "no field 'prompt' (data.prompt_field); the record has n, text"),
    ({"prompt": "a"}, {"answer_field": "gold"}, "no field 'gold' (data.answer_field); the record has prompt"),
    ({"prompt": "a"}, {"id_field": "key"}, "no field 'key' (data.id_field); the record has prompt"),
    ({"prompt": None}, {}, "a prompt is text or a list of messages, not nothing"),
    ({"prompt": 3}, {}, "a prompt is text or a list of messages, not int"),
    ({"prompt": []}, {}, "a prompt is text or a list of messages, not nothing"),
    ({"prompt": [{"role": "user"}]}, {}, "a message needs text in 'role' and 'content'"),
    ({"prompt": ["a"]}, {}, "a message needs text in 'role' and 'content'"),
    ({"prompt": [{"role": "system", "content": "x"}]}, {"system_prompt": "y"}, "it begins with a system message"),
    ({"prompt": [{"role": "user", "content": "x"}]}, {"template": "plain"}, "data.template=plain needs text, not list"),
    ({"prompt": ""}, {"template": "plain"}, "the prompt in 'prompt' is empty"),
]


@pytest.mark.parametrize(("record", "more", "words"), BAD)
def test_bad_records(tmp_path: Path, chat_tokenizer: Any, record: Any, more: dict[str, Any], words: str) -> None:
    good = {"prompt": "fine", "gold": "1", "key": "k"}
    chosen = options(tmp_path, [good, record], **more)
    with pytest.raises(DataError) as caught:
        load_prompts(chosen, "train", chat_tokenizer)
    assert str(caught.value).startswith(f"{chosen.train}, line 2: ")
    assert words in str(caught.value)
    made = load_prompts(chosen.model_copy(update={"on_bad_line": "skip"}), "train", chat_tokenizer)
    assert (made.report.used, made.report.bad) == (1, 1)
    assert words in made.report.bad_examples[0]


def test_ids_must_be_unique(tmp_path: Path, chat_tokenizer: Any) -> None:
    chosen = options(tmp_path, [{"prompt": "a", "id": 7}, {"prompt": "b", "id": 7}], id_field="id")
    with pytest.raises(DataError, match=r"line 2: data.id_field: the id '7' occurs a second time"):
        load_prompts(chosen, "train", chat_tokenizer)


def test_a_template_that_refuses_a_record(tmp_path: Path, plain_tokenizer: Any) -> None:
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0].content }}"
    )
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    chosen = options(tmp_path, [{"prompt": "a"}, {"prompt": two}], chat_template=template)
    with pytest.raises(DataError, match=r"line 2: the chat template .* refuses it: one message only"):
        load_prompts(chosen, "train", plain_tokenizer)


PARTS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}A:"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "has no chat template: use data.template=plain, or give one with data.chat_template=..."),
        ({"template": "plain", "system_prompt": "x"}, "data.system_prompt needs data.template=chat"),
        ({"chat_template": "{% if %}"}, "data.chat_template: the chat template is not valid Jinja"),
        # as templates of vision models are written: content is a list of parts
        ({"chat_template": PARTS}, "(data.chat_template) leaves out the prompt: it renders a prompt as 'A:'"),
        ({"chat_template": "{{ messages[0]['text'] }}"}, "leaves out the prompt"),
        (
            {"chat_template": "{{ messages[-1].content }}", "system_prompt": "Be brief."},
            "leaves out data.system_prompt",
        ),
    ],
)
def test_templates_that_cannot_work(tmp_path: Path, plain_tokenizer: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        load_prompts(options(tmp_path, [{"prompt": "a"}], **more), "train", plain_tokenizer)
    assert words in str(caught.value)


def test_nothing_usable(tmp_path: Path, chat_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"0 of 2 records used; 2 prompts too long.*data.max_prompt_tokens=5"):
        load_prompts(options(tmp_path, [{"prompt": "a"}] * 2, max_prompt_tokens=5), "train", chat_tokenizer)
    with pytest.raises(DataError, match="0 of 0 records used"):
        load_prompts(options(tmp_path, []), "train", chat_tokenizer)
    with pytest.raises(DataError, match="no field 'prompt'"):  # why they are bad is said
        load_prompts(options(tmp_path, [{"x": 1}], on_bad_line="skip"), "train", chat_tokenizer)
    with pytest.raises(DataError, match=r"data.eval is not set"):
        load_prompts(options(tmp_path, [{"prompt": "a"}]), "eval", chat_tokenizer)


def test_demonstrations(tmp_path: Path, plain_tokenizer: Any) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(
        '{"prompt": "Q", "out": "AB"}\n{"prompt": "long question", "out": "C"}\n{"prompt": "R", "out": ""}\n'
    )
    warmup = WarmupOptions(data=str(path), response_field="out")
    data = DataOptions(train="unused", template="plain", max_prompt_tokens=5, on_bad_line="skip", limit=1)
    made, report = load_demonstrations(warmup, data, plain_tokenizer)
    assert len(made) == 1
    assert plain_tokenizer.decode(made[0].prompt_tokens.tolist()) == "Q"
    assert made[0].response_tokens.tolist() == [*plain_tokenizer.encode("AB"), plain_tokenizer.eos_token_id]
    assert made[0].response_tokens.dtype == np.int32
    assert (report.too_long, report.bad) == (1, 1)
    with pytest.raises(DataError, match=r"line 1: no field 'response' \(warmup.response_field\)"):
        load_demonstrations(
            WarmupOptions(data=str(path)), data.model_copy(update={"on_bad_line": "fail"}), plain_tokenizer
        )


def test_demonstrations_continue_the_prompt_that_rl_samples_from(tmp_path: Path, chat_tokenizer: Any) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "Q", "response": "A"}\n')
    data = DataOptions(train=str(path), system_prompt="S")
    (demonstration,), _ = load_demonstrations(WarmupOptions(data=str(path)), data, chat_tokenizer)
    assert np.array_equal(demonstration.prompt_tokens, load_prompts(data, "train", chat_tokenizer)[0].tokens)


def test_tokenizer_errors(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/none is not a folder; download the model first"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*it holds config.json.*tokenizer.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*: \w+: "):
        load_tokenizer(str(tmp_path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer_folder / name).read_bytes())
    (tmp_path / "config.json").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="has no end-of-text token"):
        load_tokenizer(str(tmp_path))


def test_vocabulary(plain_tokenizer: Any) -> None:
    size = max(plain_tokenizer.get_vocab().values()) + 1
    check_vocabulary(plain_tokenizer, size)
    check_vocabulary(plain_tokenizer, size + 100)  # padded embeddings
    with pytest.raises(
        DataError, match=rf"token ids up to {size - 1} \('<eos>'\), the model has {size - 1} embeddings"
    ):
        check_vocabulary(plain_tokenizer, size - 1)


@pytest.mark.skipif(not GSM8K.is_file(), reason="../shared/data/gsm8k_train.jsonl.gz is not here")
def test_gsm8k_loads(chat_tokenizer: Any) -> None:
    made = load_prompts(DataOptions(train=str(GSM8K), id_field="id"), "train", chat_tokenizer)
    assert made.report.records == made.report.used + made.report.too_long == 7473
    assert all(p.text.startswith("<user>") and "####" in p.record["answer"] for p in made)


def test_neither_torch_nor_ray_is_imported() -> None:
    code = "import sys, actors.data, actors.rewards; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
