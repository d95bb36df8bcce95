"""The facade over rank actors: whole life, errors that pass through, and lost ranks found out by name."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from actors.data_buffer import DataBufferActor
from actors.learner_group import LearnerGroup
from actors.training.checkpoint import CheckpointError
from actors.training.errors import LearnerLostError
from config.drafter import BufferOptions
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from models.checkpoint import init_model
from models.manifest import WeightsManifest
from tests.engine.test_recording import fresh_rows
from tests.learner.tiny import make_demonstrations, make_sequences, make_trainer

OPTIMIZER = OptimizerOptions(lr=1e-2)


def test_the_driver_side_needs_no_torch() -> None:
    code = "import sys, actors.learner_group, actors.learner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_learners_teams_have_a_fixed_size_whatever_the_environment_says() -> None:
    """OMP_DYNAMIC=TRUE made the losses of a warm start depend on the machine's load."""
    code = """
import ctypes, os
from actors.learner import fix_threads
fix_threads(2)
import torch
[openmp] = {line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}
assert ctypes.CDLL(openmp).omp_get_dynamic() == 0
assert torch.get_num_threads() == 2
assert os.environ["MKL_DYNAMIC"] == "FALSE"
"""
    environment = os.environ | {"OMP_DYNAMIC": "TRUE", "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, env=environment).returncode == 0


def make_group(
    model_dir: Path, ranks: int, objective: ObjectiveOptions | None = None, **learner: object
) -> LearnerGroup:
    group = LearnerGroup(
        ModelOptions(path=str(model_dir)),
        LearnerOptions(ranks=ranks, threads=1, **learner),
        objective or ObjectiveOptions(),
        temperature=1.0,
        init="random",
        seed=5,
        start_timeout_s=120,
    )
    group.begin(OPTIMIZER, 20)
    return group


@pytest.fixture(scope="module")
def pair(model_dir: Path, ray_head: str) -> Iterator[LearnerGroup]:
    with make_group(model_dir, 2) as group:
        yield group


@pytest.mark.ray
@pytest.mark.slow
def test_two_ranks_behind_the_facade_equal_one_trainer(pair: LearnerGroup, model_dir: Path, tmp_path: Path) -> None:
    alone = make_trainer(model_dir, optimizer=OPTIMIZER)
    assert pair.computes_with.startswith("cpu, threads: 1, ")
    assert pair.sft_step(make_demonstrations()).losses == pytest.approx(
        alone.sft_step(make_demonstrations()).losses, rel=1e-5
    )
    for step in range(2):
        got, expected = (
            pair.train_step(make_sequences(seed=step), step),
            alone.rl_step(make_sequences(seed=step), temperature=1.0),
        )
        assert got.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
        assert got.tokens >= expected.tokens  # what sequences of different ranks begin with alike is computed twice
        assert got.started_s > 0

    pair.save(tmp_path / "checkpoint")
    after = pair.train_step(make_sequences(seed=7), 2)
    pair.load(tmp_path / "checkpoint")
    assert pair.train_step(make_sequences(seed=7), 2).losses == after.losses

    with pytest.raises(ValueError, match="sequence 0: advantage is inf"):  # the rank's own error, unwrapped
        pair.train_step([replace(s, advantage=float("inf")) for s in make_sequences(1)])
    with pytest.raises(FileNotFoundError, match="holds no learner checkpoint"):
        pair.load(tmp_path / "nothing")

    pair.export(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.ray
@pytest.mark.slow
def test_kl_to_the_reference_comes_from_all_ranks_in_the_order_of_the_sequences(model_dir: Path, ray_head: str) -> None:
    objective = ObjectiveOptions(name="reinforce_pp")
    alone = make_trainer(model_dir, objective=objective, optimizer=OPTIMIZER)
    sequences = make_sequences(9)
    with make_group(model_dir, 2, objective) as group:
        for learner in (group.train_step, lambda given: alone.rl_step(given, temperature=1.0)):
            learner(make_sequences(seed=1))
        found = group.reference_kl(sequences)
        assert group.reference_kl([]) == []
    expected = alone.reference_kl(sequences, temperature=1.0)
    for i, values in enumerate(found):
        assert values == pytest.approx(expected[i], rel=1e-3, abs=1e-4)
    assert max(abs(values).max() for values in found) > 1e-3


@pytest.mark.ray
@pytest.mark.slow
def test_every_rank_hands_hidden_states_of_its_share_to_the_data_buffer(model_dir: Path, ray_head: str) -> None:
    buffer = ray.remote(DataBufferActor).options(num_cpus=0).remote(BufferOptions())
    with make_group(model_dir, 2) as group:
        group.publish(4)
        group.record_into({group.places[0].node_id: buffer}, max_bytes=1 << 20, eagle3=True, layers=(0, 0, 1))
        sequences = make_sequences(9)
        metrics = group.train_step(sequences, 5).metrics
        deadline_s = time.monotonic() + 30
        while (stats := ray.get(buffer.stats.remote(), timeout=30)).sequences < 9:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert (stats.sequences, stats.bytes) == (9, metrics["recording/bytes"])
        records = ray.get(buffer.sample.remote(10_000, 5), timeout=30)
        group.records = False
        assert "recording/bytes" not in group.train_step(sequences, 6).metrics
    whole = {np.concatenate((s.prompt_tokens, s.response_tokens)).tobytes() for s in sequences}
    assert {record.tokens.tobytes() for record in records} == whole
    assert {(record.target_version, record.width) for record in records} == {(4, 4 * 32)}
    model = init_model(model_dir, 5)
    for record in records:
        want = fresh_rows(model, record.tokens, (0, 0, 1))[:-1]
        got = torch.from_numpy(record.states.copy()).view(torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ray.kill(buffer)


@pytest.mark.ray
@pytest.mark.slow
def test_published_buffers_are_zero_copy_arrays_that_outlive_the_next_version(pair: LearnerGroup) -> None:
    from models.weights import unpack

    first, first_ref = pair.publish(1)
    pair.sft_step(make_demonstrations())
    second, second_ref = pair.publish(2)
    assert isinstance(first, WeightsManifest)
    assert (first.version, second.version) == (1, 2)
    assert first.checksum != second.checksum
    old, new = ray.get(first_ref, timeout=30), ray.get(second_ref, timeout=30)
    assert not old.flags.writeable  # a view into the object store
    assert len(dict(unpack(first, old))) == len(dict(unpack(second, new))) == 2 * 11 + 2


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_rank_is_named(model_dir: Path, ray_head: str) -> None:
    with make_group(model_dir, 2, timeout_s=60.0) as group:
        place = group.places[1]
        os.kill(place.pid, signal.SIGKILL)
        with pytest.raises(LearnerLostError, match=f"learner rank 1 on node {place.node_ip}") as lost:
            group.train_step(make_sequences(), 3)
        assert (lost.value.rank, lost.value.call) == (1, "train_step 3")
        assert f"its process {place.pid} has ended" in lost.value.reason
        assert not re.search(r"actor_id|class_name|namespace|[0-9a-f]{16}", str(lost.value))


@pytest.mark.ray
@pytest.mark.slow
def test_a_silent_rank_is_lost_after_its_deadline(model_dir: Path, ray_head: str) -> None:
    with make_group(model_dir, 1) as group:
        group._timeout_s = 1.0
        os.kill(group.places[0].pid, signal.SIGSTOP)
        try:
            with pytest.raises(LearnerLostError, match=r"learner rank 0 .* no answer in 1 s"):
                group.train_step(make_sequences(), 0)
        finally:
            os.kill(group.places[0].pid, signal.SIGCONT)


@pytest.mark.ray
@pytest.mark.slow
def test_a_model_that_cannot_be_built_is_the_error(tmp_path: Path, ray_head: str) -> None:
    with pytest.raises(Exception, match=r"config\.json does not exist"):
        make_group(tmp_path, 1)
    assert issubclass(CheckpointError, RuntimeError)
