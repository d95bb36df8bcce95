"""Starting and attaching: dead addresses, wrong addresses, and a session inside a session."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import ray
from ray._private.utils import validate_socket_filepath

from launch.cluster import session as ray_sessions
from launch.cluster.session import check_reachable, ray_session
from launch.errors import PacelineError

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
    with pytest.raises(PacelineError) as error:
        check_reachable(address.format(port=free_port()), timeout_s=2.0)
    assert match in f"{error.value.message} {error.value.remedy}"


@contextmanager
def listener(kind: str) -> Iterator[int]:
    """A server that is not Ray's; its port."""
    if kind == "silent":
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]
        return
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("kind", ["silent", "HTTP"])
def test_another_server_is_no_cluster_and_ray_is_not_asked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **arguments: pytest.fail("asked"))
    with (
        listener(kind) as port,
        pytest.raises(PacelineError, match=f"listens at 127.0.0.1:{port}, but .* not answered as Ray's GCS") as error,
        ray_session(address=f"127.0.0.1:{port}", connect_timeout_s=1.0),
    ):
        pass
    assert "6379 unless ray start --port" in str(error.value.remedy)


class Started(BaseException):
    """Ray was asked to start."""


def started(**arguments: object) -> None:
    raise Started


def starts_of(error: Exception, monkeypatch: pytest.MonkeyPatch, root: Path) -> tuple[int, PacelineError]:
    """How often a head is started that always fails with `error`, and what is said."""
    starts = []

    def init(**arguments: object) -> None:
        starts.append(arguments)
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(PacelineError) as told:
        ray_sessions._start_head({}, root)
    return len(starts), told.value


def test_a_path_too_long_for_rays_sockets_is_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/tmp/" + "x" * 90 + "/ray")
    with pytest.raises(OSError, match="AF_UNIX") as error:
        validate_socket_filepath(f"{root}/session/sockets/raylet")
    starts, told = starts_of(error.value, monkeypatch, root)
    assert starts == 1
    over = len(f"{root}/session/sockets/raylet") - 107
    assert f"{root} is too long by {over} bytes" in str(told.remedy)
    assert "RAY_TMPDIR" in str(told.remedy)


@pytest.mark.parametrize(("limit_gib", "enough"), [(3, False), (8, False), (64, True), (None, True)])
def test_too_few_addresses_are_named_before_ray_is_started(
    limit_gib: int | None, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3 GiB the raylet died, with 8 GiB beside an object store of 7 GiB ray.init never returned."""
    limit = resource.RLIM_INFINITY if limit_gib is None else limit_gib * 2**30
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(Started if enough else PacelineError, match=r"^$" if enough else r"ulimit -v"),
        ray_session(object_store_bytes=7 * 2**30),
    ):
        pass


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
        with pytest.raises(PacelineError, match="did not start, twice: The current node timed out") as error:
            ray_sessions._start_head({}, tmp_path)
        assert "see the newest logs" in str(error.value.remedy)
    assert calls == ["local"] * starts


def test_whatever_ray_raises_when_attaching_is_an_expected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**arguments: object) -> None:
        raise Exception("Can't find a node_ip_address.json file")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_sessions, "check_reachable", lambda address, timeout_s: None)
    with pytest.raises(PacelineError, match="Ray at 'h:1' cannot be used"), ray_session(address="h:1"):
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
def test_private_head_keeps_token_authentication_is_quiet_and_lowers_no_priority(tmp_path: Path) -> None:
    script = (
        "import os, ray\n"
        "from launch.cluster.session import ray_session\n"
        "with ray_session(cpus=3) as session:\n"
        "    assert ray.cluster_resources()['CPU'] >= 3\n"
        "    print(session.owned, os.environ['RAY_AUTH_MODE'], len(os.environ['RAY_AUTH_TOKEN']))\n"
        "    print(ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))\n"
        "assert not ray.is_initialized()\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True token 64\n0\n"  # Ray's own 15 would leave engines no place before the spot trainer
    assert done.stderr == ""
    assert not (tmp_path / ".ray").exists()  # the token is in the environment only
