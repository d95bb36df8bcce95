"""The native engine over several processes: it draws what one process draws that sums the same parts in their order."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from actors.engine.native.ranks.join import device_environment
from actors.engine.process import EngineStartError, RolloutEngine, spawn_engine
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from contracts.engine import Abort, Sleep, Submit, UpdateWeights, Wake
from contracts.rollout import EngineIdle, FinishReason, Progress, Rollout, Slept, WeightsLoaded
from launch.config import load_config
from launch.errors import UsageError
from models import weights
from models.checkpoint import hf_state_dict, init_model, load_model, save_model
from planner.calibrate import calibrate
from tests.engine.support import assert_same, engine, make_requests, rollouts, run, write_config
from tests.engine.test_process import collect, wait_for_death
from tests.launch.test_memory import EXAMPLES
from tests.models.ranks import summed_in_parts

OPTIONS = EngineOptions(
    max_running=8, kv_tokens=4096, block_tokens=8, threads=1, progress_every_tokens=5, tensor_parallel=2
)
PLAIN = SpeculationOptions(mode="off")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), 0)


def saved(directory: Path, seed: int) -> Path:
    """Llama, so that embedding and head are two tensors."""
    config = write_config(directory / "config", "llama", num_attention_heads=8, num_key_value_heads=4)
    save_model(init_model(config, seed), directory / "hf")
    return directory / "hf"


def spawned(model_dir: Path, ranks: int = 2, speculation: SpeculationOptions = PLAIN) -> RolloutEngine:
    options = OPTIONS.model_copy(update={"tensor_parallel": ranks})
    return spawn_engine(ModelOptions(path=str(model_dir)), options, name="engine-0", speculation=speculation)


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[RolloutEngine]:
    engine = spawned(model_dir)
    yield engine
    engine.close()


def reference(model_dir: Path, ranks: int = 2) -> dict[int, Rollout]:
    return run(engine(summed_in_parts(load_model(model_dir), ranks)), make_requests(12, prompts=4, seed=1))


def drawn(spawned: RolloutEngine) -> dict[int, Rollout]:
    spawned.send(Submit(tuple(make_requests(12, prompts=4, seed=1))))
    return rollouts(collect(spawned, EngineIdle))


def followers(spawned: RolloutEngine) -> list[psutil.Process]:
    return psutil.Process(spawned.pid).children()


def test_four_ranks_draw_bitwise_what_one_process_draws(model_dir: Path) -> None:
    many = spawned(model_dir, 4)
    try:
        assert len(followers(many)) == 3
        assert_same(drawn(many), reference(model_dir, 4))
        processes = followers(many)
    finally:
        many.close()
    assert not any(process.is_running() for process in processes)


def test_one_rank_differs_by_rounding(model_dir: Path) -> None:
    whole = run(engine(load_model(model_dir)), make_requests(12, prompts=4, seed=1))
    parted = reference(model_dir)
    for request_id, rollout in whole.items():
        assert parted[request_id].tokens.tolist() == rollout.tokens.tolist()  # here no draw was near another
        np.testing.assert_allclose(parted[request_id].logprobs, rollout.logprobs, atol=1e-4)
    assert any(parted[i].logprobs.tobytes() != rollout.logprobs.tobytes() for i, rollout in whole.items())


def test_new_weights_reach_every_rank_and_sleep_gives_memory_back(
    two: RolloutEngine, model_dir: Path, tmp_path: Path
) -> None:
    assert_same(drawn(two), reference(model_dir))
    other = saved(tmp_path, 5)
    two.send(Sleep())
    assert collect(two, Slept) == [Slept()]
    two.send(Wake())
    manifest, buffer = weights.pack(hf_state_dict(load_model(other)), version=7)
    two.send(UpdateWeights(manifest), buffer)
    (loaded,) = [event for event in collect(two, WeightsLoaded) if isinstance(event, WeightsLoaded)]
    assert (loaded.version, loaded.checksum) == (7, manifest.checksum)
    new = drawn(two)
    assert_same(new, reference(other))
    assert {rollout.weights_version for rollout in new.values()} == {7}
    first = weights.pack(hf_state_dict(load_model(model_dir)), version=8)
    two.send(UpdateWeights(first[0]), first[1])
    collect(two, WeightsLoaded)
    assert_same(drawn(two), reference(model_dir))


def test_an_aborted_request_keeps_what_it_has_and_can_go_on(two: RolloutEngine, model_dir: Path) -> None:
    (request,) = make_requests(1, seed=2, max_new_tokens=200)
    (expected,) = run(engine(summed_in_parts(load_model(model_dir), 2)), [request]).values()
    two.send(Submit((request,)))
    collect(two, Progress)
    two.send(Abort((request.request_id,)))
    (aborted,) = rollouts(collect(two, EngineIdle)).values()
    assert aborted.finish_reason is FinishReason.ABORT
    count = len(aborted.tokens)
    assert 0 < count < 200
    assert aborted.tokens.tolist() == expected.tokens[:count].tolist()
    assert aborted.logprobs.tobytes() == expected.logprobs[:count].tobytes()


@pytest.mark.parametrize("strategy", ["suffix:6x2/8", pytest.param("ngram:3", marks=pytest.mark.long), "eagle:2x2/4"])
def test_drafts_change_no_token(model_dir: Path, strategy: str) -> None:
    """Trees too, whose accepted nodes every rank moves. EAGLE drafts on rank 0, which has embedding and head whole."""
    options = SpeculationOptions(mode="fixed", strategies=(strategy,), eagle=EagleOptions(path="random"))
    many = spawned(model_dir, speculation=options)
    try:
        assert_same(drawn(many), reference(model_dir))
        assert_same(drawn(many), reference(model_dir))  # of what the drafters have seen
    finally:
        many.close()


def test_a_killed_rank_ends_the_engine_by_name(model_dir: Path) -> None:
    many = spawned(model_dir)
    many.send(Submit(tuple(make_requests(4, seed=2, max_new_tokens=200))))
    (follower,) = followers(many)
    follower.send_signal(signal.SIGKILL)
    reason = wait_for_death(many)
    many.close()
    assert "tensor-parallel rank 1 of 2" in reason
    assert "SIGKILL" in reason


@pytest.mark.long
def test_a_rank_that_is_killed_while_nothing_is_computed_is_missed(model_dir: Path) -> None:
    many = spawned(model_dir)
    followers(many)[0].send_signal(signal.SIGKILL)
    reason = wait_for_death(many)
    many.close()
    assert "tensor-parallel rank 1 of 2" in reason


@pytest.mark.long
def test_ranks_end_with_their_engine(model_dir: Path) -> None:
    many = spawned(model_dir)
    (follower,) = followers(many)
    os.kill(many.pid, signal.SIGKILL)
    wait_for_death(many)
    many.close()
    deadline = time.monotonic() + 60
    while follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [({}, "2"), ({"CUDA_VISIBLE_DEVICES": "4,5, 6,7"}, "6"), ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, "GPU-c")],
)
def test_a_rank_sees_its_own_gpu_of_those_of_its_engine(seen: dict[str, str], expected: str) -> None:
    assert device_environment(2, "cuda", seen) == {"CUDA_VISIBLE_DEVICES": expected}
    assert device_environment(2, "cpu", seen) == {}


def test_calibrate_and_a_start_in_few_bits_say_that_ranks_are_in_the_way(model_dir: Path) -> None:
    config = load_config(EXAMPLES / "guess_and_check/config.yaml", ["rollout.engine.tensor_parallel=2"]).config
    with pytest.raises(UsageError, match="2 ranks, and one process measures one"):
        next(calibrate(config, None, 1.0))
    with pytest.raises(EngineStartError, match=r"does not go with rollout\.quantization=w8a8"):
        spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS, quantization="w8a8")


@pytest.mark.long
def test_a_model_that_ranks_cannot_share_is_said_at_the_start(model_dir: Path) -> None:
    with pytest.raises(EngineStartError, match="3 ranks cannot share the model's 8 heads"):
        spawned(model_dir, 3)
