"""How functions become names that workers know."""

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.own_task.reward import grade
from launch.config import Config, ConfigError
from launch.config.load import load_values
from launch.errors import UsageError
from launch.python_api import train
from launch.reward_functions import MODULE, code_paths, importable, reward_override

VALUES: dict[str, Any] = {"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": "t"}}


@pytest.fixture(autouse=True)
def ray_runs_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests before left in this process."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_values(json.loads(json.dumps(VALUES)), "values", [f"run.dir={tmp_path}", *overrides]).config


def terms_of(override: str) -> list[dict[str, Any]]:
    key, _, value = override.partition("=")
    assert key == "reward.terms"
    return list(json.loads(value))


def test_a_function_of_a_module_goes_by_its_name(tmp_path: Path) -> None:
    (term, pattern) = terms_of(reward_override([grade, {"kind": "format", "pattern": "x"}], config(tmp_path)))
    assert term == {"kind": "python", "name": "grade", "function": "examples.own_task.reward:grade"}
    assert pattern == {"kind": "format", "pattern": "x"}
    assert list(tmp_path.iterdir()) == []


def test_a_closure_goes_by_value_and_keeps_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 3.0

    def longer(prompt: str, response: str, record: dict[str, Any]) -> float:
        return factor * len(response)

    assert importable(longer) is None
    assert importable(lambda: 0) is None
    monkeypatch.setattr(sys, "path", list(sys.path))
    override = reward_override([{"function": longer, "weight": 0.5}], config(tmp_path))
    loaded = config(tmp_path, override)
    (term,) = loaded.reward.terms
    assert (term.function, term.name, term.weight) == (f"{MODULE}:longer", "longer", 0.5)
    (folder,) = code_paths(loaded)
    assert sys.path[0] == folder
    found = importlib.import_module(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    assert found.longer("", "ab", {}) == 6.0
    assert found.longer is not longer
    assert code_paths(config(tmp_path)) == []


def test_what_cannot_be_sent_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w") as file:

        def writes(prompt: str, response: str, record: dict[str, Any]) -> float:
            return float(file.write(response))

        with pytest.raises(UsageError, match="the reward function writes cannot be sent"):
            reward_override([writes], config(tmp_path))

    one, other = ((lambda *_, value=value: value) for value in (0.0, 1.0))
    one.__name__ = other.__name__ = "same"
    with pytest.raises(UsageError, match="two reward functions are called same"):
        reward_override([one, other], config(tmp_path))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(UsageError, match="Ray runs in this process already"):
        reward_override([one], config(tmp_path))


def test_mappings_are_a_configuration_and_stay_as_they_are(tmp_path: Path) -> None:
    values = {**VALUES, "num_generations": 4, "run": {"name": "x", "dir": tmp_path}}
    with pytest.raises(ConfigError, match=r"rollout.rollouts_per_prompt=4"):
        train(values, "run.steps=3")
    assert values == {**VALUES, "num_generations": 4, "run": {"name": "x", "dir": tmp_path}}


def test_a_run_needs_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(train, VALUES)
    with pytest.raises(UsageError, match="main thread"):
        asked.result()
