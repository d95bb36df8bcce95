"""A Ray cluster of several nodes on this machine: real raylets with pretended resources, which join, drain and die.

    with Nodes(folder) as nodes:                           # a short path: it holds Unix sockets
        nodes.add("spot-0", cpus=2, gpus=1, resources={"rollout": 1})
        job = subprocess.Popen([..., "-m", "launch", "train", ...], env=nodes.environment())
        nodes.kill("spot-0")
    assert not nodes.left, nodes.left

Owns the head, the nodes by name, and finding out what is left of them all afterwards: processes and segments of shared
memory. It runs no job and connects no driver. A driver that attaches is on the head's node, and goes with its raylet.
Ray finds a lost node within 2 s here (its default is minutes). Nodes end with the thread that started them.
"""

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster

from launch.cluster.processes import processes_below

HEALTH = {  # a raylet that is gone refuses at once; one that waits long for its turn on a busy machine is not gone
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 3,
}
MARK = "PACELINE_NODES"  # in the environment of all that descends from nodes or was given `environment`
STORE_BYTES = 128 * 2**20
END_S = 15.0
_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's protocol
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Left:
    """What should have gone. False: nothing."""

    processes: tuple[str, ...]
    segments: tuple[str, ...]  # of shared memory, that no process has open

    def __bool__(self) -> bool:
        return bool(self.processes or self.segments)


class Nodes:
    """`left` is filled in at the end of the `with` block."""

    def __init__(
        self,
        folder: Path,
        *,
        cpus: int = 4,
        resources: Mapping[str, float] = {},
        store_bytes: int = STORE_BYTES,
        settings: Mapping[str, Any] = {},
        port: int | None = None,
    ) -> None:
        """The head: it has `cpus` and no GPU. `store_bytes`: of every node's object store. `settings`: of Ray's system,
        beside HEALTH. `port`: of the GCS; None: one that is free, which a restarted head keeps."""
        self.folder, self._store_bytes, self._port = folder, store_bytes, port
        self._head = {"num_cpus": cpus, "resources": dict(resources)}
        self._settings = HEALTH | dict(settings)
        self._mark = secrets.token_hex(8)
        self._segments = set(_segments())
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}
        self._specs: dict[str, dict[str, Any]] = {}
        self.left = Left((), ())

    def __enter__(self) -> Self:
        (self.folder / "ray").mkdir(parents=True, exist_ok=True)
        if os.environ.get("RAY_AUTH_MODE") is None:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._start_head()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def address(self) -> str:
        """host:port of the GCS; the same after a restart of the head."""
        return str(self._cluster.address)

    def environment(self) -> dict[str, str]:
        """For a driver: this process's, with the cluster's address and what it is recognised by in `left`."""
        return {**self.marked(), "RAY_ADDRESS": self.address, "RAY_TMPDIR": str(self.folder)}

    def marked(self) -> dict[str, str]:
        """For any process that must not outlive the nodes."""
        return {**os.environ, MARK: self._mark}

    def add(self, name: str, *, cpus: int = 2, gpus: int = 0, resources: Mapping[str, float] = {}) -> str:
        """A node joins; its id (hex), when Ray knows it."""
        self._specs[name] = {"num_cpus": cpus, "num_gpus": gpus, "resources": dict(resources)}
        return self._join(name)

    def id(self, name: str) -> str:
        """Hex, as ray.nodes() has it."""
        return str(self._nodes[name].node_id)

    @property
    def names(self) -> list[str]:
        """Of the nodes that are up, without the head."""
        return list(self._nodes)

    def raylet(self, name: str) -> psutil.Process:
        return psutil.Process(self._nodes[name].all_processes["raylet"][0].process.pid)

    def actors(self, name: str) -> list[tuple[str, int]]:
        """Titles, as Ray writes them (ray::LearnerRank.begin), and process ids of the actors on the node."""
        found = []
        for process in self.raylet(name).children():
            with suppress(psutil.Error):
                found += [(title, process.pid) for title in process.cmdline()[:1] if title.startswith("ray::")]
        return found

    def kill(self, name: str, *, at_once: bool = True) -> None:
        """The node is lost: SIGKILL to its raylet. `at_once`: and to all that descends from it, as when a machine goes;
        else they end as Ray and they themselves see to it."""
        _kill(self.raylet(name), descendants=at_once)
        self._forget(name, graceful=False)

    def end_node(self, name: str) -> None:
        """The node is shut down in order: its raylet says goodbye."""
        self._forget(name, graceful=True)

    def drain(self, name: str, deadline_s: float = 120.0, message: str = "spot interruption") -> None:
        """As a cloud's notice would: nothing new is placed there, and actors keep running. Ray itself kills nothing at
        the deadline. Raises RuntimeError if Ray refuses."""
        deadline_ms = time.time_ns() // 1_000_000 + int(deadline_s * 1000)
        client = GcsClient(address=self.address)
        accepted, why = client.drain_node(self.id(name), _PREEMPTION, message, deadline_ms)
        if not accepted:
            raise RuntimeError(f"Ray does not drain {name}: {why}")

    def kill_head(self) -> None:
        """The head's machine is lost: GCS, raylet, all that runs on it. The other nodes go on for as long as Ray lets
        them; their actors have lost their owner if the driver was there."""
        for name in ("raylet", "gcs_server"):
            for info in self._cluster.head_node.all_processes.get(name, []):
                with suppress(psutil.Error):
                    _kill(psutil.Process(info.process.pid), descendants=True)
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def restart_head(self) -> None:
        """A new head at the old address, and the nodes join it anew, as KubeRay does it or `ray up`: a GCS without a
        store of its own (Redis) knows nothing of what was, and nodes of the one before it end."""
        if self._cluster.head_node is not None:
            self.kill_head()
        names = list(self._nodes)
        for name in names:
            self.kill(name)
        self._start_head()
        for name in names:
            self._join(name)

    def processes(self) -> list[psutil.Process]:
        """All that runs of this cluster and of drivers with its environment; not this process."""
        found = {pid for pid in processes_below(self.folder) if pid != os.getpid()}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self._mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    found.add(int(path.name))
        alive = []
        for pid in sorted(found - {os.getpid()}):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def end(self) -> Left:
        """End every node, wait for what takes its time to go, and kill and report the rest. Twice is fine."""
        if self._cluster is None:
            return self.left
        for name in list(self._nodes):
            self._forget(name, graceful=True)
        if self._cluster.head_node is not None:
            self._cluster.remove_node(self._cluster.head_node)
        self._cluster = None
        self.left = self.find_left()
        return self.left

    def find_left(self) -> Left:
        """What is still there when END_S are over. Processes are killed then."""
        deadline_s = time.monotonic() + END_S
        while (remaining := self.processes()) and time.monotonic() < deadline_s:
            psutil.wait_procs(remaining, timeout=0.2)
        told = []
        for process in remaining:
            with suppress(psutil.Error):
                told.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
                process.kill()
        psutil.wait_procs(remaining, timeout=END_S)
        return Left(tuple(told), tuple(_unused(set(_segments()) - self._segments)))

    def _start_head(self) -> None:
        (self.folder / "ray/ray_current_cluster").unlink(missing_ok=True)  # Ray would talk about it
        arguments = {
            **self._head,
            "include_dashboard": False,
            "object_store_memory": self._store_bytes,
            "_system_config": self._settings,
        }
        if self._port is not None:
            arguments["gcs_server_port"] = self._port
        with self._as_ours():
            self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self._port = int(self.address.rpartition(":")[2])

    def _join(self, name: str) -> str:
        with self._as_ours():
            self._nodes[name] = self._cluster.add_node(object_store_memory=self._store_bytes, **self._specs[name])
        return self.id(name)

    def _forget(self, name: str, *, graceful: bool) -> None:
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=graceful)

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """What is started inside has our mark and folder; Ray's own SIGTERM handler for this process is undone."""
        ours = {MARK: self._mark, "RAY_TMPDIR": str(self.folder)}
        before, handler = {key: os.environ.get(key) for key in ours}, signal.getsignal(signal.SIGTERM)
        os.environ.update(ours)
        try:
            yield
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
            signal.signal(signal.SIGTERM, handler)


def _kill(process: psutil.Process, *, descendants: bool) -> None:
    victims = [process, *(process.children(recursive=True) if descendants else [])]
    for victim in victims:
        with suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)


def _segments() -> Iterator[tuple[str, int]]:
    """Name and inode of everything in shared memory that has a name."""
    with suppress(OSError):
        for entry in os.scandir(_SHM):
            with suppress(OSError):
                yield entry.name, entry.inode()


def _unused(found: set[tuple[str, int]]) -> list[str]:
    """Those that no process has open or mapped, and that are still there."""
    used: set[str] = set()
    for path in Path("/proc").glob("[0-9]*") if found else ():
        with suppress(OSError):
            used.update(line.split(maxsplit=5)[-1] for line in (path / "maps").read_text().splitlines())
            used.update(str(link.readlink()) for link in (path / "fd").iterdir())
    return sorted(name for name, _ in found & set(_segments()) if str(_SHM / name) not in used)
