"""Starting and attaching: dead addresses, wrong addresses, and a session inside a session."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from launch.cluster import session as ray_sessions
from launch.cluster.session import RaySessionError, check_reachable, ray_session

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("ray://head:10001", "ray job submit"),
        ("head", "is not host:port"),
        ("127.0.0.1:{port}", "no Ray cluster answers at 127.0.0.1"),
    ],
)
def test_bad_address_is_an_error_at_once(address: str, match: str) -> None:
    with pytest.raises(RaySessionError) as error:
        check_reachable(address.format(port=free_port()), timeout_s=2.0)
    assert match in f"{error.value.message} {error.value.remedy}"


@pytest.mark.parametrize(("failures", "starts"), [(1, 2), (5, 2)])
def test_a_head_that_does_not_start_in_time_is_tried_once_more(
    failures: int, starts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray raises a plain Exception then."""
    calls: list[str] = []

    def init(**arguments: object) -> None:
        calls.append(str(arguments["address"]))
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup.\nAnd so on.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures < starts:
        ray_sessions._start_head({}, tmp_path)
    else:
        with pytest.raises(RaySessionError, match="did not start, twice: The current node timed out") as error:
            ray_sessions._start_head({}, tmp_path)
        assert "see the newest logs" in str(error.value.remedy)
    assert calls == ["local"] * starts


def test_whatever_ray_raises_when_attaching_is_an_expected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: object) -> None:
        raise Exception("Can't find a node_ip_address.json file")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_sessions, "check_reachable", lambda address, timeout_s: None)
    with pytest.raises(RaySessionError, match="Ray at 'h:1' cannot be used"), ray_session(address="h:1"):
        pass


@pytest.mark.ray
def test_a_session_inside_a_session_uses_it_and_leaves_it_running(ray_head: str) -> None:
    with ray_session() as session:
        assert (session.address, session.owned) == (ray_head, False)
    assert ray.is_initialized()


@pytest.mark.ray
def test_attaching_from_another_process_imports_our_packages_in_workers(ray_head: str) -> None:
    """As a driver does: `cd repository; RAY_ADDRESS=... python -c ...`. The head lives on."""
    script = (
        "import os, ray, signal\n"
        "from launch.interrupt import interrupt_flag\n"
        "from launch.cluster.session import ray_session\n"
        "from launch.dispatch.ledger import Ledger\n"
        "with interrupt_flag() as flag, ray_session() as session:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)  # Ray would make it sys.exit\n"
        "    assert flag.signal_name == 'SIGTERM'\n"
        "    ledger = ray.remote(Ledger).remote([], max_retries=0)\n"
        "    print(session.address, session.owned, ray.get(ledger.assign.remote()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": ray_head},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"{ray_head} False {{}}"
    assert ray.is_initialized()
    assert ray.nodes()[0]["Alive"]


@pytest.mark.slow
def test_private_head_keeps_token_authentication_and_is_quiet(tmp_path: Path) -> None:
    script = (
        "import os, ray\n"
        "from launch.cluster.session import ray_session\n"
        "with ray_session(cpus=3) as session:\n"
        "    assert ray.cluster_resources()['CPU'] >= 3\n"
        "    print(session.owned, os.environ['RAY_AUTH_MODE'], len(os.environ['RAY_AUTH_TOKEN']))\n"
        "assert not ray.is_initialized()\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True token 64\n"
    assert done.stderr == ""
    assert not (tmp_path / ".ray").exists()  # the token is in the environment only
