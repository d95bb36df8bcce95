"""Ray that is open to the network is said, with what is open and what closes it."""

import os
import socket
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from launch.cluster.exposure import asks_for_token, exposure
from launch.cluster.session import RaySession

OPEN, LOOPBACK = "10.0.0.5", "127.0.0.1"


@pytest.mark.parametrize(
    ("owned", "gcs", "dashboard", "open_"),
    [
        (False, OPEN, f"http://{OPEN}:8265", [f"its GCS at {OPEN}:6379", f"its dashboard at {OPEN}:8265"]),
        (False, OPEN, f"http://{LOOPBACK}:8265", [f"its GCS at {OPEN}:6379"]),
        (False, OPEN, None, [f"its GCS at {OPEN}:6379"]),
        (False, LOOPBACK, "http://[::1]:8265", []),
        (False, "localhost", "http://0.0.0.0:8265", ["its dashboard at 0.0.0.0:8265"]),
        (True, OPEN, None, []),
        (True, OPEN, f"http://{LOOPBACK}:8265", []),
        (True, OPEN, f"http://{OPEN}:8265", [f"its dashboard at {OPEN}:8265"]),
    ],
)
def test_what_is_open_is_named_with_its_remedy(owned: bool, gcs: str, dashboard: str | None, open_: list[str]) -> None:
    session = RaySession(address=f"{gcs}:6379", owned=owned, dashboard_url=dashboard)
    said = exposure(session, token=False)
    assert (said == "") == (open_ == [])
    assert all(door in said for door in open_)
    assert said.count(" at ") == len(open_)
    assert not said or "RAY_AUTH_MODE=token" in said
    assert exposure(session, token=True) == ""


@contextmanager
def gcs(mode: str, folder: Path) -> Iterator[RaySession]:
    """Ray's own GCS server alone, as the head of somebody else's cluster."""
    import ray

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = {
        "log_dir": folder,
        "config_list": b64encode(b"{}").decode(),
        "gcs_server_port": port,
        "metrics-agent-port": 0,
        "node-ip-address": "127.0.0.1",
        "session-name": "test",
        "session-dir": folder,
        "node-id": "a" * 56,
        "ray-commit": "none",
    }
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server", *(f"--{k}={v}" for k, v in arguments.items())],
            env=os.environ | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "t" * 32},
            stdout=out,
            stderr=out,
        )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        yield RaySession(address=f"127.0.0.1:{port}", owned=False, dashboard_url=None)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("mode", "asks"), [("token", True), ("disabled", False)])
@pytest.mark.parametrize("own", [True, False])
def test_an_attached_ray_is_asked_and_its_clients_mode_believed_of_none_but_an_own_head(
    mode: str, asks: bool, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's mode, which Ray reads when it is imported, is the other one each time."""
    from ray._private.authentication import authentication_utils

    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: not asks)
    with gcs(mode, tmp_path) as session:
        assert asks_for_token(replace(session, owned=own)) == (asks != own)


def test_where_nobody_answers_the_mode_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.authentication import authentication_utils

    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = RaySession(address=f"127.0.0.1:{silent.getsockname()[1]}", owned=False, dashboard_url=None)
        for asks in (True, False):
            monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda asks=asks: asks)
            assert asks_for_token(session, timeout_s=0.1) == asks
