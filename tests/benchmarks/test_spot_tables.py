"""The arithmetic of the benchmarks of spot training."""

import numpy as np
import pytest

from benchmarks import preemption
from experiments import recording


def test_preemptions_are_held_against_one_micro_step_and_50_ms() -> None:
    micro_steps = np.full(10, 0.1)
    taken = np.zeros((200, len(preemption.PARTS)))
    total = preemption.PARTS.index("total")
    taken[:, total] = np.linspace(0.01, 0.14, 200)
    answer = preemption.summary(taken, micro_steps)
    assert (answer["bound_ms"], answer["preemptions"], answer["kept"]) == (150.0, 200, True)
    assert answer["total_ms"]["max_ms"] == 140.0
    taken[-3:, total] = 0.2  # p99 is beyond
    assert preemption.summary(taken, micro_steps)["kept"] is False
    taken[-3:-1, total] = 0.1
    assert preemption.summary(taken, micro_steps)["kept"] is True


def test_recorded_requests_have_long_tailed_lengths() -> None:
    lengths = [request.sampling.max_new_tokens for request in recording.long_tailed(500)]
    assert np.median(lengths) == pytest.approx(42, abs=10)
    assert max(lengths) == 200
