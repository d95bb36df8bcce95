"""A Ray cluster of several nodes that the tests of this folder share, and the runs of tests/train on it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.nodes import Nodes
from launch.config import load_config
from launch.local import RunRecord, record_run
from tests.train.conftest import SHARP, Runs
from tests.train.conftest import runs as runs

STEPS = "run.steps=12"  # of less than a second: a node takes one to join


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
