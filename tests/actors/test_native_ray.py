"""The dispatcher with the real native engine: the same tokens with 3 workers, after SIGKILL, after new weights."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import ray

from actors.engine.process import NO_SPECULATION, spawn_engine
from benchmarks.alone import DispatcherAlone, spawner
from config.model import ModelOptions
from config.rollout import EngineOptions, RolloutOptions
from config.speculation import SpeculationOptions
from contracts.rollout import Request, Rollout
from launch.dispatch import DispatchStats
from models.checkpoint import hf_state_dict, load_model, save_model
from models.weights import pack
from tests.actors.statuses import statuses
from tests.engine.support import engine, make_requests, run, tiny_model
from tests.models.ranks import summed_in_parts

pytestmark = pytest.mark.ray

ENGINE = EngineOptions(max_running=6, kv_tokens=2048, threads=1, progress_every_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(tiny_model(directory / "config"), directory / "model")
    return directory / "model"


@contextmanager
def workers(
    n: int, model_dir: Path, speculation: SpeculationOptions = NO_SPECULATION, options: EngineOptions = ENGINE
) -> Iterator[DispatcherAlone]:
    spawn = partial(spawn_engine, ModelOptions(path=str(model_dir)), options, speculation=speculation)
    dispatcher = DispatcherAlone(
        spawner(lambda name: partial(spawn, name=name)), RolloutOptions(workers=n, engine=ENGINE)
    )
    try:
        dispatcher.start()
        yield dispatcher
    finally:
        dispatcher.close()


def asked() -> list[Request]:
    return make_requests(24, prompts=6, max_new_tokens=150)


Answer = dict[int, tuple[list[int], list[float], str]]


def answers(rollouts: list[Rollout]) -> Answer:
    found = {r.request_id: (r.tokens.tolist(), r.logprobs.tolist(), str(r.finish_reason)) for r in rollouts}
    assert len(found) == len(rollouts)
    return found


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, ray_head: str) -> Answer:
    with workers(1, model_dir) as dispatcher:
        done: list[Rollout] = []
        dispatcher.run(asked(), done.append)
    return answers(done)


def test_tokens_depend_on_the_weights_and_not_on_the_number_of_workers(
    tmp_path: Path, model_dir: Path, undisturbed: Answer
) -> None:
    assert len(undisturbed) == 24
    with workers(3, model_dir) as dispatcher:
        results = []
        for version, seed in ((1, 5), (2, 0)):  # other weights, and those of model_dir
            manifest, buffer = pack(hf_state_dict(tiny_model(tmp_path, seed=seed)), version)
            dispatcher.set_weights(manifest, ray.put(buffer))
            for status in statuses(dispatcher).values():
                assert (status.weights_version, status.weights_checksum) == (version, manifest.checksum)
                assert not status.torch_loaded  # the supervisor is not the engine
            done: list[Rollout] = []
            dispatcher.run(asked(), done.append)
            assert {r.weights_version for r in done} == {version}
            results.append(answers(done))
        assert results[0] != undisturbed
        assert results[1] == undisturbed


def test_sigkill_of_an_engine_and_of_an_actor_changes_no_token(model_dir: Path, undisturbed: Answer) -> None:
    with workers(2, model_dir) as dispatcher:
        victims = [status.pid for status in statuses(dispatcher).values()]
        [child] = child_pids(victims[0])
        for pid in (child, victims[1]):
            done: list[Rollout] = []

            def on_finished(rollout: Rollout, pid: int = pid, done: list[Rollout] = done) -> None:
                done.append(rollout)
                if len(done) == 3:
                    os.kill(pid, signal.SIGKILL)

            stats: DispatchStats = dispatcher.run(asked(), on_finished)
            assert answers(done) == undisturbed
            assert (stats.lost_workers, stats.failed) == (1, ())
            assert stats.reissued >= 1


def test_sigkill_of_one_rank_of_an_engine_changes_no_token(model_dir: Path, ray_head: str) -> None:
    """Its worker's requests are replayed by the other, and tokens are those of one process with the same sums."""
    core = engine(summed_in_parts(load_model(model_dir), 2), max_running=6, kv_tokens=2048)
    expected = answers(list(run(core, asked()).values()))
    two_ranks = ENGINE.model_copy(update={"tensor_parallel": 2})
    with workers(2, model_dir, options=two_ranks) as dispatcher:
        [first, _] = [child_pids(status.pid)[0] for status in statuses(dispatcher).values()]
        [rank] = child_pids(first)
        done: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            done.append(rollout)
            if len(done) == 3:
                os.kill(rank, signal.SIGKILL)

        stats: DispatchStats = dispatcher.run(asked(), on_finished)
        assert answers(done) == expected
        assert (stats.lost_workers, stats.failed) == (1, ())
        assert stats.reissued >= 1


@pytest.mark.long
def test_suffix_drafters_that_know_everything_change_no_token(
    tmp_path: Path, model_dir: Path, undisturbed: Answer
) -> None:
    """The same requests again, once every worker knows what all sampled: nearly every draft is right. An engine that
    is restarted knows it too, from the saved state."""
    requests = {request.request_id: request for request in asked()}
    options = SpeculationOptions(mode="fixed", strategies=("suffix:6",))
    with workers(2, model_dir, options) as dispatcher:
        rounds: list[list[Rollout]] = []
        for _ in range(3):
            done: list[Rollout] = []
            stats = dispatcher.run(asked(), done.append)
            assert answers(done) == undisturbed
            made = [(requests[r.request_id].prompt_tokens, r.tokens, stats.sampled_by[r.request_id]) for r in done]
            dispatcher.drafters.share(made)
            rounds.append(done)
            if len(rounds) == 2:
                assert dispatcher.drafters.save(str(tmp_path)) is None
                dispatcher.drafters.saved_as(str(tmp_path))
                for status in statuses(dispatcher).values():
                    os.kill(child_pids(status.pid)[0], signal.SIGKILL)
        lengths = [sum(len(r.tokens) for r in done) / sum(r.verifications for r in done) for done in rounds]
        assert lengths[1] > max(1.5, lengths[0])
        assert lengths[2] > max(1.5, lengths[0])


def child_pids(pid: int) -> list[int]:
    """Children of a process, all of its threads together."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in re.findall(r"\d+", (task / "children").read_text())]
