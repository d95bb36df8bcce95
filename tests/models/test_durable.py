"""A sealed folder: whatever changes in it is found and named."""

import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import durable
from models.durable import CHECKSUMS_FILE, Fault, faults, naming, room, seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "deep").mkdir(parents=True)
    (made / "a.bin").write_bytes(random.Random(1).randbytes(5000))
    (made / "deep/.hidden").write_bytes(b"x" * 300)
    (made / "empty").touch()
    seal(made)
    return made


def test_nothing_has_changed(folder: Path) -> None:
    assert faults(folder) == []
    (folder / "deep/later").write_text("not sealed, and nobody's business")
    assert faults(folder) == []


def test_a_folder_that_was_not_sealed_is_not_called_intact(tmp_path: Path) -> None:
    assert faults(tmp_path) is None


def test_every_bit_of_every_file_counts(folder: Path) -> None:
    """The checksums' own bits too."""
    chance = random.Random(0)
    for path in (folder / "a.bin", folder / "deep/.hidden", folder / CHECKSUMS_FILE):
        whole = path.read_bytes()
        for _ in range(200):
            damaged = bytearray(whole)
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            (fault,) = faults(folder) or []
            assert fault.file == path.relative_to(folder).as_posix()
            assert "is damaged" in fault.what
        path.write_bytes(whole)
    assert faults(folder) == []


def test_what_is_missing_short_or_longer_is_named_with_its_size(folder: Path) -> None:
    (folder / "empty").unlink()
    (folder / "a.bin").write_bytes(b"")
    with (folder / "deep/.hidden").open("ab") as file:
        file.write(b"y")
    assert faults(folder) == [
        Fault("a.bin", "is damaged: it has 0 bytes, and 5,000 were written"),
        Fault("deep/.hidden", "is damaged: it has 301 bytes, and 300 were written"),
        Fault("empty", "is missing"),
    ]


def test_a_list_that_names_a_file_elsewhere_is_no_list(folder: Path) -> None:
    found = {"/dev/zero": {"bytes": 0, "sha256": ""}}
    (folder / CHECKSUMS_FILE).write_text(durable._text(found))
    assert faults(folder) == [Fault(CHECKSUMS_FILE, "is damaged")]


def test_a_file_that_may_not_be_read_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = Path.open

    def refused(path: Path, *args: object, **options: object) -> Any:
        if path.name == "a.bin":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError, match=r"a\.bin"):
        faults(folder)


def test_a_full_disk_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MiB are free there" in room(tmp_path / "not" / "yet")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=9, f_favail=0))
    assert room(tmp_path) == "No inodes are free there: it holds too many files."


def test_an_error_of_the_disk_gets_a_name_and_others_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="here") as caught, naming(tmp_path / "here"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "here")
    with pytest.raises(ConnectionRefusedError) as other, naming(tmp_path):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert other.value.filename is None
