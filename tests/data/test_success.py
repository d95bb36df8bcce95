"""Prompts by how often they were solved before: from a field, or from an evaluation of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.data import DataError, load_prompts
from config.data import DataOptions


def options(tmp_path: Path, rates: list[Any], **success: Any) -> DataOptions:
    records = [{"prompt": f"p{i}", "answer": "1"} | ({} if r is None else {"rate": r}) for i, r in enumerate(rates)]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataOptions.model_validate({"train": str(path), "template": "plain", "success": success})


def test_a_field_leaves_out_what_is_too_easy_or_too_hard(tmp_path: Path, plain_tokenizer: Any) -> None:
    chosen = options(tmp_path, [0.0, 0.25, None, 1, 0.5], field="rate", min=0.1, max=0.9)
    made = load_prompts(chosen, "train", plain_tokenizer)
    assert [(p.text, p.success) for p in made] == [("p1", 0.25), ("p2", None), ("p4", 0.5)]
    assert made.report.by_success == 2
    assert "2 left out for their success rate" in made.report.summary()
    assert [p.prompt_id for p in made] == [0, 1, 2]


def test_an_evaluation_tells_it_by_the_prompts_ids(tmp_path: Path, plain_tokenizer: Any) -> None:
    rows = [("train/0", 0.5), ("train/1", 0.0), ("train/0", 1.0), ("other/2", 0.0)]
    file = tmp_path / "eval_prompts.jsonl"
    file.write_text("".join(json.dumps({"uid": uid, "success": rate}) + "\n" for uid, rate in rows))
    made = load_prompts(options(tmp_path, [None] * 3, file=str(file), max=0.9), "train", plain_tokenizer)
    assert [(p.text, p.success) for p in made] == [("p1", 0.0), ("p2", None)], "the latest line counts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"uid": 1}\n', "no line of an eval_prompts.jsonl"),
        ("x\n", "no line of"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, plain_tokenizer: Any, text: str | None, said: str) -> None:
    file = tmp_path / "file.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DataError, match=rf"data\.success\.file: .*{said}"):
        load_prompts(options(tmp_path, [None], file=str(file)), "train", plain_tokenizer)


def test_no_rate_is_a_bad_record(tmp_path: Path, plain_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"line 1: 'rate' must be a rate from 0 to 1 \(data\.success\.field\), not 7"):
        load_prompts(options(tmp_path, [7], field="rate"), "train", plain_tokenizer)
