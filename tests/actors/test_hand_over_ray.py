"""A learner group hands its weights to real engines piece by piece: what the object store would have given them, at
once, to every worker, whoever is lost or comes late."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.engine.process import spawn_engine
from actors.learner_group import LearnerGroup, WeightsSending
from actors.training.errors import LearnerLostError
from benchmarks.alone import DispatcherAlone, spawner
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from config.rollout import EngineOptions, RolloutOptions
from contracts.handoff import Offer, Sent, Way
from contracts.rollout import Rollout
from models.checkpoint import save_model
from models.manifest import WeightsManifest
from tests.actors.statuses import statuses
from tests.actors.test_native_ray import Answer, answers, asked, child_pids
from tests.engine.support import tiny_model

pytestmark = pytest.mark.ray

ENGINE = EngineOptions(max_running=6, kv_tokens=2048, threads=1, progress_every_tokens=8)
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(tiny_model(directory / "config"), directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def learner(model_dir: Path, ray_head: str) -> Iterator[LearnerGroup]:
    """With weights of its own."""
    options = LearnerOptions(ranks=1, threads=1)
    model = ModelOptions(path=str(model_dir))
    with LearnerGroup(model, options, ObjectiveOptions(), temperature=1.0, init="random", seed=5) as group:
        group.begin(OptimizerOptions(), 20)
        yield group


@contextmanager
def workers(n: int, model_dir: Path, events: list[tuple[str, str]]) -> Iterator[DispatcherAlone]:
    spawn = partial(spawn_engine, ModelOptions(path=str(model_dir)), ENGINE)
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(spawn, name=name)),
        RolloutOptions(workers=n, engine=ENGINE),
        on_event=lambda kind, message: events.append((kind, message)),
    )
    try:
        dispatcher.start()
        yield dispatcher
    finally:
        dispatcher.close()


def sampled(dispatcher: DispatcherAlone) -> Answer:
    done: list[Rollout] = []
    dispatcher.run(asked(), done.append)
    return answers(done)


@pytest.fixture(scope="module")
def expected(model_dir: Path, learner: LearnerGroup) -> Answer:
    """What engines sample that got the learner's weights through the object store."""
    with workers(1, model_dir, []) as dispatcher:
        dispatcher.set_weights(*learner.publish(1))
        return sampled(dispatcher)


def hold(dispatcher: DispatcherAlone, version: int) -> bool:
    return all(status.weights_version == version for status in statuses(dispatcher).values())


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("broadcast", True),
        pytest.param("broadcast", False, marks=pytest.mark.long),
        pytest.param("ipc", False, marks=pytest.mark.long),
    ],
)
def test_engines_sample_what_they_would_with_weights_from_the_store(
    way: Way, changes: bool, model_dir: Path, learner: LearnerGroup, expected: Answer
) -> None:
    events: list[tuple[str, str]] = []
    with workers(2, model_dir, events) as dispatcher:
        for version in (3, 4):
            handed = dispatcher.hand_over(
                lambda n, version=version: learner.send(version, receivers=n, way=way, limit_s=LIMIT_S, changes=changes)
            )
            expected_way = "delta" if changes and version == 4 else way
            assert (handed.ways, handed.reasons) == ({expected_way: 2, "store": 0}, {})
            assert (0 < handed.sent.delta_bytes < handed.sent.total_bytes / 20) == (expected_way == "delta")
            assert hold(dispatcher, version)
        assert sampled(dispatcher) == expected
        dispatcher.join("late")  # gets what the learner keeps in the store
        assert sampled(dispatcher) == expected
        while len(statuses(dispatcher)) < 3 or not hold(dispatcher, 4):
            dispatcher.settle()
    assert not [event for event in events if event[0] == "weights_by_store"]


def test_an_engine_that_was_killed_gets_them_from_the_store_and_the_others_at_once(
    model_dir: Path, learner: LearnerGroup, expected: Answer
) -> None:
    events: list[tuple[str, str]] = []
    with workers(2, model_dir, events) as dispatcher:
        first, _ = (status.pid for status in statuses(dispatcher).values())
        os.kill(child_pids(first)[0], signal.SIGKILL)
        handed = dispatcher.hand_over(lambda n: learner.send(7, receivers=n, way="ipc", limit_s=LIMIT_S))
        assert handed.ways["ipc"] == 1
        assert hold(dispatcher, 7)
        assert sampled(dispatcher) == expected
    assert [kind for kind, _ in events if kind in ("worker_lost", "worker_restarted")]


def test_engines_that_are_left_out_say_so_and_load_from_the_store(
    model_dir: Path, learner: LearnerGroup, expected: Answer
) -> None:
    events: list[tuple[str, str]] = []
    with workers(2, model_dir, events) as dispatcher:

        class Elsewhere:
            """Its offers lead nowhere."""

            def __init__(self, receivers: int) -> None:
                self._real = learner.send(9, receivers=0, way="ipc", limit_s=LIMIT_S)

            def offer(self, receiver: int) -> Offer:
                return replace(self._real.offer(receiver), store="127.0.0.1:1")

            def finish(self) -> "tuple[Sent, WeightsManifest, ray.ObjectRef[Any]]":
                return self._real.finish()

        handed = dispatcher.hand_over(Elsewhere)
        assert handed.ways == {"store": 2}
        assert hold(dispatcher, 9)
        assert sampled(dispatcher) == expected
    assert [kind for kind, _ in events].count("weights_by_store") == 2
    assert "not reachable" in events[0][1]


def test_the_store_keeps_what_was_sent_also_by_a_learner_that_rests(learner: LearnerGroup) -> None:
    learner.rest(optimizer=True)
    sending = learner.send(11, receivers=0, way="ipc", limit_s=LIMIT_S)
    sent, manifest, ref = sending.finish()
    assert learner._rested
    stored, buffer = learner.publish(11)
    assert sent.checksum == manifest.checksum == stored.checksum
    assert manifest == stored
    assert (ray.get(ref, timeout=LIMIT_S) == ray.get(buffer, timeout=LIMIT_S)).all()


@pytest.mark.long
def test_two_ranks_gather_in_step_for_engines_of_one_of_them(model_dir: Path, learner: LearnerGroup) -> None:
    """On one machine every engine shares the first rank's device; the other gathers, and sends nothing."""
    options = LearnerOptions(ranks=2, threads=1)
    model = ModelOptions(path=str(model_dir))
    with (
        LearnerGroup(model, options, ObjectiveOptions(), temperature=1.0, init="random", seed=5) as pair,
        workers(2, model_dir, []) as dispatcher,
    ):
        pair.begin(OptimizerOptions(), 20)
        handed = dispatcher.hand_over(lambda n: pair.send(1, receivers=n, way="auto", limit_s=LIMIT_S))
        assert handed.ways["ipc"] == 2
        assert handed.sent.checksum == learner.publish(1)[0].checksum  # the same seed's weights
        assert hold(dispatcher, 1)


def test_a_learner_that_is_killed_in_a_hand_over_is_named_and_leaves_workers_that_another_one_can_reach(
    model_dir: Path, learner: LearnerGroup
) -> None:
    options = LearnerOptions(ranks=1, threads=1)
    model = ModelOptions(path=str(model_dir))
    with (
        LearnerGroup(model, options, ObjectiveOptions(), temperature=1.0, init="random", seed=5) as doomed,
        workers(2, model_dir, []) as dispatcher,
    ):
        doomed.begin(OptimizerOptions(), 20)

        def send(receivers: int) -> WeightsSending:
            os.kill(doomed.places[0].pid, signal.SIGSTOP)  # it takes the call, and dies of it
            sending = doomed.send(1, receivers=receivers, way="ipc", limit_s=LIMIT_S)
            os.kill(doomed.places[0].pid, signal.SIGKILL)
            return sending

        dispatcher.hand_over(lambda n: doomed.send(1, receivers=n, way="ipc", limit_s=LIMIT_S))
        with pytest.raises(LearnerLostError, match="SIGKILL"):
            dispatcher.hand_over(send)
        assert hold(dispatcher, 1)  # what they had
        again = dispatcher.hand_over(lambda n: learner.send(2, receivers=n, way="ipc", limit_s=LIMIT_S))
        assert again.ways == {"store": 2}  # whether they still waited for the first is not known
        assert hold(dispatcher, 2)
        for way in ("broadcast", "ipc"):
            later = dispatcher.hand_over(lambda n, way=way: learner.send(3, receivers=n, way=way, limit_s=LIMIT_S))
            assert later.ways[way] == 2
        assert hold(dispatcher, 3)
