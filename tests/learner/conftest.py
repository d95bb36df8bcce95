"""A tiny Qwen3 and sequences for it."""

from pathlib import Path

import pytest

from tests.learner.tiny import write_config


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json only: weights are drawn from a seed."""
    return write_config(tmp_path_factory.mktemp("tiny"))
