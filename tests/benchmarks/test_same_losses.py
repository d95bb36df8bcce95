"""The comparison behind "proof of value": blind to timings, sharp to the last bit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import same_losses

RECORDS: list[dict[str, Any]] = [
    {"step": 0, "kind": "eval", "at_s": 1.0, "eval/reward": 0.25, "seconds/eval": 3.0},
    {
        "step": 1,
        "kind": "step",
        "at_s": 2.0,
        "loss/mean": 0.1,
        "reward/mean": 0.25,
        "tokens_per_s": 9.0,
        "seconds/step": 2.0,
    },
]


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(folder)


def compare(monkeypatch: pytest.MonkeyPatch, *runs: str) -> int:
    monkeypatch.setattr(sys, "argv", ["same_losses", *runs])
    return same_losses.main()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({}, 0, "identical: 2 records"),
        ({"tokens_per_s": 8.0, "seconds/step": 7.0, "at_s": 99.0}, 0, "identical"),
        ({"loss/mean": 0.1 + 2**-56}, 1, "step record of step 1: loss/mean"),
        ({"entropy": 1.0}, 1, "entropy is None and 1.0"),
        ({"engine/steps": 7.0, "drafter/loss": 0.5}, 0, "allowed to differ: drafter/ (1), engine/ (1)"),
        ({"engine/steps": 7.0, "reward/mean": 0.5}, 1, "reward/mean is 0.25 and 0.5"),
        ({"another": 1.0, "reward/mean": 0.5}, 1, "reward/mean is 0.25 and 0.5"),
    ],
)
def test_one_changed_value(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, float],
    code: int,
    words: str,
) -> None:
    runs = write(tmp_path / "a", RECORDS), write(tmp_path / "b", [RECORDS[0], RECORDS[1] | change])
    assert compare(monkeypatch, *runs) == code
    assert words in capsys.readouterr().out


def test_a_missing_step_and_a_torn_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, short = write(tmp_path / "a", RECORDS), write(tmp_path / "b", RECORDS[:1])
    assert compare(monkeypatch, whole, short) == 1
    assert "step 1: only in the first run" in capsys.readouterr().out
    (tmp_path / "b/metrics.jsonl").write_text('{"step": 1, "ki', encoding="utf-8")
    assert compare(monkeypatch, whole, short) == 2
    assert "metrics.jsonl:1" in capsys.readouterr().err


def test_responses_are_compared_in_any_order_and_with_their_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"step": 1, "prompt": "2 + 2", "response": "four", "reward": 1.0, "at_s": 1.0}]
    said += [{"step": 1, "prompt": "2 + 3", "response": "5", "reward": 0.0}]
    for name, samples in {
        "a": said,
        "b": [said[1] | {"at_s": 9.0}, said[0]],
        "c": [said[0], said[1] | {"reward": 1.0}],
    }.items():
        write(tmp_path / name, RECORDS)
        (tmp_path / name / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert compare(monkeypatch, str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert compare(monkeypatch, str(tmp_path / "a"), str(tmp_path / "c")) == 1
    assert "samples.jsonl: 2 and 2 records" in capsys.readouterr().out


def test_a_metric_that_only_the_second_version_writes_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write(tmp_path / "a", RECORDS), write(tmp_path / "b", [RECORDS[0], RECORDS[1] | {"entropy": 1.0}])
    assert compare(monkeypatch, *runs) == 1
    assert compare(monkeypatch, *runs, "--new", "entropy") == 0
    assert compare(monkeypatch, runs[1], runs[0], "--new", "entropy") == 1  # the first run had it
