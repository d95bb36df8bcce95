"""What a cluster leaves is found; a cluster that leaves nothing is no proof that it would be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.nodes import Nodes


def test_a_process_and_a_segment_that_stay_are_told_and_the_process_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fleet.nodes.END_S", 0.5)
    nodes = Nodes(tmp_path)
    segment = Path(f"/dev/shm/paceline-test-{os.getpid()}")
    command = [sys.executable, "-c", "input()"]
    stays = subprocess.Popen(command, env=nodes.marked(), stdin=subprocess.PIPE)
    try:
        segment.write_bytes(b"left")
        left = nodes.find_left()
        assert [words.split()[0] for words in left.processes] == [str(stays.pid)]
        assert segment.name in left.segments
        assert not nodes.processes()
        with segment.open("rb"):  # somebody uses it
            assert segment.name not in nodes.find_left().segments
    finally:
        stays.kill()
        stays.communicate()
        segment.unlink()
    assert not nodes.find_left().processes
