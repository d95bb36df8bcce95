"""A session of several trainers in processes of their own: equal replicas, whoever is killed and whenever."""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.spot.process import SpotTrainer
from contracts.spot import MicroStep, PublishDrafter, TrainedWeights, TrainFailed, TrainStarted, TrainStopped
from tests.spot.support import feed, only, record, save_target, spawn, start, stop, until, until_a

Trainers = Mapping[str, SpotTrainer]
ROWS = 150


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    target = save_target(tmp_path)
    with ThreadPoolExecutor() as pool:
        spawned = dict(zip("abcd", pool.map(lambda name: spawn(target, tmp_path / name), "abcd"), strict=True))
    yield spawned
    for trainer in spawned.values():
        trainer.close(0.0)


def tell(trainers: Trainers, epoch: int, members: str) -> None:
    """As a coordinator does: the leader first, which says where its store is."""
    trainers[members[0]].send(start(1, epoch, tuple(members), 0))
    store = until_a(trainers[members[0]], TrainStarted).store
    for rank, name in enumerate(members[1:], start=1):
        trainers[name].send(start(1, epoch, tuple(members), rank, store))
        assert until_a(trainers[name], TrainStarted).store == ""


def round_of(trainers: Trainers, epoch: int, members: str, seed: int) -> int:
    """One pack for each; when all have learned from theirs, all have the same weights. Their version."""
    for place, name in enumerate(members):
        trainers[name].send(feed(record(100 * seed + place, rows=20 + 13 * place)))
    for name in members:
        step = until_a(trainers[name], MicroStep)
        assert (step.epoch, step.members) == (epoch, len(members))
    for name in members:
        trainers[name].send(PublishDrafter())
    manifests = [until_a(trainers[name], TrainedWeights).manifest for name in members]
    assert len({(manifest.version, manifest.checksum) for manifest in manifests}) == 1
    return manifests[0].version


def gathered(trainers: Trainers, epoch: int, members: str) -> None:
    """Until the leader sums in this epoch."""

    def sums(events: object) -> bool:
        trainers[members[0]].send(feed(record(0, rows=5)))
        return any(step.epoch == epoch for step in only(events, MicroStep))

    until(trainers[members[0]], sums)
    time.sleep(0.1)
    for name in members:
        trainers[name].poll(0.0)


def kill_in_a_micro_step(trainers: Trainers, members: str, victim: str) -> str:
    """The rest, who wait for it in that micro-step and must make it again."""
    os.kill(trainers[victim].pid, signal.SIGSTOP)
    for name in members:
        trainers[name].send(feed(record(1, rows=ROWS)))
    time.sleep(0.15)
    os.kill(trainers[victim].pid, signal.SIGKILL)
    assert "SIGKILL" in until_a(trainers[victim], TrainFailed).reason
    return members.replace(victim, "")


def made_again(trainers: Trainers, epoch: int, members: str) -> None:
    for name in members:
        steps = only(until(trainers[name], lambda found: bool(only(found, MicroStep))), MicroStep)
        assert [(step.epoch, step.tokens) for step in steps] == [(epoch, ROWS - 1)]


def test_replicas_stay_equal_through_joins_kills_and_leaves(trainers: Trainers) -> None:
    tell(trainers, 1, "a")
    version = [round_of(trainers, 1, "a", seed) for seed in range(3)][-1]
    assert version == 3

    tell(trainers, 2, "abc")  # b and c join, with a's weights and optimizer
    gathered(trainers, 2, "abc")
    versions = [round_of(trainers, 2, "abc", seed) for seed in range(3, 9)]
    assert versions == sorted(versions)
    assert versions[0] > version

    before, rest = versions[-1], kill_in_a_micro_step(trainers, "abc", "c")
    tell(trainers, 3, "ab")
    made_again(trainers, 3, rest)
    versions = [round_of(trainers, 3, "ab", seed) for seed in range(9, 12)]
    assert versions[0] > before, "only the micro-step of the kill was lost"

    before, rest = versions[-1], kill_in_a_micro_step(trainers, "ab", "a")  # the leader
    tell(trainers, 4, "bd")  # another leads, with its own replica; d is new
    made_again(trainers, 4, rest)
    versions = [round_of(trainers, 4, "bd", seed) for seed in range(12, 15)]
    assert versions[0] > before, "nothing was forgotten"

    trainers["b"].send(stop())  # has work to do
    stopped = until_a(trainers["b"], TrainStopped)
    assert stopped.seconds < 5
    assert stopped.step == versions[-1]
    tell(trainers, 5, "d")
    assert round_of(trainers, 5, "d", 15) == versions[-1] + 1
