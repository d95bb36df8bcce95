"""Members on devices, over a pretended NCCL that does what the real one does when a member is lost: it hangs, until it
is aborted or a watchdog would end the process."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actors.spot import groups
from actors.spot import members as members_module
from actors.spot.groups import Transport
from actors.spot.members import BrokenGroupError
from drafter.training.head import TargetHead
from models import nccl
from models.checkpoint import load_model
from tests.spot.support import record, save_target
from tests.spot.test_members import CPU, Member, together

LIMIT_S = 10.0  # a machine without a name server takes 5 s for a new connection now and then
Hook = Callable[[int], None]  # of the rank that comes to a place


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> TargetHead:
    return TargetHead.of(load_model(save_target(tmp_path_factory.mktemp("target"))), 0)


ELSEWHERE = [("connect", 2), ("hosts", 0), ("hosts", 2), ("sum", 0)]


class Lost(BaseException):
    """The member's process is killed here."""


class PretendedWork:
    def __init__(self, group: "PretendedNccl", inner: Any) -> None:
        self._group, self._inner, self._since_s = group, inner, time.monotonic()

    def is_completed(self) -> bool:
        if self._group.aborted.is_set():
            return True
        if self._inner.is_completed():
            try:
                self._inner.wait(timedelta(seconds=0.01))
            except RuntimeError:
                pass  # a peer is gone: the kernel spins for ever
            else:
                return True
        if time.monotonic() - self._since_s > self._group.timeout_s + 1.0:
            self._group.world.ended.append(self._group.rank)
        return False

    def wait(self, timeout: timedelta) -> bool:
        if self._group.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        return True


class PretendedNccl:
    """`ProcessGroupNCCL`, as far as members use it, on CPU tensors."""

    def __init__(self, world: "World", store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.world, self.rank, self.timeout_s, self.aborted = world, rank, timeout_s, threading.Event()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=2 * LIMIT_S)
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def allreduce(self, tensors: list[torch.Tensor]) -> PretendedWork:
        self.world.reach("sum", self.rank)
        return PretendedWork(self, self._inner.allreduce(tensors))

    def broadcast(self, tensor: torch.Tensor, root: int) -> PretendedWork:
        self.world.reach("state", self.rank)
        return PretendedWork(self, self._inner.broadcast(tensor, root))

    def abort(self) -> None:
        self.aborted.set()


class World:
    """Every pretended communicator, and who is killed where."""

    def __init__(self) -> None:
        self.made: list[PretendedNccl] = []
        self.ended: list[int] = []  # ranks whose process a watchdog would have ended
        self.killed: tuple[str, int] | None = None  # a place, and the rank that is lost there
        self.refused = False

    def reach(self, place: str, rank: int) -> None:
        if self.killed == (place, rank):
            self.killed = None
            raise RuntimeError("killed") if place == "connect" else Lost  # in a thread of the member, or in its own

    def make(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> PretendedNccl:
        self.reach("connect", rank)
        if self.refused:
            raise RuntimeError("NCCL error: unhandled system error\nmore")
        group = PretendedNccl(self, store, rank, size, timeout_s)
        self.made.append(group)
        return group


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Members made by `member` have devices, between which a pretended NCCL sums."""
    found = World()
    monkeypatch.setattr(groups, "nccl_group", found.make)
    monkeypatch.setattr(members_module, "LIMIT_S", LIMIT_S)
    yield found
    assert found.ended == [], "a watchdog ended a process"


def member(name: str, head: TargetHead, seed: int = 0, *, has_nccl: bool = True) -> Member:
    found = Member(name, head, seed)
    transport = Transport(CPU)
    transport.apart, transport.nccl = True, has_nccl
    found.members._transport = transport
    return found


def enter(members: list[Member], epoch: int) -> None:
    names = "".join(m.name for m in members)
    store = members[0].enter(1, epoch, names)
    for m in members[1:]:
        m.enter(1, epoch, names, store)


def group(head: TargetHead, names: str) -> list[Member]:
    """Of equal state."""
    members = [member(name, head) for name in names]
    enter(members, 1)
    assert all(together(*(lambda m=m: m.gather(60.0) for m in members)))
    return members


def train(members: list[Member], first_seed: int) -> None:
    together(*(lambda m=m, s=s: m.step(record(s)) for s, m in enumerate(members, first_seed)))


def test_sums_between_devices_are_those_between_hosts(world: World, head: TargetHead) -> None:
    ours = group(head, "ab")
    theirs = [Member(name, head) for name in "ab"]
    enter(theirs, 1)
    assert all(together(*(lambda m=m: m.gather(60.0) for m in theirs)))
    for seed in (0, 2, 4):
        train(ours, seed)
        train(theirs, seed)
    assert {m.fingerprint() for m in ours} == {m.fingerprint() for m in theirs}
    assert len(world.made) == 2


def test_who_joins_gets_the_state_between_devices(world: World, head: TargetHead) -> None:
    a, b = member("a", head), member("b", head, seed=1)
    enter([a, b], 1)
    assert all(together(lambda: a.gather(60.0), lambda: b.gather(60.0)))
    assert (a.loads, b.loads) == (0, 1)
    train([a, b], 0)
    assert a.fingerprint() == b.fingerprint()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "lost"),  # each waits for LIMIT_S
    [("state", 0), ("sum", 2), *(pytest.param(*at, marks=pytest.mark.long) for at in ELSEWHERE)],
)
def test_survivors_go_on_wherever_a_member_is_lost(world: World, head: TargetHead, place: str, lost: int) -> None:
    members = [member(name, head, seed=9 if place == "state" and name == "b" else 0) for name in "abc"]
    if place in ("connect", "state"):
        world.killed = (place, lost)
    enter(members, 1)
    survivors = [m for i, m in enumerate(members) if i != lost]
    before = [m.fingerprint() for m in survivors]

    def gathers(m: Member) -> bool:
        try:
            return m.gather(60.0)
        except BrokenGroupError:
            return False
        except Lost:
            m.members.leave()
            return False

    formed = together(*(lambda m=m: gathers(m) for m in members))
    if place in ("connect", "state"):
        assert not any(formed)
        members[lost].members.leave()
    else:
        assert all(formed)
        train(members, 0)
        before = [m.fingerprint() for m in survivors]
        world.killed = ("sum", lost) if place == "sum" else None

        def drops(m: Member) -> bool:
            if m is members[lost]:
                if place == "sum":
                    with pytest.raises(Lost):
                        m.step(record(7))
                m.members.leave()
                return True
            with pytest.raises(BrokenGroupError):
                m.step(record(7))
            return True

        assert all(together(*(lambda m=m: drops(m) for m in members)))
    assert [m.fingerprint() for m in survivors] == before, "nothing changed"
    broken = list(world.made)
    enter(survivors, 2)
    assert all(together(*(lambda m=m: m.gather(60.0) for m in survivors)))
    train(survivors, 20)
    assert len({m.fingerprint() for m in survivors}) == 1
    assert survivors[0].trainer.steps == (1 if place in ("connect", "state") else 2)
    assert len(world.made) == len(broken) + 2, "a communicator of their own"
    for each in broken:
        assert each.aborted.wait(15.0), f"rank {each.rank} still hangs"


def test_an_ended_group_is_aborted_when_others_have_read_it(world: World, head: TargetHead) -> None:
    members = group(head, "ab")
    train(members, 0)
    start_s = time.monotonic()
    for m in members:
        m.members.leave()
    assert time.monotonic() - start_s < 0.9, "nobody waits for it"
    assert all(each.aborted.wait(10.0) for each in world.made)


def test_nccl_that_never_connects_is_given_up_for_the_hosts_network(
    world: World, head: TargetHead, caplog: pytest.LogCaptureFixture
) -> None:
    world.refused = True
    members = [member(name, head) for name in "ab"]
    with caplog.at_level(logging.WARNING):
        for epoch in (1, 2):
            enter(members, epoch)

            def fails(m: Member) -> bool:
                with pytest.raises(BrokenGroupError, match="unhandled system error"):
                    m.gather(60.0)
                return True

            assert all(together(*(lambda m=m: fails(m) for m in members)))
        assert [("drafter.collectives=gloo" in r.getMessage()) for r in caplog.records] == [True, True]
    enter(members, 3)
    assert all(together(*(lambda m=m: m.gather(60.0) for m in members)))
    train(members, 0)
    assert members[0].fingerprint() == members[1].fingerprint()


def test_one_member_without_nccl_takes_all_to_the_hosts_network(world: World, head: TargetHead) -> None:
    members = [member("a", head), member("b", head, seed=1, has_nccl=False)]
    enter(members, 1)
    assert all(together(*(lambda m=m: m.gather(60.0) for m in members)))
    train(members, 0)
    assert members[0].fingerprint() == members[1].fingerprint()
    assert not world.made


class Constructed:
    """What `ProcessGroupNCCL` is made with."""

    class Options:
        _timeout: timedelta

    made: "list[Constructed]" = []  # noqa: RUF012
    refuses = False

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.environment = dict(os.environ)
        self.timeout, self.aborted = options._timeout, threading.Event()
        self.connected: torch.device | None = None
        Constructed.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        if Constructed.refuses:
            raise RuntimeError("no route")
        self.connected = device

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_group_is_made_to_be_survived(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Constructed, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Constructed, "refuses", refuses)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    Constructed.made.clear()
    device = torch.device("cuda", 0)
    if refuses:
        with pytest.raises(RuntimeError, match="no route"):
            nccl.nccl_group(object(), 0, 2, device, 7.0)
    else:
        assert nccl.nccl_group(object(), 0, 2, device, 7.0) is Constructed.made[0]
        assert Constructed.made[0].connected == device, "not by the first collective, in the main thread"
    (made,) = Constructed.made
    assert made.aborted.wait(5.0 if refuses else 0.0) == refuses
    assert made.timeout == timedelta(seconds=7)
    assert made.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert made.environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "other groups of the process stay as they were"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_an_abort_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck:
        def abort(self) -> None:
            raise RuntimeError("ProcessGroup abort timed out")

    with caplog.at_level(logging.WARNING):
        assert nccl.abort_group(Stuck()).wait(5.0)
    assert "timed out" in caplog.text
