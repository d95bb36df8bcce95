"""Journals: what a killed writer leaves behind reads back, and cutting never loses a line that should stay."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import as_expected
from launch.observe import now
from launch.observe.journal import Journal, cut, encode, read, replace

ROOT = Path(__file__).parents[2]


def test_records_keep_every_digit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    value = 0.1 + 0.2
    journal.write({"x": value, "n": np.float32(0.5), "lengths": np.array([1, 2])})
    journal.close()
    assert read(tmp_path / "a.jsonl") == [{"x": value, "n": 0.5, "lengths": [1, 2]}]


@given(st.dictionaries(st.text(max_size=5).filter(lambda k: k != "nonfinite"), st.floats() | st.text(max_size=5)))
def test_lines_are_strict_json_and_nonfinite_values_stay_known(record: dict[str, object]) -> None:
    line = encode(record)
    assert "\n" not in line

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is not JSON")

    parsed = json.loads(line, parse_constant=refuse)
    bad = {key: repr(v) for key, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    assert parsed.pop("nonfinite", {}) == bad
    assert parsed == {key: None if key in bad else value for key, value in record.items()}


def test_a_torn_last_line_is_skipped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step":1}\nnot json\n[2]\n{"step":2}\n{"step":3')
    assert read(path) == [{"step": 1}, {"step": 2}]
    assert cut(path, 1) == 4
    assert path.read_text() == '{"step":1}\n'


def test_cut_without_a_reason_does_not_touch_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step":1}\n')
    before = path.stat().st_ino
    assert cut(path, None) == 0
    assert path.stat().st_ino == before
    assert cut(tmp_path / "absent.jsonl", None) == 0


def test_replace_leaves_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")

    def work(name: int) -> None:
        for i in range(200):
            journal.write({"thread": name, "i": i, "text": "x" * 200})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    journal.close()
    journal.write({"after": "close"})  # a late callback is no error
    rows = read(tmp_path / "a.jsonl")
    assert len(rows) == 800
    assert all([r["i"] for r in rows if r["thread"] == n] == list(range(200)) for n in range(4))


def test_sigkill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom launch.observe.journal import Journal\n"
        f"j = Journal(Path({str(path)!r}))\n"
        "for i in range(50):\n    j.write({'step': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read(path)] == list(range(50))


def test_a_full_disk_is_named_with_the_file_and_the_remedy(tmp_path: Path) -> None:
    """The system names no file when a write fails; /dev/full fails every one."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    journal = Journal(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left") as caught:
        journal.write({"step": 1})
    with suppress(OSError):
        journal.close()
    expected = as_expected(caught.value)
    assert expected is not None
    assert expected.message.startswith(f"No space left on device: {tmp_path / 'metrics.jsonl'}. ")
    assert expected.message.endswith(" are free there.")
    assert expected.remedy == "free disk space there, or choose another run.dir"


def test_what_is_not_written_leaves_no_draft(tmp_path: Path) -> None:
    draft = tmp_path / f".{now.FILE_NAME}.{os.getpid()}.tmp"
    draft.symlink_to("/dev/full")
    now.write(tmp_path, now.Now("rollout", 1, 2, 3, 4.0))
    assert list(tmp_path.iterdir()) == []


def test_lines_are_on_disk_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    journal = Journal(tmp_path / "a.jsonl")
    journal.write({"step": 1})
    journal.sync()
    assert synced == ["a.jsonl"]
    journal.close()
    journal.sync()  # a late one is no error
