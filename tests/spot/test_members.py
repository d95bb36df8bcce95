"""Who sums with whom: threads of this process as members, each with a trainer of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from actors.spot import members as members_module
from actors.spot import rendezvous
from actors.spot.groups import Transport
from actors.spot.members import BrokenGroupError, Members, fingerprint
from contracts.records import SequenceRecord
from contracts.spot import TrainSession
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer, MicroStepResult
from models.checkpoint import load_model
from tests.spot.support import options_of, record, save_target

CPU = torch.device("cpu")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a name server takes 5 s for a connection now and then: longer than members are waited for."""
    monkeypatch.setattr(rendezvous, "COME_S", 20.0)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> TargetHead:
    return TargetHead.of(load_model(save_target(tmp_path_factory.mktemp("target"))), 0)


class Counting(DrafterTrainer):
    """Counts the states that it took from others."""

    loads = 0

    def load_state_dict(self, state: Any, **options: Any) -> None:
        self.loads += 1
        super().load_state_dict(state, **options)


class Member:
    """A trainer and its place among others, as in the child's loop."""

    def __init__(self, name: str, head: TargetHead, seed: int = 0, host: str = "127.0.0.1") -> None:
        self.name, self.trainer = name, Counting(head, options_of(), seed=seed)
        self.stop = threading.Event()
        self.members = Members(host, Transport(CPU), self.stop)

    @property
    def loads(self) -> int:
        return self.trainer.loads

    def enter(self, session: int, epoch: int, members: str, store: str = "") -> str:
        return self.members.enter(TrainSession(session, epoch, tuple(members), members.index(self.name), store))

    def gather(self, within_s: float = 30.0, count: int | None = None) -> bool:
        """Until the members have come (`count` of them)."""
        trainer, deadline_s = self.trainer, time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            came = self.members.gather(trainer)
            if came and count in (None, self.members.count):
                return True
            time.sleep(0.002)
        return False

    def step(self, *records: SequenceRecord) -> MicroStepResult:
        return self.trainer.micro_step(records, reduce=self.members.reduce if self.members.count > 1 else None)

    def fingerprint(self) -> int:
        return fingerprint(self.trainer.state_dict())


def together(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30.0) for future in [pool.submit(call) for call in calls]]


def group(head: TargetHead, names: str, epoch: int = 1) -> list[Member]:
    """Members of one group, each with other weights at first."""
    found = [Member(name, head, seed) for seed, name in enumerate(names)]
    store = found[0].enter(1, epoch, names)
    for member in found[1:]:
        member.enter(1, epoch, names, store)
    assert all(together(*(member.gather for member in found)))
    return found


def test_gradients_are_averaged_by_supervised_positions(head: TargetHead) -> None:
    """Three members with unequal shares, one of them without any, update as one trainer with all records would."""
    a, b, c = group(head, "abc")
    alone = DrafterTrainer(head, options_of(), seed=0)
    for seed in range(0, 40, 4):
        shares = [[record(seed, 50), record(seed + 1, 9)], [record(seed + 2, 20)], []]
        results = together(*(lambda m=m, s=s: m.step(*s) for m, s in zip((a, b, c), shares, strict=True)))
        expected = alone.micro_step([r for share in shares for r in share])
        assert [result.positions for result in results] == [57, 19, 0]
        weighted = sum(r.loss * r.positions for r in results[:2]) / 76
        assert weighted == pytest.approx(expected.loss, rel=1e-5)
        assert a.fingerprint() == b.fingerprint() == c.fingerprint()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(a.trainer.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)


def test_who_joins_takes_the_leaders_weights_and_optimizer(head: TargetHead) -> None:
    a, b = Member("a", head), Member("b", head, seed=1)
    a.enter(1, 1, "a")
    assert a.gather()
    for seed in range(5):
        a.step(record(seed))
    before = a.fingerprint()
    store = a.enter(1, 2, "ab")
    assert a.gather()
    assert a.members.count == 1, "the leader goes on until the others have come"
    b.enter(1, 2, "ab", store)
    assert together(lambda: a.gather(count=2), b.gather) == [True, True]
    assert (a.fingerprint(), b.fingerprint()) == (before, before)
    assert (b.trainer.steps, a.loads, b.loads) == (5, 0, 1)
    together(lambda: a.step(record(8)), lambda: b.step(record(9)))
    assert a.fingerprint() == b.fingerprint() != before


def test_members_with_equal_state_send_none(head: TargetHead) -> None:
    a, b = Member("a", head), Member("b", head)
    store = a.enter(1, 1, "ab")
    b.enter(1, 1, "ab", store)
    assert all(together(a.gather, b.gather))
    assert a.loads + b.loads == 0


def test_a_third_joins_at_a_boundary_that_all_reach(head: TargetHead) -> None:
    a, b = group(head, "ab")
    c = Member("c", head, seed=7)
    store = a.enter(1, 2, "abc")
    b.enter(1, 2, "abc", store)
    together(lambda: a.step(record(0)), lambda: b.step(record(1)))
    assert all(together(a.gather, b.gather))
    assert a.members.count == 2, "c has not come"
    c.enter(1, 2, "abc", store)
    assert not c.gather(0.1)
    together(lambda: a.step(record(2)), lambda: b.step(record(3)))
    assert all(together(a.gather, b.gather, c.gather))
    assert [m.members.count for m in (a, b, c)] == [3, 3, 3]
    assert (c.trainer.steps, c.loads, b.loads) == (2, 1, 1)
    assert a.fingerprint() == b.fingerprint() == c.fingerprint()


def test_a_member_that_leaves_is_known_after_its_last_micro_step(head: TargetHead) -> None:
    a, b, c = group(head, "abc")
    c.stop.set()
    assert all(r.updated for r in together(*(lambda m=m: m.step(record(0)) for m in (a, b, c))))
    c.members.leave()
    store = a.enter(1, 2, "ab")
    b.enter(1, 2, "ab", store)
    assert all(together(a.gather, b.gather))
    assert [m.members.count for m in (a, b)] == [2, 2]
    together(lambda: a.step(record(2)), lambda: b.step(record(3)))
    assert a.trainer.steps == b.trainer.steps == 2
    assert a.fingerprint() == b.fingerprint()


def test_a_member_that_goes_without_a_word_costs_one_micro_step(head: TargetHead) -> None:
    a, b, c = group(head, "abc")
    together(*(lambda m=m: m.step(record(0)) for m in (a, b, c)))
    before = a.fingerprint()
    c.members.leave()

    def broken(member: Member) -> bool:
        with pytest.raises(BrokenGroupError):
            member.step(record(1))
        return member.fingerprint() == before

    assert together(lambda: broken(a), lambda: broken(b)) == [True, True]
    assert not b.gather(0.1)
    store = a.enter(1, 2, "ab")
    b.enter(1, 2, "ab", store)
    assert all(together(a.gather, b.gather))
    assert a.loads + b.loads == 1  # of `group`: nothing had to be sent again
    together(lambda: a.step(record(2)), lambda: b.step(record(3)))
    assert a.trainer.steps == b.trainer.steps == 2


def test_a_lost_leader_is_replaced_by_another_replica(head: TargetHead) -> None:
    a, b, c = group(head, "abc")
    together(*(lambda m=m: m.step(record(0)) for m in (a, b, c)))
    a.members.leave()
    store = b.enter(1, 2, "bc")
    c.enter(1, 2, "bc", store)

    def drops(member: Member) -> bool:
        with pytest.raises(BrokenGroupError):
            member.step(record(1))
        return member.gather()

    assert all(together(lambda: drops(b), lambda: drops(c)))
    together(lambda: b.step(record(2)), lambda: c.step(record(3)))
    assert b.trainer.steps == c.trainer.steps == 2
    assert b.fingerprint() == c.fingerprint()


def test_a_leader_that_is_told_nothing_goes_on_alone(head: TargetHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "ALONE_S", 0.1)
    a, b = group(head, "ab")
    b.members.leave()
    with pytest.raises(BrokenGroupError):
        a.step(record(0))
    assert a.gather(1.0)
    assert a.members.count == 1
    assert a.members.settled
    assert a.step(record(0)).updated
    store = a.enter(1, 2, "ab")
    b.enter(1, 2, "ab", store)
    assert together(lambda: a.gather(count=2), b.gather) == [True, True]
    assert b.fingerprint() == a.fingerprint()


def test_a_leader_trains_while_nobody_comes(head: TargetHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "ALONE_S", 0.1)
    a = Member("a", head)
    a.enter(1, 1, "ab")
    assert a.gather(2.0)
    assert a.members.count == 1
    assert a.step(record(0)).updated


def test_members_have_addresses_of_their_own(head: TargetHead) -> None:
    """As on two nodes: each is reached at its own, and nowhere else."""
    a, b = Member("a", head, host="127.0.0.2"), Member("b", head, seed=1, host="127.0.0.3")
    store = a.enter(1, 1, "ab")
    assert store.startswith("127.0.0.2:")
    b.enter(1, 1, "ab", store)
    assert all(together(a.gather, b.gather))
    together(lambda: a.step(record(0)), lambda: b.step(record(1)))
    assert a.fingerprint() == b.fingerprint()


@pytest.fixture
def soon(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "COME_S", 0.2)
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("absent", "bc")
def test_one_that_does_not_come_keeps_nobody_out(head: TargetHead, absent: str) -> None:
    names = "abcd".replace(absent, "")
    members = [Member(name, head, seed) for seed, name in enumerate(names)]
    store = members[0].enter(1, 1, "abcd")
    for member in members[1:]:
        member.enter(1, 1, "abcd", store)
    assert all(together(*(lambda m=m: m.gather(count=3) for m in members)))
    assert [m.members.session.rank for m in members] == [0, 1, 2]  # type: ignore[union-attr]
    together(*(lambda m=m, seed=seed: m.step(record(seed)) for seed, m in enumerate(members)))
    assert len({member.fingerprint() for member in members}) == 1

    late = Member(absent, head, seed=9)
    late.enter(1, 1, "abcd", store)
    assert not late.gather(0.3)
    assert "leads" in late.members.missing
    assert all(m.members.settled for m in members)
    everyone = [*members, late]  # by a newer epoch it belongs
    for member in everyone:
        member.enter(1, 2, "abcd", store)
    assert not late.gather(0.05)  # it waits for their next boundary
    together(*(lambda m=m: m.step(record(5)) for m in members))
    assert all(together(*(lambda m=m: m.gather(count=4) for m in everyone)))
    assert len({member.fingerprint() for member in everyone}) == 1


@pytest.mark.usefixtures("soon")
def test_a_group_at_work_takes_in_those_who_come_of_several_that_join(head: TargetHead) -> None:
    """c never comes. Nobody waits for it, and d need not either."""
    a, b = group(head, "ab")
    store = a.enter(1, 2, "abcd")
    b.enter(1, 2, "abcd", store)
    d = Member("d", head, seed=7)
    d.enter(1, 2, "abcd", store)

    def work(member: Member) -> None:
        for seed in range(10_000):
            member.step(record(seed % 50))
            assert member.gather(20.0)
            if member.members.count == 3:
                return
            time.sleep(0.005)

    together(lambda: work(a), lambda: work(b), lambda: d.gather(20.0, count=3))
    assert a.fingerprint() == b.fingerprint() == d.fingerprint()


def test_a_collective_is_given_up_soon_when_wanted_elsewhere(head: TargetHead) -> None:
    """b never comes to the collective. The next group of the same members forms at once."""
    a, b = group(head, "ab")
    timer = threading.Timer(0.1, a.stop.set)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(BrokenGroupError, match="called back while the others are late"):
        a.step(record(0))
    assert time.monotonic() - start_s < 5.0
    timer.join()
    a.members.leave()
    a.stop.clear()
    b.members.part()
    store = a.enter(2, 2, "ab")
    b.enter(2, 2, "ab", store)
    assert all(together(a.gather, b.gather))


def test_a_store_that_nobody_serves_is_no_end(head: TargetHead) -> None:
    b = Member("b", head)
    b.enter(1, 1, "ab", "127.0.0.1:9")
    start_s = time.monotonic()
    assert not b.gather(0.2)
    assert time.monotonic() - start_s < 3.0
    b.members.leave()
    assert b.members.session is None


def test_a_fingerprint_tells_states_apart() -> None:
    state = {"a": torch.randn(5, 3), "b": torch.tensor(3.0), "c": torch.tensor([1, 2])}
    same = {name: tensor.clone() for name, tensor in reversed(state.items())}
    assert fingerprint(state) == fingerprint(same)
    for name in state:
        other = dict(same)
        other[name] = same[name] + (1 if name == "c" else 1e-6)
        assert fingerprint(other) != fingerprint(state)
