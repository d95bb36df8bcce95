"""A coordinator that cannot start is a failure of the user's, said in its own words."""

import socket
from pathlib import Path

import pytest

from coordinator.transport.security import write_keys
from launch.config import load_config
from launch.drafter.actors import drafter_actors
from launch.errors import as_expected
from tests.launch.conftest import MINIMAL

pytestmark = pytest.mark.ray


def failure(folder: Path, *overrides: str) -> str:
    """What is shown of the failure to start the actors."""
    (folder / "config.yaml").write_text(MINIMAL)
    config = load_config(folder / "config.yaml", ["rollout.workers=2", "drafter.train=true", *overrides]).config
    with pytest.raises(Exception) as raised, drafter_actors(config, folder / "run"):
        pass
    expected = as_expected(raised.value)
    assert expected is not None, raised.value
    return expected.message


def test_a_coordinators_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = failure(tmp_path, f"coordinator.port={port}")
        assert f"cannot listen for workers on tcp://127.0.0.1:{port}: Address already in use" in said
        assert "coordinator.port=0 takes a free port" in said
        assert "coordinator.admin_port=0" in failure(tmp_path, f"coordinator.admin_port={port}")


def test_a_coordinators_host_and_keys_are_named(tmp_path: Path) -> None:
    assert "coordinator.host must be an address of this machine" in failure(tmp_path, "coordinator.host=192.0.2.7")
    write_keys(tmp_path / "keys", ("worker",))
    assert "coordinator-key.json" in failure(tmp_path, f"coordinator.curve.directory={tmp_path}/keys")
