"""What a run ran on: recorded at every start, and a change between two starts is said."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from launch.observe import Observer, environment
from launch.observe.environment import describe, differences, read_starts, rows
from launch.observe.journal import read
from tests.launch.test_observer import make_config, record


def test_every_start_is_recorded_and_a_change_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Observer(tmp_path, make_config()) as observer:
        observer.step(record(1))
    with Observer(tmp_path, make_config(), resume_from=1):
        pass
    known = environment.describe

    def upgraded(*args: object) -> dict[str, object]:
        now = known(*args)
        return now | {"packages": now["packages"] | {"torch": "99.0"}, "host": "elsewhere"}

    monkeypatch.setattr(environment, "describe", upgraded)
    with Observer(tmp_path, make_config(), resume_from=1):
        pass
    assert len(read_starts(tmp_path)) == 3
    changes = [event for event in read(tmp_path / "events.jsonl") if event["kind"] == "environment_changed"]
    assert len(changes) == 1
    assert f"torch {version('torch')} -> 99.0" in changes[0]["message"]
    assert "host" in changes[0]["message"]


def test_the_record_names_versions_source_machine_and_threads() -> None:
    found = json.loads(json.dumps(describe(make_config(), 5.0)))
    assert {"paceline", "torch", "ray", "transformers"} <= found["packages"].keys()
    assert found["packages"]["ray"] == version("ray")
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["host"]
    assert found["memory_bytes"] > 2**28
    assert set(found["threads"]) == {"engine", "learner", "OMP_NUM_THREADS"}
    shown = dict(rows(found))
    assert "torch" in shown["versions"]
    assert "gpus" not in shown or shown["gpus"]


def test_a_checkout_is_named_by_its_commit_and_a_changed_one_says_so(tmp_path: Path) -> None:
    def git(*command: str) -> str:
        given = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *command]
        return subprocess.run(given, check=True, capture_output=True, text=True).stdout.strip()

    assert environment._commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert environment._commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert environment._commit(tmp_path) == f"{commit}+changes"


def test_what_is_equal_is_no_difference_and_a_broken_record_is_none(tmp_path: Path) -> None:
    here = describe(make_config(), 5.0)
    assert differences(here, describe(make_config(), 9.0)) == []
    assert differences({}, {"cores": 4}) == ["cores none -> 4"]
    (tmp_path / environment.FILE).write_text('{"torn', encoding="utf-8")
    assert read_starts(tmp_path) == []
