"""A real group whose ranks are killed is made again, and computes bitwise what it would have."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.learner_group import LearnerGroup
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from launch.failover import FailoverLearner, KeptSteps
from tests.context import run_context
from tests.learner.tiny import make_sequences

pytestmark = [pytest.mark.ray, pytest.mark.slow]
# What a restart could lose: the moments, the place in the schedule, the reference, what is rounded.
OPTIMIZER = OptimizerOptions(lr=1e-2, warmup_steps=3, schedule="linear")
OBJECTIVE = ObjectiveOptions(kl="k3", kl_coef=0.1)


def sequences(step: int) -> list[TrainSequence]:
    drawn = make_sequences(seed=step)
    return [replace(s, sampler=f"rollout-{i % 2}", advantage=float(i - 1)) for i, s in enumerate(drawn)]


@contextmanager
def killed(pid: int) -> Iterator[None]:
    """The process takes the call inside the block, and dies of it."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.long
def test_two_ranks_that_are_killed_in_a_step_and_in_a_checkpoint_go_on_bitwise(
    model_dir: Path, tmp_path: Path, ray_head: str
) -> None:
    events: list[tuple[str, str]] = []
    groups: list[LearnerGroup] = []

    def start() -> LearnerGroup:
        group = LearnerGroup(
            ModelOptions(path=str(model_dir)),
            LearnerOptions(ranks=2, threads=1, mini_batches=2),
            OBJECTIVE,
            temperature=1.0,
            init="random",
            seed=5,
            quantization="w8a8",
            context=context,
        )
        groups.append(group)
        return group

    def checkpoint(name: str) -> str:
        (tmp_path / name).mkdir()
        learner.save(tmp_path / name)
        learner.saved_as(tmp_path / name)
        return name

    def steps(first: int, last: int) -> Iterator[object]:
        for step in range(first, last + 1):
            yield [values.tobytes() for values in learner.reference_kl(sequences(step), step)]
            result = learner.train_step(sequences(step), step, asked=20)
            yield result.losses, result.grad_norms, result.metrics
            manifest, ref = learner.publish(step)
            yield manifest, ray.get(ref, timeout=60).tobytes()

    config = SimpleNamespace(learner=SimpleNamespace(max_restarts=2))
    context = run_context(config, on_event=lambda *event: events.append(event))
    starter: Any = SimpleNamespace(start=start, missing=lambda: "", undecided=lambda: False)
    with FailoverLearner(starter, KeptSteps(tmp_path / "kept"), context) as learner:
        learner.start()
        learner.begin(OPTIMIZER, 12)
        checkpoint("first")
        undisturbed = list(steps(1, 4))
        assert events == []
        learner.load(tmp_path / "first")
        found = list(steps(1, 2))
        with killed(groups[-1].places[1].pid):
            found += steps(3, 3)  # the reference's KL is what it dies in
        with killed(groups[-1].places[0].pid):
            checkpoint("second")
        found += steps(4, 4)
        assert len(groups) == 3
        assert found == undisturbed
    assert [kind for kind, _ in events] == ["learner_lost", "learner_restarted"] * 2
    assert "learner rank 1" in events[0][1]
    assert "lost in save" in events[2][1]
