"""Announce to Ray that this machine is about to go, and wait for its rollout workers: `python -m launch.cluster.leave`.

For hooks that run on the machine itself before it ends (KubeRay's preStop, a cloud's shutdown script), where no
metadata service announces the end. Ray then counts the node as draining. Runs see that (launch/fleet/feed.py) and let
their rollout workers leave with all tokens. Owns the choice of the node, the announcement and the wait. It ends no
process. If a machine hosts several nodes, it takes only those that are named: others may belong to other people's
clusters, and Ray takes no drain back.
"""

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's protocol
_LOOK_S = 0.2
_WORKER = "ray::RolloutWorker"  # title that Ray gives the process of such an actor


@dataclass(frozen=True, slots=True)
class Raylet:
    """The process of a Ray node on this machine."""

    node_id: str
    gcs: str  # host:port
    pid: int
    head: bool = False

    def drain(self, within_s: float) -> str | None:
        """Announce to Ray that the node leaves. Returns Ray's reason if it refuses."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        deadline_ms = time.time_ns() // 1_000_000 + int(within_s * 1000)
        accepted, why = GcsClient(address=self.gcs).drain_node(
            self.node_id, _PREEMPTION, f"{socket.gethostname()} is about to end", deadline_ms
        )
        return None if accepted else str(why)

    def has_workers(self) -> bool:
        """Whether a rollout worker of the node still runs."""
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children()
            return any("".join(child.cmdline()[:1]).startswith(_WORKER) for child in children)
        return False


class UnclearNodeError(ValueError):
    """It is not clear which node is meant."""


def raylets() -> Iterator[Raylet]:
    """Yield this user's raylets on this machine."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() != "raylet" or process.uids().real != os.getuid():
                continue
            command = process.cmdline()
            options = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
            if "--node_id" in options and "--gcs-address" in options:
                yield Raylet(options["--node_id"], options["--gcs-address"], process.pid, "--head" in command)


def _same_server(one: str, other: str) -> bool:
    """Whether two host:port name one server, by name or by address."""

    def addresses(server: str) -> set[object]:
        host, _, port = server.rpartition(":")
        with suppress(OSError):
            return {found[4] for found in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)}
        return set()

    return one == other or bool(addresses(one) & addresses(other))


def chosen(here: Iterable[Raylet], *, address: str = "", node: str = "", every: bool = False) -> list[Raylet]:
    """Return the raylets that are meant. Never a head, which would end the cluster.

    address: of the cluster (RAY_ADDRESS; a value that names no server, such as "auto", is ignored). node: the beginning
    of an id. Raises UnclearNodeError if there are several and `every` is false, or none matches."""
    nodes = [raylet for raylet in here if not raylet.head]
    found = [raylet for raylet in nodes if raylet.node_id.startswith(node)]
    if named := ":" in address and "://" not in address:
        found = [raylet for raylet in found if _same_server(raylet.gcs, address)]
    listed = ", ".join(f"{raylet.node_id} of {raylet.gcs}" for raylet in found or nodes)
    if not found and nodes and (node or named):
        asked = " and ".join([f"--node {node}"] * bool(node) + [f"RAY_ADDRESS {address}"] * named)
        raise UnclearNodeError(f"no node here is that of {asked}; there are: {listed}")
    if len(found) > 1 and not every:
        raise UnclearNodeError(f"{len(found)} nodes run here ({listed}): name one with --node ID, or say --all")
    return found


def leave(within_s: float, here: Sequence[Raylet]) -> bool:
    """Return whether every rollout worker of these nodes had left in time. Without a node there is nothing
    to wait for."""
    deadline_s = time.monotonic() + within_s
    for raylet in here:
        try:
            refused = raylet.drain(within_s)
        except Exception as error:  # the head is gone; Ray raises any exception here
            refused = str(error)
        if refused is not None:
            print(f"Ray was not told that node {raylet.node_id[:8]} will end: {refused}")
    while left := [raylet for raylet in here if raylet.has_workers()]:
        if time.monotonic() >= deadline_s:
            print(f"{len(left)} nodes still have rollout workers after {within_s:g} s")
            return False
        time.sleep(_LOOK_S)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.cluster.leave", description=__doc__)
    parser.add_argument("--within", type=_seconds, default=10.0, metavar="S", help="seconds to wait for the workers")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--node", default="", metavar="ID", help="of the node, or its beginning; default: the only one")
    which.add_argument("--all", action="store_true", help="every node here (of RAY_ADDRESS, if it is set), but a head")
    asked = parser.parse_args(arguments)
    try:
        here = chosen(raylets(), address=os.environ.get("RAY_ADDRESS", ""), node=asked.node, every=asked.all)
    except UnclearNodeError as error:
        parser.error(str(error))
    sys.exit(0 if leave(asked.within, here) else 1)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait: give 0 or more seconds")
    return seconds


if __name__ == "__main__":
    main()
