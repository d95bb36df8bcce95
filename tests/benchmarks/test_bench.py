"""`make bench`: every row reads the committed records, says what moved, and ends no other."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import harness
from benchmarks.rows import NEEDS, ROWS, Figure, Row


@pytest.mark.parametrize("name", ROWS)
def test_a_rows_figures_are_those_of_its_committed_record(name: str) -> None:
    row = ROWS[name]
    record = bench.committed(row)
    if record is None:
        assert bench.beside(row, None, {"machine": {"cpu": "x"}, "rows": []})["figures"] == []
        return
    figures = list(row.figures(record))
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.low <= figure.value <= figure.high for figure in figures)
    assert bench.cpu(record)
    same = bench.beside(row, record, record)
    assert {pair["moved"] for pair in same["figures"]} == {False}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_a_script_that_is_there(name: str) -> None:
    assert (harness.ROOT / f"benchmarks/{ROWS[name].script}.py").is_file()
    given = dict.fromkeys([*NEEDS, "folder"], "here")
    assert "{" not in f"{ROWS[name].first} {ROWS[name].options}".format(**given)


def test_a_figure_has_moved_if_the_intervals_lie_apart_by_more_than_the_noise() -> None:
    before = Figure("x", 2.0, 1.8, 2.2)
    assert not Figure("x", 2.5, 2.3, 2.7).moved(before, noise=0.1)  # 0.1 apart of 0.2 allowed
    assert Figure("x", 2.5, 2.45, 2.7).moved(before, noise=0.1)
    assert Figure("x", 1.0, 0.9, 1.5).moved(before, noise=0.1)
    assert not Figure("x", 2.1, 1.0, 3.0).moved(before, noise=0.0)
    assert Figure.of("x", {"ratio": 2, "lowest": 1, "highest": 3}) == Figure("x", 2, 1, 3)


def attempt(words: Sequence[str], log: Path, limit_s: float) -> harness.Outcome:
    """A script that is not there, one that takes too long, and one that writes its record."""
    if "benchmarks.no_such_script" in words:
        return harness.Outcome(1, 0.1, "No module named ...")
    if limit_s < 1:
        return harness.Outcome(None, limit_s, "")
    Path(words[words.index("--out") + 1]).write_text('{"machine": {"cpu": "a CPU"}}')
    return harness.Outcome(0, 0.1, "")


def test_a_row_that_fails_or_lacks_something_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "prepare", lambda folder: None)
    monkeypatch.setattr(bench, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(bench, "attempt", attempt)
    figures = lambda record: iter([Figure("seen", 1.0, 1.0, 1.0)])  # noqa: E731
    rows = {
        "gone": Row(script="no_such_script", limit_s=60.0, figures=figures),
        "slow": Row(script="coordinator", limit_s=0.01, figures=figures),
        "needs": Row(script="coordinator", options="{trl}", limit_s=60.0, figures=figures),
        "works": Row(script="coordinator", limit_s=60.0, figures=figures),
    }
    monkeypatch.setattr(bench, "ROWS", rows)
    assert bench.main(rows=["gone,slow", "needs,works"], out=tmp_path / "bench.json") == 1
    found = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["outcome"] for row in found.values()] == ["failed", "failed", "skipped", "done"]
    said = capsys.readouterr().out
    assert "[1/4] gone failed: exit code 1" in said
    assert "needs TRL" in said
    assert "| works | seen | 1x | 1x |  | no |" in (tmp_path / "bench.md").read_text()
    assert bench.main(rows=["needs"], out=tmp_path / "bench.json") == 0
    with pytest.raises(SystemExit, match="no such rows: what"):
        bench.main(rows=["what"])
