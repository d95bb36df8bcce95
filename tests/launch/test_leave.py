"""A machine that says that it will end: Ray is told once of the node that is meant and of no other, and its rollout
workers are waited for, not longer than there is time. That a run then lets them leave is tests/fleet's."""

from dataclasses import dataclass, field

import pytest

from launch.cluster import leave as module
from launch.cluster.leave import Raylet, UnclearNodeError, chosen, leave, main

ONE, OTHER = Raylet("a" * 56, "10.0.0.1:6379", 1), Raylet("b" * 56, "10.0.0.1:6379", 2)
HEAD = Raylet("c" * 56, "10.0.0.1:6379", 3, head=True)
STRANGER = Raylet("d" * 56, "10.0.0.2:6379", 4)  # of another cluster


@dataclass
class Machine:
    """A machine whose nodes' last workers leave at given times, by its own clock."""

    until_s: dict[str, float]  # by node id
    refuses: str | None = None
    now_s: float = 0.0
    told: list[tuple[str, float]] = field(default_factory=list)

    def leave(self, within_s: float = 10.0) -> bool:
        machine = self

        class Node(Raylet):
            def drain(self, within_s: float) -> str | None:
                machine.told.append((self.node_id, within_s))
                if machine.refuses == "raise":
                    raise RuntimeError("the head is gone")
                return machine.refuses

            def has_workers(self) -> bool:
                return machine.now_s < machine.until_s[self.node_id]

        here = [Node(one.node_id, one.gcs, one.pid) for one in (ONE, OTHER) if one.node_id in self.until_s]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "time", self)
            return leave(within_s, here)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_ray_is_told_of_each_node_and_the_end_comes_when_the_last_worker_has_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine({ONE.node_id: 1.5, OTHER.node_id: 3.0})
    assert machine.leave()
    assert machine.told == [(ONE.node_id, 10.0), (OTHER.node_id, 10.0)]
    assert 3.0 <= machine.now_s < 3.5
    assert capsys.readouterr().out == ""


def test_no_longer_than_there_is_time(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine({ONE.node_id: 60.0})
    assert not machine.leave(within_s=5.0)
    assert 5.0 <= machine.now_s < 5.5
    assert capsys.readouterr().out == "1 nodes still have rollout workers after 5 s\n"


@pytest.mark.parametrize(("refuses", "says"), [("it is the head", "it is the head"), ("raise", "the head is gone")])
def test_a_refusal_is_said_and_the_workers_are_waited_for_all_the_same(
    refuses: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine({ONE.node_id: 2.0}, refuses)
    assert machine.leave()
    (line,) = capsys.readouterr().out.splitlines()
    assert says in line
    assert machine.now_s >= 2.0


def test_a_machine_without_a_node_has_nobody_to_wait_for() -> None:
    machine = Machine({})
    assert machine.leave()
    assert machine.now_s == 0.0


def test_the_node_of_the_cluster_that_is_named_and_never_a_head() -> None:
    assert chosen([HEAD, ONE]) == [ONE]
    assert chosen([HEAD]) == []
    assert chosen([HEAD, ONE, STRANGER], address="10.0.0.1:6379") == [ONE]
    assert chosen([HEAD, ONE, STRANGER], node="dd") == [STRANGER]
    assert chosen([HEAD, ONE, OTHER, STRANGER], address="10.0.0.1:6379", every=True) == [ONE, OTHER]
    assert chosen([ONE], address="auto") == [ONE]
    local = Raylet("e" * 56, "127.0.0.1:6379", 5)
    assert chosen([local, STRANGER], address="localhost:6379") == [local]  # as KubeRay names the head's service


@pytest.mark.parametrize(
    ("address", "node", "says"),
    [
        ("", "", "2 nodes run here .*--node ID, or say --all"),
        ("10.0.0.3:6379", "", "no node here is that of RAY_ADDRESS 10.0.0.3:6379; there are: a+ of 10.0.0.1:6379, d+"),
        ("10.0.0.1:6379", "dd", "no node here is that of --node dd and RAY_ADDRESS 10.0.0.1:6379"),
        ("", "cc", "no node here is that of --node cc"),
    ],
)
def test_what_is_not_clear_tells_nobody(address: str, node: str, says: str) -> None:
    with pytest.raises(UnclearNodeError, match=says):
        chosen([HEAD, ONE, STRANGER], address=address, node=node)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "name one with --node ID"), (["--within", "-1"], "-1 is no time"), (["--within", "inf"], "inf is no time")],
)
def test_the_command_refuses_before_anybody_is_told(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(module, "raylets", lambda: iter([ONE, STRANGER]))
    monkeypatch.setattr(module, "leave", lambda *_: pytest.fail("somebody was told"))
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert says in capsys.readouterr().err
