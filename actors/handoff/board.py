"""Keys in the learner's store, for coordination between sender and receivers of one hand-off, with bounded waits."""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contracts.handoff import HandOffError

_PAUSE_S = 0.005  # longest pause between two checks
_ASK_S = 0.2
_CONNECT_S = 30.0  # torch resolves names of addresses: without a name server, that alone takes five seconds

Excuse = Callable[[], str | None]  # returns a reason to stop waiting, or None


def no_excuse() -> str | None:
    return None


def now_and_then(excuse: Excuse) -> Excuse:
    """Call `excuse` at most every _ASK_S, because it costs a message."""
    asked_s = [time.monotonic()]

    def asked() -> str | None:
        if time.monotonic() - asked_s[0] < _ASK_S:
            return None
        asked_s[0] = time.monotonic()
        return excuse()

    return asked


class Board:
    """For one thread. Raises HandOffError if the store is gone or a wait times out."""

    def __init__(self, store: Any, name: str, limit_s: float) -> None:
        """`limit_s`: from now; bounds every wait."""
        self._store, self._name = store, name
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def say(self, key: str, value: object = "") -> None:
        try:
            self._store.set(self._key(key), json.dumps(value))
        except RuntimeError as error:
            raise HandOffError(f"the learner's store is gone: {_first_line(error)}") from error

    def said(self, *keys: str) -> bool:
        """Return whether all of these keys are set."""
        try:
            return bool(self._store.check([self._key(key) for key in keys]))
        except RuntimeError as error:
            raise HandOffError(f"the learner's store is gone: {_first_line(error)}") from error

    def read(self, key: str) -> Any:
        """Return the value of a key that is set."""
        try:
            return json.loads(self._store.get(self._key(key)))
        except RuntimeError as error:
            raise HandOffError(f"the learner's store is gone: {_first_line(error)}") from error

    def wait(self, keys: Sequence[str], what: str, limit_s: float, excuse: Excuse = no_excuse) -> None:
        """Wait until all of these keys are set. It polls: the store's own wait writes to stderr when it times out."""
        end_s = min(self._end_s, time.monotonic() + limit_s)
        pause_s = 0.0001
        while not self.said(*keys):
            if (reason := excuse()) is not None:
                raise HandOffError(reason)
            if time.monotonic() >= end_s:
                raise HandOffError(f"{what} did not come within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys that are no longer needed. Never raises."""
        for key in keys:
            try:
                self._store.delete_key(self._key(key))
            except RuntimeError:
                return

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"


def connect(address: str) -> Any:
    """Return a client of the store at host:port, for one thread at a time. Raises HandOffError at once if nobody
    listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=_CONNECT_S)
        )
    except (OSError, RuntimeError) as error:
        raise HandOffError(f"the learner's store at {address} is not reachable: {_first_line(error)}") from error


def own_address(store: str) -> str:
    """Return this machine's address on the network towards the store."""
    host, _, port = store.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def place_of(device: torch.device) -> str:
    """Return a text that is equal for processes that can share this device's memory: the GPU's identity, or the
    machine's."""
    if device.type == "cuda":
        found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if found is not None:
            return f"gpu {found}"
        return f"gpu {_machine()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index or 0}"
    return _machine()


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else uuid.getnode()}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
