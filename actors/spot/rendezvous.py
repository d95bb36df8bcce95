"""Rendezvous of an epoch's members: through the leader's TCPStore, then in a process group of their own.

Nothing here blocks: a waiting member may have to stop at any moment. The leader leaves out members that have not
arrived after `COME_S`, so that an unreachable one does not keep others from training.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from actors.spot.groups import TrainerGroup, Transport, connect
from contracts.spot import TrainSession

LIMIT_S = 10.0  # for rendezvous and collectives
COME_S = 4.0  # for all members; then those present start
_QUIET_S = 1.0  # without a new arrival: the members of an ending group need a moment
_CONNECT_S = 0.5


def open_store(host: str) -> Any:
    """Return a leader's rendezvous store on a free port (`.port`)."""
    timeout = timedelta(seconds=LIMIT_S)
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


class Rendezvous:
    """Arrival of the members of a session's epoch."""

    def __init__(self, session: TrainSession, own_store: Any) -> None:
        """`own_store`: the leader's, at the leader."""
        self.session = session
        self._rank = session.rank  # in the commanded members
        self._leads = session.rank == 0
        self._prefix = f"{session.session}/{session.epoch}"
        self._client: Any = own_store if self._leads else None
        self._said = False
        self._since_s = time.monotonic()
        self._seen: tuple[frozenset[int], float] = frozenset(), self._since_s  # late ranks, time of the last arrival
        self.left_out = False  # the others started without this member
        self._found: TrainerGroup | RuntimeError | None = None
        self._given_up = False

    def complete(self) -> bool:
        """Return whether all have arrived, or all that will: `session` has them. The leader sees them; the others read
        its decision."""
        if not self._leads:
            return self._try(self._read)
        ranks: Sequence[int] = range(len(self.session.members))
        if not self.here(ranks):
            come = self._late(ranks) if self.overdue else frozenset()
            if len(come) < 2 or time.monotonic() - self._seen[1] < _QUIET_S:
                return False
            ranks = sorted(come)
        self._client.set(f"{self._prefix}/go", ",".join(map(str, ranks)))
        self._begin_with(ranks)
        return True

    @property
    def overdue(self) -> bool:
        """Whether missing members need not be awaited any longer."""
        return time.monotonic() - self._since_s > COME_S

    def here(self, ranks: Sequence[int]) -> bool:
        """Return whether these have arrived."""
        return self._try(lambda: self._client.check([self._here(rank) for rank in ranks]))

    def _late(self, ranks: Sequence[int]) -> frozenset[int]:
        come = frozenset(rank for rank in ranks if self.here([rank]))
        if come != self._seen[0]:
            self._seen = come, time.monotonic()
        return come

    def _read(self) -> bool:
        """Read the leader's decision."""
        if not self._client.check([f"{self._prefix}/go"]):
            return False
        ranks = [int(rank) for rank in self._client.get(f"{self._prefix}/go").split(b",")]
        self.left_out = self.session.rank not in ranks
        if self.left_out:
            return False
        self._begin_with(ranks)
        return True

    def _begin_with(self, ranks: Sequence[int]) -> None:
        session = self.session
        if len(ranks) < len(session.members):
            members = tuple(session.members[rank] for rank in ranks)
            self.session = replace(session, members=members, rank=ranks.index(session.rank))

    def give_up(self) -> None:
        """Abandon the group: if it is still made, it is ended."""
        self._given_up = True
        if isinstance(self._found, TrainerGroup):
            self._found.end(broken=True)

    def withdraw(self) -> None:
        """Withdraw this member's arrival."""
        if self._said:
            with suppress(RuntimeError):
                self._client.delete_key(self._here(self._rank))

    def group(self, transport: Transport, host: str) -> Callable[[], TrainerGroup | None]:
        """Start making the process group, as all members must now. The returned function gives None until it is made,
        and raises RuntimeError if that failed."""

        def make() -> None:
            try:
                client = self._client
                if transport.apart:
                    # A separate client: NCCL waits in it for a lost member, and the next epoch must not.
                    client = _connect(f"{host}:{client.port}" if self._leads else self.session.store)
                store = dist.PrefixStore(self._prefix, client)  # type: ignore[attr-defined]
                made = connect(store, self.session, transport, host, LIMIT_S)
                self._found = made
                if self._given_up:
                    made.end(broken=True)
            except (RuntimeError, OSError) as error:
                self._found = RuntimeError(str(error))

        def result() -> TrainerGroup | None:
            if isinstance(self._found, RuntimeError):
                raise self._found
            return self._found

        threading.Thread(target=make, name="group", daemon=True).start()
        return result

    def _try(self, check: Callable[[], bool]) -> bool:
        """Register this member, and run the check."""
        try:
            if self._client is None:
                self._client = _connect(self.session.store)
            if not self._said:
                self._client.set(self._here(self._rank), "")
                self._said = True
            return bool(check())
        except (RuntimeError, OSError):  # the leader is not there yet, or has gone
            if not self._leads:
                self._client, self._said = None, False
            return False

    def _here(self, rank: int) -> str:
        return f"{self._prefix}/here/{rank}"


def _connect(address: str) -> Any:
    """Connect to a store. Raises OSError at once if nobody listens; torch's store would retry until its timeout."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    timeout = timedelta(seconds=LIMIT_S)
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
