"""Memory of a container: the tightest limit of any of its control groups, of either version."""

from pathlib import Path

import psutil
import pytest

from actors.host_memory import available_bytes, total_bytes

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def found(root: Path, groups: str) -> tuple[int, int]:
    (root / "cgroup").write_text(groups)
    return total_bytes(root / "cgroup", root), available_bytes(root / "cgroup", root)


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {3 * MIB}\nactive_file 7"
    write(tmp_path / "pod", memory__max=64 * MIB, memory__current=60 * MIB, memory__stat=stat)
    write(tmp_path / "pod/app", memory__max="max", memory__current=9 * MIB)
    assert found(tmp_path, "0::/pod/app\n") == (64 * MIB, 7 * MIB)
    write(tmp_path / "pod/app", memory__max=16 * MIB, memory__current=10 * MIB)
    assert found(tmp_path, "0::/pod/app\n") == (16 * MIB, 6 * MIB)
    write(tmp_path / "pod/app", memory__current=17 * MIB)
    assert found(tmp_path, "0::/pod/app\n") == (16 * MIB, 0)


@pytest.mark.parametrize("name", ["/", "/docker/0123", "/../../other"])
def test_a_container_sees_its_group_as_the_root(tmp_path: Path, name: str) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {2 * MIB}"
    write(tmp_path / "memory", memory__limit_in_bytes=32 * MIB, memory__usage_in_bytes=20 * MIB, memory__stat=stat)
    assert found(tmp_path, f"9:name=systemd:{name}\n4:memory:{name}\n0::/\n") == (32 * MIB, 14 * MIB)
    write(tmp_path, memory__max=8 * MIB, memory__current=MIB)
    assert found(tmp_path, f"0::{name}\n") == (8 * MIB, 7 * MIB)


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    machine = psutil.virtual_memory().total
    assert found(tmp_path, "4:memory:/\n0::/\n")[0] == machine
    assert total_bytes(tmp_path / "none", tmp_path) == machine
    assert 0 < available_bytes(tmp_path / "none", tmp_path) <= machine
    assert 0 < total_bytes() <= machine, "of this process"
