"""One Ray head per test session, for the tests marked `ray` (they get it without asking)."""

import os

# Ray reads the authentication mode when it is imported. The head of the tests lives seconds and holds nothing.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a FutureWarning about it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.fixturenames.insert(0, "ray_head")  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def ray_head() -> Iterator[str]:
    """The address (host:port) of a head with 16 logical CPUs and 4 pretended GPUs; this process is connected."""
    from launch.cluster.session import ray_session

    temp_dir = Path(tempfile.mkdtemp(prefix="plray"))
    previous = os.environ.pop("RAY_ADDRESS", None)
    try:
        with ray_session(cpus=16, gpus=4, temp_dir=temp_dir, object_store_bytes=256 * 2**20) as session:
            yield session.address
    finally:
        if previous is not None:
            os.environ["RAY_ADDRESS"] = previous
        shutil.rmtree(temp_dir, ignore_errors=True)
