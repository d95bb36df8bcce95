"""One run folder for all tests of the report that only read it."""

from pathlib import Path

import pytest

from tests.report.synthetic import write_run


@pytest.fixture(scope="package")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "synthetic", steps=20, planned=20)
