"""A report of one run beside another: numbers, differing keys, and the other's curves in the data of the charts."""

from pathlib import Path

import pytest

from launch.errors import UsageError
from launch.report import render, write_report
from launch.report.against import differing_keys
from tests.report.page import CHROMIUM, Page, drawn_by_a_browser
from tests.report.synthetic import write_run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("other") / "other <b>run", steps=10, planned=12, seed=1, drafter=False)


def test_the_other_runs_curves_numbers_and_keys_are_there(run_dir: Path, other: Path) -> None:
    page = Page(render(run_dir, other))
    alone = Page(render(other))
    theirs = page.data["against"]
    assert {name: theirs[name] for name in ("steps", "series", "evals")} == {
        name: alone.data[name] for name in ("steps", "series", "evals")
    }
    assert "against" in page.ids
    assert "#against" in page.links
    text = " ".join(page.text)
    assert "incomplete" in text
    assert "Held-out reward, last" in text
    assert differing_keys(run_dir, other) == [("run.steps", "20", "12")]
    assert differing_keys(run_dir, run_dir) == []


def test_without_another_run_nothing_is_said_of_one(run_dir: Path) -> None:
    page = Page(render(run_dir))
    assert page.data["against"] is None
    assert "against" not in page.ids


def test_a_folder_without_a_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        write_report(run_dir, tmp_path / "report.html", tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_both(run_dir: Path, other: Path, tmp_path: Path) -> None:
    dom = drawn_by_a_browser(run_dir, tmp_path, against=other)
    assert dom.count("synthetic") > 1
    assert dom.count('stroke-dasharray="6 4"') >= 8
