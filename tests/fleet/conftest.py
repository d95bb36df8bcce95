"""A Ray cluster of several nodes that the tests of this folder share, and the runs of tests/train on it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config import load_config
from launch.local import RunRecord, record_run
from tests.fleet.layouts import STEPS
from tests.fleet.nodes import Nodes
from tests.train.conftest import SHARP, Runs
from tests.train.conftest import runs as runs


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """A head that holds no actor with a reservation; tests add nodes and end them. Whatever stays is a failure."""
    with tempfile.TemporaryDirectory(prefix="pln", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(Path(folder), cpus=0) as nodes:
            yield nodes
        assert not nodes.left, nodes.left


@pytest.fixture(scope="session")
def one_process(runs: Runs) -> RunRecord:
    """What every run of the folder must sample and learn."""
    record = RunRecord(keep_responses=True)
    record_run(load_config(runs.config, runs.overrides("one_process", SHARP, STEPS)).config, record)
    return record
