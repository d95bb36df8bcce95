"""Small configuration files for the tests of the launch package."""

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
run:
  name: demo
  steps: 5
model:
  path: model
data:
  train: train.jsonl
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a configuration file into tmp_path and returns its path."""

    def write(text: str = MINIMAL) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
