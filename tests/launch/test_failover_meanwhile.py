"""What the driver hears while it waits for a learner, and what becomes of one that is lost while it does not: with the
group of test_failover.py, that only counts."""

from functools import partial
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.context import Context
from actors.learner_group import LearnerGroup, RanksAwaited
from actors.loop import EventLoop, Look
from launch.failover import FailoverLearner
from tests.launch.failover_world import World, made, sequences


class Nothing:
    """Comes, however long one waits."""

    def get(self, timeout: float) -> Any:
        assert timeout <= 0.25
        raise Empty

    def get_nowait(self) -> Any:
        raise Empty


@pytest.mark.parametrize(
    "name", ["train_step 3", "publish", "send", "rest", "save", "export", "reference_kl 3", "load"]
)
def test_every_call_of_the_learner_is_a_wait_in_the_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which everything else is heard."""
    monkeypatch.setattr("actors.loop.SimpleQueue", Nothing)
    group, heard, loop = object.__new__(LearnerGroup), list[Any](), EventLoop()
    loop.react_with(heard.append)
    group._context = Context(loop=loop)
    answer: Any = SimpleNamespace(_on_completed=lambda call: None)

    def wait(refs: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        assert options["timeout"] == 0
        return (refs, []) if len(heard) == 3 else ([], refs)

    monkeypatch.setattr("actors.learner_group.ray.wait", wait)
    monkeypatch.setattr("actors.learner_group.ray.get", lambda refs, timeout: refs)
    assert group._wait(name, 60.0, [answer]) == [answer]
    assert heard == [Look()] * 3


def test_who_waits_for_ranks_to_come_up_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    group, heard, loop = object.__new__(LearnerGroup), list[Any](), EventLoop()
    loop.react_with(heard.append)
    group._context = Context(loop=loop)
    answer: Any = SimpleNamespace(_on_completed=lambda call: None)
    monkeypatch.setattr("actors.learner_group._LOOK_S", 0.01)
    there = [([], [answer])] * 2 + [([answer], [])]
    monkeypatch.setattr("actors.learner_group.ray.wait", lambda refs, **options: there.pop(0))
    monkeypatch.setattr("actors.learner_group.ray.get", lambda refs, timeout: refs)
    assert group._wait("start", 60.0, [answer]) == [answer]
    assert [type(event) for event in heard] == [Look, RanksAwaited, Look] * 2


def test_a_rank_that_ends_while_nobody_calls_is_found_and_replaced_before_the_next_call(tmp_path: Path) -> None:
    world, events, within = World(), list[str](), list[bool]()
    with made(world, tmp_path, events) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        assert not asks(learner)
        world.groups[0].has_ended = True
        learner.call(lambda group: within.append(asks(learner)))
        assert within == [False], "the call under way finds it, and repeats itself"
        assert asks(learner)
        learner.mend()
        assert not asks(learner)
        assert [kind.partition(":")[0] for kind in events] == ["learner_lost", "learner_restarted"]
        assert world.groups[1].state == world.groups[0].state


def test_a_step_that_a_lost_rank_worked_on_is_begun_again_with_the_group(tmp_path: Path) -> None:
    """While the next one is sampled."""
    world = World()
    with made(world, tmp_path, []) as learner:
        learner.begin(None, 9)
        learner.train_step(sequences(1), 1)
        learner.begin_step(sequences(2), 2)
        world.groups[0].has_ended = True
        assert asks(learner)
        learner.mend()
        step: Any = learner._step
        assert step._group is world.groups[1]
        assert not asks(learner)
        assert learner.step_result().losses
        assert len(world.groups) == 2
        assert len(learner._kept) == 2


def asks(learner: FailoverLearner) -> bool:
    return learner.to_mend


def test_ranks_are_asked_now_and_then_and_nobody_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, answers = [0.0], list[str]()
    group: Any = object.__new__(LearnerGroup)
    group._ranks = [SimpleNamespace(place=SimpleNamespace(remote=partial(_ask, answers, rank))) for rank in range(2)]
    group._pings, group._ping_s, group._lost_one = [], 0.0, False
    there, looked_s = set[str](), list[float]()

    def wait(refs: list[str], *, timeout: float, **options: Any) -> tuple[list[str], list[str]]:
        assert timeout == 0
        looked_s.append(now_s[0])
        return [ref for ref in refs if ref in there], [ref for ref in refs if ref not in there]

    def get(ref: str, timeout: float) -> None:
        if ref == "rank 1, 3":
            raise ActorDiedError

    monkeypatch.setattr("actors.learner_group.ray.wait", wait)
    monkeypatch.setattr("actors.learner_group.ray.get", get)
    monkeypatch.setattr("actors.learner_group.time.monotonic", lambda: now_s[0])
    assert not any(group.lost() for _ in range(9))
    assert answers == ["rank 0, 0", "rank 1, 1"], "they are busy with something: that is asked once"
    there.update(answers)
    now_s[0] = 1.0
    assert not any(group.lost() for _ in range(9))
    now_s[0] = 2.0
    there.update({"rank 0, 2", "rank 1, 3"})
    assert not any(group.lost() for _ in range(9))
    now_s[0] = 3.0
    assert group.lost()
    assert group.lost()
    assert looked_s == [0.0, 1.0, 3.0]


def _ask(answers: list[str], rank: int) -> str:
    answers.append(f"rank {rank}, {len(answers)}")
    return answers[-1]
