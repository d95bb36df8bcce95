"""Files in every form, and every way in which they can be wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from actors.data import DataError, load_prompts
from actors.data.files import resolve
from actors.data.readers import BadRecord, Record, read_file
from config.data import DataOptions

RECORDS: list[dict[str, Any]] = [{"prompt": f"say {i} \u00e9", "answer": str(i), "tags": ["a", i]} for i in range(5)]
TRAIN = ["train"]


def write(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [{**r, "tags": [str(t) for t in r["tags"]]} if "tags" in r else r for r in records]
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in plain)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def prompts(files: list[Path]) -> list[str]:
    records = [record for file in files for record in read_file(file)]
    assert all(isinstance(r, Record) for r in records)
    return [r.fields["prompt"] for r in records if isinstance(r, Record)]


ALL = [r["prompt"] for r in RECORDS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_one_file(tmp_path: Path, name: str) -> None:
    assert prompts(resolve(str(write(tmp_path / name)), TRAIN, "data.train")) == ALL


@pytest.mark.parametrize("splits", [False, True])
def test_save_to_disk(tmp_path: Path, splits: bool) -> None:
    datasets = pytest.importorskip("datasets")
    plain = [{"prompt": r["prompt"], "answer": r["answer"]} for r in RECORDS]
    data = datasets.Dataset.from_list(plain)
    if splits:
        data = datasets.DatasetDict({"train": data, "test": data.select([3, 1])})
    data.save_to_disk(str(tmp_path / "saved"), **({"num_shards": {"train": 2, "test": 1}} if splits else {}))
    assert prompts(resolve(str(tmp_path / "saved"), TRAIN, "data.train")) == ALL
    if splits:
        assert prompts(resolve(str(tmp_path / "saved"), ["test"], "data.eval")) == [ALL[3], ALL[1]]
        with pytest.raises(DataError, match=r"data.eval: .*has the splits test, train, none of dev.*data.eval_split"):
            resolve(str(tmp_path / "saved"), ["dev"], "data.eval")


@pytest.mark.parametrize(
    "layout",
    [
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        ["train/part-0.jsonl", "train/part-1.jsonl", "test/part-0.jsonl"],
        ["train_0.jsonl.gz", "train_1.jsonl.gz", "test.jsonl.gz"],
    ],
)
def test_folders_of_files(tmp_path: Path, layout: list[str]) -> None:
    for name, records in zip(layout, [RECORDS[:2], RECORDS[2:], RECORDS[:1]], strict=True):
        write(tmp_path / name, records)
    write(tmp_path / ".cache" / layout[0], RECORDS)  # hidden folders are not data
    (tmp_path / "README.md").write_text("not data")
    assert prompts(resolve(str(tmp_path), TRAIN, "data.train")) == ALL
    assert prompts(resolve(str(tmp_path), ["test"], "data.eval")) == ALL[:1]


def test_a_folder_without_splits_is_one(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", RECORDS[2:])
    write(tmp_path / "a.jsonl", RECORDS[:2])
    assert prompts(resolve(str(tmp_path), TRAIN, "data.train")) == ALL


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.train: .* holds no data files; give a \.jsonl"):
        resolve(str(tmp_path), TRAIN, "data.train")
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"has the splits train, none of test.*data.eval_split"):
        resolve(str(tmp_path), ["test"], "data.eval")
    write(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"holds the same split as .jsonl and .parquet"):
        resolve(str(tmp_path), TRAIN, "data.train")
    with pytest.raises(DataError, match=rf"data.train: {tmp_path}/none.jsonl does not exist; give a .jsonl"):
        resolve(str(tmp_path / "none.jsonl"), TRAIN, "data.train")
    (tmp_path / "a.csv").write_text("prompt\n1\n")
    with pytest.raises(DataError, match=r"a.csv has an unknown form; give a .jsonl, .jsonl.gz or .parquet"):
        resolve(str(tmp_path / "a.csv"), TRAIN, "data.train")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "empty line"),
        (b"   ", "empty line"),
        (b'{"prompt": ', "malformed JSON: Expecting value at column"),
        (b'{"prompt": "a"} x', "malformed JSON: Extra data at column 17"),
        (b"[1]", "must be a JSON object, is a list"),
        (b"3", "must be a JSON object, is a int"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at column 13"),
        (b"[" * 100_000, "malformed JSON"),
    ],
)
@pytest.mark.parametrize("position", [1, 3])
def test_bad_lines(tmp_path: Path, line: bytes, reason: str, position: int, chat_tokenizer: Any) -> None:
    good = json.dumps({"prompt": "hello"}).encode()
    lines = [good] * 3
    lines.insert(position - 1, line)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    bad = [r for r in read_file(path) if isinstance(r, BadRecord)]
    assert len(bad) == 1
    assert bad[0].where == f"{path}, line {position}"
    assert reason in bad[0].reason
    with pytest.raises(DataError) as caught:
        load_prompts(DataOptions(train=str(path)), "train", chat_tokenizer)
    assert str(caught.value).startswith(f"{path}, line {position}: ")
    assert reason in str(caught.value)
    assert "data.on_bad_line=skip" in str(caught.value)
    report = load_prompts(DataOptions(train=str(path), on_bad_line="skip"), "train", chat_tokenizer).report
    assert (report.records, report.used, report.bad) == (4, 3, 1)
    assert reason in report.bad_examples[0]


def test_a_byte_order_mark_and_a_missing_last_newline_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert prompts([path]) == ["a", "b"]


@pytest.mark.parametrize("skip", ["skip", "fail"])
def test_damaged_files_fail_always(tmp_path: Path, skip: Any, chat_tokenizer: Any) -> None:
    whole = write(tmp_path / "a.jsonl.gz", RECORDS * 2000).read_bytes()
    cases = {
        "truncated.jsonl.gz": (whole[: len(whole) // 2], r"damaged after line \d+ .*truncated or not gzip"),
        "plain.jsonl.gz": (b'{"prompt": "a"}\n', "damaged after line 0"),
        "text.parquet": (b"not parquet at all", "cannot be read as Parquet"),
        "empty.parquet": (b"", "cannot be read as Parquet"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            load_prompts(DataOptions(train=str(tmp_path / name), on_bad_line=skip), "train", chat_tokenizer)
        assert str(tmp_path / name) in str(caught.value)


def test_damaged_saved_datasets(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state.json cannot be read"):
        resolve(str(tmp_path), TRAIN, "data.train")
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    with pytest.raises(DataError, match=r"data-0.arrow is missing"):
        resolve(str(tmp_path), TRAIN, "data.train")
    (tmp_path / "data-0.arrow").write_text("x")
    with pytest.raises(DataError, match="cannot be read as an Arrow stream"):
        list(read_file(tmp_path / "data-0.arrow"))
