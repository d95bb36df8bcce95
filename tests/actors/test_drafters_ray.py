"""The driver's messages to the drafters of several workers, with real Ray actors and fake engines."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.shared_rollouts import pack, unpack
from benchmarks.alone import DispatcherAlone, spawner
from config.rollout import RolloutOptions
from contracts.rollout import DrafterLoaded, IntArray, Rollout
from launch.dispatch import Weights
from tests.actors.fake_engine import FakeEngine, FakeOptions, make_request, weights

DEADLINE_S = 120.0
Made = tuple[IntArray, IntArray, int]


@contextmanager
def workers(n: int, notes: Path, **fake: object) -> Iterator[DispatcherAlone]:
    options = [FakeOptions(notes=str(notes / f"rollout-{i}"), **fake) for i in range(n)]
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(FakeEngine, options[int(name.rpartition("-")[2])])), RolloutOptions(workers=n)
    )
    try:
        dispatcher.start()
        yield dispatcher
    finally:
        dispatcher.close()


def told(path: Path, lines: int) -> list[dict[str, object]]:
    """What an engine was told, once so many messages have arrived."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline_s, f"{path.name} was not told"
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts(made_by: list[int]) -> list[tuple[IntArray, IntArray, str]]:
    made = [(np.array([i], np.int32), np.array([i, i + 1], np.int32)) for i in range(len(made_by))]
    return [(*pair, f"rollout-{worker}") for pair, worker in zip(made, made_by, strict=True)]


@pytest.mark.ray
def test_every_worker_learns_what_the_others_made(tmp_path: Path) -> None:
    with workers(3, tmp_path) as dispatcher:
        dispatcher.drafters.share(rollouts([0, 1, 1, 2]))
        for worker, others in ((0, [1, 2, 3]), (1, [0, 3]), (2, [0, 1, 2])):
            assert told(tmp_path / f"rollout-{worker}", 1) == [{"remember": [[[i], [i, i + 1]] for i in others]}]


@pytest.mark.ray
def test_one_worker_is_told_nothing(tmp_path: Path) -> None:
    with workers(1, tmp_path) as dispatcher:
        dispatcher.drafters.share(rollouts([0, 0]))
        dispatcher.drafters.share([])
        dispatcher.drafters.load("first")
        assert told(tmp_path / "rollout-0", 1) == [{"load": "first"}]


@pytest.mark.ray
def test_saved_state_is_loaded_by_all_and_by_engines_that_are_restarted(tmp_path: Path) -> None:
    with workers(2, tmp_path, poison=7) as dispatcher:
        assert dispatcher.drafters.save(str(tmp_path / "kept")) is None
        assert (tmp_path / "kept/index").read_text() == "drafts"
        dispatcher.drafters.load("checkpoint-1")
        for worker in range(2):
            assert told(tmp_path / f"rollout-{worker}", 1) == [{"load": "checkpoint-1"}]
        dispatcher.drafters.saved_as("checkpoint-2")
        done: list[Rollout] = []
        stats = dispatcher.run([make_request(7)], done.append)  # kills every engine it is given to
        assert done == []
        assert stats.reissued_ids == {7}
        restarted = [tmp_path / f"rollout-{worker}" for worker in range(2)]
        assert any({"load": "checkpoint-2"} in told(path, 1) for path in restarted)
        dispatcher.drafters.share(rollouts([0, 1]))  # whatever state the workers are in: never an error


@pytest.mark.ray
def test_engines_stop_recording_where_training_rests_and_those_that_are_restarted_too(tmp_path: Path) -> None:
    with workers(2, tmp_path, poison=7) as dispatcher:
        dispatcher.drafters.record(True)  # as they start
        dispatcher.drafters.record(False)
        for worker in range(2):
            assert told(tmp_path / f"rollout-{worker}", 1) == [{"record": False}]
        done: list[Rollout] = []
        assert dispatcher.run([make_request(7)], done.append).reissued_ids == {7}  # kills the engines
        restarted = [tmp_path / f"rollout-{worker}" for worker in range(2)]
        assert any(told(path, 2) == [{"record": False}] * 2 for path in restarted)


@pytest.mark.ray
def test_a_save_without_answer_or_without_workers_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.dispatch.drafters.SAVE_TIMEOUT_S", 0.2)
    with workers(1, tmp_path, mute_drafters=True) as dispatcher:
        failure = dispatcher.drafters.save(str(tmp_path / "kept"))
        assert failure == "rollout-0 did not write them within 0.2 s"
    assert dispatcher.drafters.save(str(tmp_path / "kept")) == "no worker is up"
    assert list(tmp_path.glob("kept*")) == []


@pytest.mark.ray
def test_another_worker_saves_where_one_is_silent(tmp_path: Path) -> None:
    """After rollout.stall_timeout_s, which is less than what a checkpoint waits for at most."""
    options = [FakeOptions(mute_drafters=True), FakeOptions()]
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(FakeEngine, options[int(name.rpartition("-")[2])])),
        RolloutOptions(workers=2, stall_timeout_s=0.5),
    )
    try:
        dispatcher.start()
        assert dispatcher.drafters.save(str(tmp_path / "kept")) is None
    finally:
        dispatcher.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept/index").read_text() == "drafts"


@pytest.mark.ray
def test_a_drafter_that_failed_and_weights_that_were_refused_are_events_that_name_the_worker(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    told: list[object] = []
    broken = FakeOptions(failing_drafter="RuntimeError: out of order")
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(FakeEngine, broken if name == "rollout-1" else FakeOptions())),
        RolloutOptions(workers=2),
        on_event=lambda kind, message: said.append((kind, message)),
        on_spot=lambda worker, event: told.append((worker, type(event), getattr(event, "reason", None))),
    )
    try:
        dispatcher.start()
        manifest, payload = weights(7)
        dispatcher.drafters.update("eagle", Weights(manifest, ray.put(payload)))
        deadline_s = time.monotonic() + DEADLINE_S
        while len(told) < 3:
            assert time.monotonic() < deadline_s, told
            dispatcher.settle()
    finally:
        dispatcher.close()
    assert sorted(said) == [
        ("drafter_failed", "rollout-1: eagle is not used any more: RuntimeError: out of order"),
        ("drafter_not_updated", "rollout-1: version 7 of eagle: RuntimeError: out of order"),
    ]
    assert ("rollout-0", DrafterLoaded, "") in told


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda values: np.array(values, np.int32))


@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 3)), min_size=1, max_size=8), st.integers(0, 3))
def test_packing_loses_nothing(made: list[Made], worker: int) -> None:
    prompts, responses = unpack(pack(made), worker)
    kept = [(prompt, response) for prompt, response, maker in made if maker != worker]
    assert [p.tolist() for p in prompts] == [p.tolist() for p, _ in kept]
    assert [r.tolist() for r in responses] == [r.tolist() for _, r in kept]
    assert all(part.dtype == np.int32 for part in (*prompts, *responses))
