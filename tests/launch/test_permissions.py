"""Files of another user: what is written can be read by all, and what cannot be read is named before Ray starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.eagle.files import load_eagle, save_eagle
from drafter.eagle.model import init_eagle
from drafter.published import EagleWeightsError
from launch.cache import require_readable
from launch.config import load_config
from launch.config.environment import validate_paths
from launch.errors import PacelineError
from models.config import ModelConfig, read_config
from tests.learner.tiny import write_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    config = ModelConfig.from_hf(read_config(write_config(tmp_path / "model")))
    options = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
    save_eagle(init_eagle(config, 0, "eagle", None, **options), tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_drafters_files_have_the_mode_of_other_files(drafter: Path) -> None:
    assert {oct(path.stat().st_mode & 0o777) for path in drafter.iterdir()} == {"0o644"}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file one that this user, root too, may not read."""

    def refuse(path: Path) -> None:
        allowed = os.access
        monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != path and allowed(asked, mode))

    return refuse


def test_a_drafter_that_cannot_be_read_is_an_issue_of_its_key(
    drafter: Path, tmp_path: Path, write_config: Callable[..., Path], refused: Callable[[Path], None]
) -> None:
    overrides = [f"rollout.speculation.eagle.path={drafter}", "rollout.speculation.mode=adaptive"]
    config = load_config(write_config(), overrides).config
    key = "rollout.speculation.eagle.path"
    assert not [issue for issue in validate_paths(config) if issue.key == key]
    refused(drafter / "model.safetensors")
    (issue,) = [issue for issue in validate_paths(config) if issue.key == key]
    assert issue.message == f"{drafter / 'model.safetensors'} cannot be read by this user: permission denied"
    assert f"chmod a+r {drafter / 'model.safetensors'}" in issue.remedy


def test_what_another_users_run_kept_is_named(drafter: Path, refused: Callable[[Path], None]) -> None:
    require_readable(drafter)
    require_readable(drafter / "nowhere")
    refused(drafter / "config.json")
    with pytest.raises(PacelineError, match=r"config\.json cannot be read by this user") as caught:
        require_readable(drafter)
    assert "chmod a+r" in str(caught.value.remedy)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_an_engine_of_another_user_says_that_it_may_not(drafter: Path, tmp_path: Path) -> None:
    """And not that there is no drafter."""
    (drafter / "model.safetensors").chmod(0o600)
    for folder in (drafter, *tmp_path.parents):
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o755)
    code = f"""
import os, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from drafter.eagle.files import load_eagle
from models.config import ModelConfig, read_config
config = ModelConfig.from_hf(read_config({str(tmp_path / "model")!r}))
os.setuid(65534)
load_eagle({str(drafter)!r}, config, dtype=torch.float32, device="cpu", batch_invariant=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert f"{drafter} cannot be read by this user" in done.stderr
    assert "holds no EAGLE drafter" not in done.stderr
    (drafter / "model.safetensors").chmod(0o644)
    assert EagleWeightsError.__name__ in done.stderr
    assert load_eagle.__name__ in done.stderr
