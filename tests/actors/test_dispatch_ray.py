"""The dispatcher with real Ray actors and real (fake-engine) processes: undisturbed, killed, hung, interrupted."""

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import psutil
import pytest
import ray
from ray import ObjectRefGenerator
from ray.exceptions import RayError

from actors.rollout_worker import SupervisorStatus
from benchmarks.alone import DispatcherAlone, spawner
from config.rollout import EngineOptions, RolloutOptions
from contracts.rollout import FinishReason, Request, Rollout
from launch.dispatch.seat import Seat
from launch.errors import PacelineError
from models.checksum import checksum
from models.manifest import WeightsManifest
from tests.actors.fake_engine import FakeEngine, FakeOptions, logprob, make_request, response
from tests.actors.statuses import statuses
from tests.params import long

pytestmark = pytest.mark.ray


QUICK = FakeOptions()


def options(workers: int, **update: object) -> RolloutOptions:
    return RolloutOptions(workers=workers, engine=EngineOptions(max_running=4), **update)


@contextmanager
def running(
    rollout: RolloutOptions, fake: FakeOptions | Callable[[str], FakeOptions] = QUICK, **hooks: Callable[[], bool]
) -> Iterator[tuple[DispatcherAlone, list[tuple[str, str]]]]:
    events: list[tuple[str, str]] = []
    per_worker = fake if callable(fake) else lambda name: fake
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(FakeEngine, per_worker(name))),
        rollout,
        start_timeout_s=240,  # a loaded machine is no failure
        on_event=lambda kind, message: events.append((kind, message)),
        **hooks,
    )
    try:
        dispatcher.start()
        yield dispatcher, events
    finally:
        dispatcher.close()


def requests(n: int = 24, *, max_new_tokens: int = 24, seed: int = 0) -> list[Request]:
    return [make_request(i, i // 4, max_new_tokens=max_new_tokens, seed=seed) for i in range(n)]


def check(rollouts: list[Rollout], asked: list[Request]) -> None:
    """Each exactly once, with the tokens and log-probs of the oracle."""
    assert sorted(r.request_id for r in rollouts) == sorted(r.request_id for r in asked)
    by_id = {r.request_id: r for r in asked}
    for rollout in rollouts:
        request = by_id[rollout.request_id]
        tokens, reason = response(request)
        assert (rollout.tokens.tolist(), rollout.finish_reason) == (tokens, reason)
        logprobs = [logprob(request.noise_key, p) for p in range(len(tokens))]
        assert rollout.logprobs.tolist() == logprobs
        assert rollout.logprobs_t1 is not None
        assert rollout.logprobs_t1.tolist() == [2 * x for x in logprobs]


def test_streams_of_events_are_short_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a stream lasts, Ray keeps the id of each of its objects in the driver: 1,000 at most, here 3."""
    monkeypatch.setattr("launch.dispatch.seat.STREAM_LISTS", 3)
    lists, take = Counter[str](), Seat.take_events

    def taken(self: Seat, value: Any) -> Any:
        lists[cast(Any, self.stream)._generator_ref.hex()] += 1
        return take(self, value)

    monkeypatch.setattr(Seat, "take_events", taken)
    with running(options(2)) as (dispatcher, events):
        for seed in range(2):
            done: list[Rollout] = []
            dispatcher.run(asked := requests(64, seed=seed), done.append)
            check(done, asked)
        assert events == []
        gc.collect()
        streams = [one for one in gc.get_objects() if type(one) is ObjectRefGenerator]  # isinstance makes torch warn
        alive = [one for one in streams if one._generator_ref.hex() in lists]  # other tests may have left theirs
        assert len(alive) <= 2, "one for each worker"
    assert len(lists) > 4
    assert max(lists.values()) == 3


def engine_pid(status: SupervisorStatus) -> int:
    [engine] = psutil.Process(status.pid).children()
    return engine.pid


def weights(version: int) -> tuple[WeightsManifest, "ray.ObjectRef[np.ndarray]"]:
    buffer = np.random.default_rng(version).integers(0, 256, 100_000, dtype=np.uint8)
    return WeightsManifest(version, checksum(buffer), (), buffer.nbytes), ray.put(buffer)


@pytest.mark.parametrize("workers", [2, *long(1, 3)])
def test_same_tokens_whatever_the_number_of_workers(workers: int) -> None:
    with running(options(workers)) as (dispatcher, events):
        done: list[Rollout] = []
        stats = dispatcher.run(asked := requests(), done.append)
        check(done, asked)
        assert (stats.requests, stats.finished, stats.failed, stats.duplicates) == (24, 24, (), 0)
        assert stats.tokens == sum(len(r.tokens) for r in done)
        assert events == []
        again: list[Rollout] = []
        dispatcher.run(asked := requests(6, seed=1), again.append)  # the same ids, other requests
        check(again, asked)
        for status in statuses(dispatcher).values():
            assert (status.engine, status.restarts, status.torch_loaded) == ("running", 0, False)


@pytest.mark.parametrize("victim", ["both", *long("actor", "engine")])
def test_sigterm_hands_the_requests_to_others_with_their_tokens(victim: str) -> None:
    """As a cloud, Ray or a person sends it. The engines report no progress, so what goes on was handed back."""
    fake, restarts = FakeOptions(step_s=0.004, progress_every_tokens=1000), 0 if victim == "actor" else 9
    with running(options(2, max_worker_restarts=restarts), fake) as (dispatcher, events):  # none is used up
        dispatcher.set_weights(*weights(3))
        status = statuses(dispatcher)["rollout-1"]
        pids = {"actor": [status.pid], "engine": [engine_pid(status)], "both": [status.pid, engine_pid(status)]}
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 4:
                for pid in pids[victim]:
                    os.kill(pid, signal.SIGTERM)

        stats = dispatcher.run(asked := requests(max_new_tokens=48), on_finished)
        check(done, asked)
        assert stats.failed == ()
        while not any(kind == "worker_restarted" for kind, _ in events):
            dispatcher.set_weights(*weights(4))
            dispatcher.run(requests(1, seed=9), lambda rollout: None)
        lost = [message for kind, message in events if kind == "worker_lost"]
        assert lost[0].startswith("rollout-1: ")
        if victim == "actor":
            assert len(lost) == 1
            assert "it received SIGTERM; " in lost[0]
            assert not lost[0].endswith("with 0 tokens")
        after = statuses(dispatcher)["rollout-1"]
        assert (after.pid == status.pid) is (victim == "engine")


def test_a_worker_that_is_told_to_end_between_two_runs_is_replaced() -> None:
    with running(options(2)) as (dispatcher, events):
        status = statuses(dispatcher)["rollout-0"]
        os.kill(status.pid, signal.SIGTERM)
        while not events:
            dispatcher.settle()
        dispatcher.set_weights(*weights(1))
        done: list[Rollout] = []
        dispatcher.run(asked := requests(8), done.append)
        check(done, asked)
        assert events[0] == (
            "worker_lost",
            "rollout-0: it received SIGTERM; 0 requests are re-issued with 0 tokens",
        )


def test_a_worker_that_joins_in_the_midst_of_a_rollout_gets_the_weights_and_work() -> None:
    with running(options(1), FakeOptions(step_s=0.002)) as (dispatcher, events):
        dispatcher.set_weights(*weights(3))
        done: list[Rollout] = []
        asked = requests(12, max_new_tokens=48)

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 1:
                dispatcher.join("spot-a")
                with pytest.raises(ValueError, match="there is a worker 'spot-a' already: it is starting"):
                    dispatcher.join("spot-a")

        stats = dispatcher.run(asked, on_finished)
        while "spot-a" not in stats.sampled_by.values():  # it came up too late for that run
            check(done, asked)
            done.clear()
            stats = dispatcher.run(asked, done.append)
        check(done, asked)
        assert {r.weights_version for r in done} == {3}
        [(kind, message)] = events
        assert (kind, message.partition(" after ")[0]) == ("worker_joined", "spot-a: up")
        dispatcher.set_weights(*weights(4))
        status = statuses(dispatcher)["spot-a"]
        assert isinstance(status, SupervisorStatus)
        assert (status.name, status.weights_version) == ("spot-a", 4)


def test_a_worker_that_leaves_in_the_midst_of_a_rollout_hands_its_requests_over_and_is_gone() -> None:
    """The engines report no progress, so what goes on was handed back. No request is suspected: max_retries is 0."""
    fake = FakeOptions(step_s=0.004, progress_every_tokens=1000)
    with running(options(2, max_retries=0), fake) as (dispatcher, events):
        dispatcher.set_weights(*weights(3))
        status = statuses(dispatcher)["rollout-1"]
        assert isinstance(status, SupervisorStatus)
        pid = engine_pid(status)
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 4:
                dispatcher.leave("rollout-1")
                dispatcher.leave("rollout-1")  # twice is once

        stats = dispatcher.run(asked := requests(max_new_tokens=48), on_finished)
        check(done, asked)
        assert (stats.failed, stats.lost_workers) == ((), 0)
        assert stats.reissued > 0
        assert [kind for kind, _ in events] == ["worker_left"]
        assert not events[0][1].endswith("with 0 tokens")
        dispatcher.set_weights(*weights(4))  # none are awaited of it
        while "rollout-1" in statuses(dispatcher):
            dispatcher.settle()
        with suppress(ProcessLookupError):
            while True:  # until its engine has ended
                os.kill(pid, 0)
        with pytest.raises(KeyError):
            dispatcher.leave("rollout-1")
        dispatcher.join("rollout-1")  # the name is free again
        done.clear()
        dispatcher.run(asked := requests(seed=1), done.append)
        check(done, asked)


def test_the_last_worker_leaves_and_another_takes_its_work() -> None:
    with running(options(1), FakeOptions(step_s=0.004)) as (dispatcher, events):
        dispatcher.set_weights(*weights(1))
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 2:
                dispatcher.join("rollout-1")
                dispatcher.leave("rollout-0")

        stats = dispatcher.run(asked := requests(12), on_finished)
        check(done, asked)
        assert set(stats.sampled_by.values()) == {"rollout-0", "rollout-1"}
        assert [kind for kind, _ in events] == ["worker_left", "worker_joined"]


@pytest.mark.parametrize("killed", [False, True])
def test_requests_aborted_by_id_come_back_once_with_what_they_have_also_if_their_worker_dies(killed: bool) -> None:
    with running(options(2), FakeOptions(step_s=0.004)) as (dispatcher, _):
        dispatcher.set_weights(*weights(3))
        status = statuses(dispatcher)["rollout-1"]
        assert isinstance(status, SupervisorStatus)
        pid, doomed = engine_pid(status), set(range(3, 24, 2))  # at the first response most of them wait still
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 1:
                if killed:
                    os.kill(pid, signal.SIGKILL)  # nobody has noticed yet
                dispatcher.abort([*doomed, 99])
                dispatcher.abort(doomed)

        stats = dispatcher.run(asked := requests(max_new_tokens=48), on_finished)
        aborted = [r for r in done if r.finish_reason is FinishReason.ABORT]
        assert {r.request_id for r in aborted} <= doomed
        assert len(aborted) > 5
        assert sorted(r.request_id for r in done) == list(range(24))
        for rollout in aborted:
            tokens, _ = response(asked[rollout.request_id])
            assert rollout.tokens.tolist() == tokens[: len(rollout.tokens)]
            assert rollout.weights_version == 3
        ended = [r for r in done if r.finish_reason is not FinishReason.ABORT]
        check(ended, [asked[r.request_id] for r in ended])
        assert (stats.finished, stats.failed, stats.tokens) == (24, (), sum(len(r.tokens) for r in done))
        assert stats.lost_workers == killed
        again: list[Rollout] = []
        dispatcher.run(asked := requests(6, seed=1), again.append)
        check(again, asked)


LONG = [pytest.param(victim, seed, marks=pytest.mark.long) for victim, seed in (("engine", 0), ("actor", 2))]


@pytest.mark.parametrize(("victim", "seed"), [("engine", 1), *LONG])
def test_sigkill_at_a_random_moment_loses_nothing(victim: str, seed: int) -> None:
    rng = random.Random(seed)
    with running(options(2), FakeOptions(step_s=0.004)) as (dispatcher, events):
        dispatcher.set_weights(*weights(3))
        status = statuses(dispatcher)["rollout-1"]
        pid = engine_pid(status) if victim == "engine" else status.pid
        kill_at = rng.randrange(1, 20)
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == kill_at:
                os.kill(pid, signal.SIGKILL)

        asked = requests(max_new_tokens=48)
        stats = dispatcher.run(asked, on_finished)
        check(done, asked)
        assert all(r.weights_version == 3 for r in done)
        assert stats.failed == ()
        while not any(kind == "worker_restarted" for kind, _ in events):  # it comes back, with the weights
            dispatcher.set_weights(*weights(4))
            dispatcher.run(requests(1, seed=9), lambda rollout: None)
        lost = [message for kind, message in events if kind == "worker_lost"]
        assert len(lost) == 1
        assert lost[0].startswith("rollout-1: ")
        dispatcher.set_weights(*weights(5))
        for answer in statuses(dispatcher).values():
            assert answer.weights_version == 5


def test_the_only_worker_is_killed_and_its_requests_go_on_with_their_prefix() -> None:
    with running(options(1), FakeOptions(step_s=0.004)) as (dispatcher, events):
        status = statuses(dispatcher)["rollout-0"]
        pid = engine_pid(status)
        timer = threading.Timer(0.15, os.kill, (pid, signal.SIGKILL))
        timer.start()
        done: list[Rollout] = []
        asked = [make_request(i, max_new_tokens=100) for i in range(4)]
        asked = [r for r in asked if len(response(r)[0]) > 20] or asked
        dispatcher.run(asked, done.append)
        timer.join()
        check(done, asked)
        if events:  # the kill came in time
            assert [kind for kind, _ in events] == ["worker_lost", "worker_restarted"]


def test_silent_worker_is_lost_and_its_requests_finish_elsewhere() -> None:
    fake = lambda name: FakeOptions(hang_on=5 if name == "rollout-0" else -1)  # noqa: E731
    with running(options(2, stall_timeout_s=1.0, max_worker_restarts=1), fake) as (dispatcher, events):
        done: list[Rollout] = []
        stats = dispatcher.run(asked := requests(16), done.append)
        check(done, asked)
        assert stats.lost_workers <= 2
        assert any("no progress on" in message for kind, message in events if kind == "worker_lost") == (
            stats.lost_workers > 0
        )


def test_rejected_and_lost_too_often() -> None:
    with running(options(1, max_retries=1), FakeOptions(poison=0)) as (dispatcher, events):
        done: list[Rollout] = []
        asked = requests(3)
        too_long = replace(asked[2], prompt_tokens=np.zeros(2000, np.int32), prompt_id=9)
        stats = dispatcher.run([asked[1], too_long], done.append)
        assert [(f.request_id, f.reason) for f in stats.failed] == [(2, "prompt of more than 1000 tokens")]
        check(done, asked[1:2])
        stats = dispatcher.run(asked[:1], done.append)
        assert (stats.finished, stats.reissued, stats.lost_workers) == (0, 1, 2)
        [failed] = stats.failed
        assert "lost 2 times" in failed.reason
        assert "exit code 3" in failed.reason
        done.clear()
        dispatcher.run(fresh := [make_request(i) for i in (1, 2)], done.append)
        check(done, fresh)
        kinds = [kind for kind, _ in events]
        assert sorted(kinds) == [
            "request_failed",
            "request_rejected",
            *["worker_lost"] * 2,
            *["worker_restarted"] * 2,
        ]


def test_all_workers_lost_is_an_error() -> None:
    with (
        running(options(1, max_worker_restarts=1, max_retries=9), FakeOptions(poison=0)) as (dispatcher, _),
        pytest.raises(PacelineError, match=r"rollout-0: .*exit code 3"),
    ):
        dispatcher.run(requests(2), lambda rollout: None)


def test_worker_that_does_not_start_gives_the_engines_reason() -> None:
    broken = FakeOptions(fail_to_start="no such model: /nowhere")
    with pytest.raises(PacelineError, match="no such model: /nowhere"), running(options(1), broken):
        pass


def test_stale_weights_name_the_worker() -> None:
    fake = lambda name: FakeOptions(wrong_checksum=name == "rollout-1")  # noqa: E731
    stale = pytest.raises(PacelineError, match="rollout-1 holds weights version 2 with checksum")
    with running(options(2), fake) as (dispatcher, _), stale:
        dispatcher.set_weights(*weights(2))


class Maker:
    """Owns a buffer, as rank 0 of the learner owns the published weights."""

    def put(self, buffer: np.ndarray) -> list["ray.ObjectRef[np.ndarray]"]:
        return [ray.put(buffer)]


def wait_until_gone(ref: "ray.ObjectRef[np.ndarray]") -> None:
    """For tasks that take it: Ray hears of an owner's end by and by."""
    touch: Any = ray.remote(num_cpus=0)(lambda buffer: buffer.size)
    while True:
        try:
            ray.get(touch.remote(ref), timeout=60)
        except RayError:
            return
        time.sleep(0.1)


def test_a_worker_that_starts_when_the_maker_of_the_weights_is_gone_gets_them_from_another_buffer() -> None:
    """In the middle of a run, which goes on; without another buffer it is lost for good."""
    manifest, own = weights(1)
    buffer = ray.get(own).copy()
    maker = ray.remote(Maker).options(num_cpus=0).remote()
    [ref] = ray.get(cast(Any, maker).put.remote(buffer), timeout=60)
    asked: list[str] = []

    def another() -> bool:
        asked.append("gone")
        dispatcher.renew_weights(manifest, ray.put(buffer))
        return True

    with running(options(2), FakeOptions(step_s=0.003), on_weights_gone=another) as (dispatcher, events):
        dispatcher.set_weights(manifest, ref)
        ray.kill(maker)
        wait_until_gone(ref)
        rollouts: list[Rollout] = []
        killed = threading.Event()

        def finished(rollout: Rollout) -> None:
            rollouts.append(rollout)
            if not killed.is_set():
                os.kill(engine_pid(statuses(dispatcher)["rollout-1"]), signal.SIGKILL)
                killed.set()

        asked_for = requests(60)
        dispatcher.run(asked_for, finished)
        while statuses(dispatcher)["rollout-1"].weights_version != 1:
            dispatcher.settle()
        check(rollouts, asked_for)
    assert asked == ["gone"]
    assert [kind for kind, _ in events].count("worker_lost") == 1


def test_interrupts_and_failing_callbacks_leave_a_clean_slate() -> None:
    with running(options(2), FakeOptions(step_s=0.003)) as (dispatcher, events):
        seen: list[Rollout] = []

        error: BaseException

        def fail(rollout: Rollout) -> None:
            seen.append(rollout)
            raise error

        for count, error in enumerate((KeyboardInterrupt(), RayError("of a callback, not of a worker")), start=1):
            with pytest.raises(type(error)):
                dispatcher.run(requests(24, max_new_tokens=90), fail)
            assert len(seen) == count
        started = time.monotonic()
        stats = dispatcher.run(
            requests(24, max_new_tokens=90), seen.append, should_stop=lambda: time.monotonic() > started + 0.1
        )
        assert stats.interrupted
        assert stats.finished < 24
        done: list[Rollout] = []
        dispatcher.run(asked := requests(24, seed=4), done.append)
        check(done, asked)
        assert events == []
