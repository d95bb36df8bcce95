"""Names and logs of actors: `ray list actors` says who is who, and the run's folder holds what they said."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import ray

from actors.identity import unique_name
from actors.rewards import GradeItem
from benchmarks.alone import DispatcherAlone, PoolAlone, spawner
from config.rewards import RewardOptions
from config.rollout import RolloutOptions
from launch.run_folder import log_file
from tests.actors.fake_engine import FakeEngine, FakeOptions

SAYS = """
import logging, sys
from actors.identity import log_to
print("before", file=sys.stderr)
log_to(sys.argv[1] or None, "rollout-7")
logging.getLogger("actors.x").info("loaded")
logging.getLogger("strange.library").info("chatter")
logging.getLogger("strange.library").warning("a warning")
print("[engine] a child's line", file=sys.stderr)
print(":actor_name:rollout-7", file=sys.stderr)
print("the last line", file=sys.stderr)
"""


def said(path: str) -> str:
    done = subprocess.run([sys.executable, "-c", SAYS, path], stderr=subprocess.PIPE, text=True, check=True)
    return done.stderr


def test_what_an_actor_says_goes_to_its_stderr_and_to_its_file(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "rollout-7.log"
    stderr = said(str(file))
    text = file.read_text(encoding="utf-8")
    assert stderr == "before\n" + text.replace("the last line", ":actor_name:rollout-7\nthe last line")
    assert "rollout-7 is process" in text
    for line in ("loaded", "a warning", "[engine] a child's line"):
        assert line in text
    assert "chatter" not in text
    said(str(file))
    assert file.read_text(encoding="utf-8").count("rollout-7 is process") == 2


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stderr = said(str(tmp_path / "file" / "logs" / "x.log"))
    assert "no log file" in stderr
    assert "loaded" in stderr


def test_a_name_is_never_given_twice() -> None:
    assert [unique_name("somebody"), unique_name("somebody"), unique_name("nobody")] == [
        "somebody",
        "somebody.2",
        "nobody",
    ]


@pytest.mark.ray
def test_workers_have_names_and_leave_their_logs_in_the_runs_folder(tmp_path: Path) -> None:
    log = partial(log_file, tmp_path)
    spawn = spawner(lambda name: partial(FakeEngine, FakeOptions()), log=log)
    dispatcher = DispatcherAlone(spawn, RolloutOptions(workers=2))
    try:
        dispatcher.start()
        names = set(ray.util.list_named_actors())
        assert len({name for name in names if name.startswith("rollout-")}) == 2
    finally:
        dispatcher.close()
    for index in range(2):
        text = (tmp_path / "logs" / f"rollout-{index}.log").read_text(encoding="utf-8")
        assert "actors.rollout_worker: engine 1 is up" in text


@pytest.mark.ray
def test_what_a_reward_function_prints_is_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talkative.py").write_text(
        "def reward(prompt, response, record):\n    print('graded', response)\n    return record['label']\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    term = {"kind": "python", "function": "talkative:reward"}
    options = RewardOptions.model_validate({"terms": [term], "workers": 1})
    env = {"runtime_env": {"env_vars": {"PYTHONPATH": str(tmp_path)}}}
    with PoolAlone(options, log=partial(log_file, tmp_path), actor_options=lambda: env) as pool:
        pool.begin()
        pool.submit(1, GradeItem(prompt="p", response="one", record={"label": 1.0}, finish_reason="stop"))
        pool.submit(2, GradeItem(prompt="p", response="two", record={}, finish_reason="stop"))
        assert [grade.error is None for grade in pool.drain().values()] == [True, False]
        assert any(name.startswith("reward-0") for name in ray.util.list_named_actors())
    text = (tmp_path / "logs" / "reward-0.log").read_text(encoding="utf-8")
    assert "graded one" in text
    assert "could not be graded: python: KeyError: 'label'" in text
