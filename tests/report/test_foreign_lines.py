"""Lines of JSON that are not ours, anywhere in a run's journals: nothing that reads them stumbles."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.commands.status import read_run_status, status_lines
from launch.observe.journal import FIELDS, cut, read
from launch.report import write_report
from launch.report.summary import summarise

STRANGE: tuple[Any, ...] = (None, "x", -1, 1.5, True, [], [None], ["x"], {}, {"a": 1}, [[1, 2]])


def foreign(record: dict[str, Any]) -> Iterator[Any]:
    """Other kinds of lines, and the record with each of its values in turn missing or of another kind."""
    yield from STRANGE
    for name in record:
        yield {key: value for key, value in record.items() if key != name}
        yield from (record | {name: value} for value in STRANGE)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_report_summary_and_status_read_over_them(run_dir: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    path = folder / name
    own = path.read_text().splitlines(keepends=True) if path.is_file() else []
    record = json.loads(own[-1]) if own else {"step": 1}
    lines = [json.dumps(value) + "\n" for value in foreign(record)]
    for line in lines:  # as the last one, which is what a status says
        path.write_text("".join([*own, line]))
        status_lines(read_run_status(folder))
    path.write_text("".join([*lines, *own, *lines]))
    summarise(folder)
    write_report(folder, tmp_path / "report.html")


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_line_without_what_every_record_has_is_left_out_and_cut(run_dir: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    own = (run_dir / name).read_text().splitlines(keepends=True) if (run_dir / name).is_file() else []
    record = json.loads(own[0]) if own else {"step": 1, "prompt": "", "response": ""}
    for field in (field for field, fits in FIELDS[name].items() if not fits(None)):
        strange = [{key: value for key, value in record.items() if key != field}, record | {field: None}]
        path.write_text("".join([*own, *(json.dumps(value) + "\n" for value in strange)]))
        assert len(read(path)) == len(own)
        assert cut(path, None) == len(strange)
