"""What the study of a task's prompts makes of known successes and lengths."""

import numpy as np
import pytest

from benchmarks.harness import DEMO
from experiments.task_spread import Sampled, late, room, tables
from launch.config import load_config

CONFIG = load_config(DEMO / "config.yaml").config


def sampled(successes: list[float], lengths: list[int], samples: int = 64) -> Sampled:
    """Prompts whose first responses succeed, all of one length."""
    rewards = np.stack([np.arange(samples) < success * samples for success in successes]).astype(np.float64)
    tokens = np.repeat(np.asarray(lengths, np.float64)[:, None], samples, axis=1)
    return Sampled(rewards, tokens, rewards > 0)


def test_prompts_that_are_alike_leave_nothing_to_save() -> None:
    found = room(sampled([0.5] * 32, [40] * 32), CONFIG, epochs=1)
    assert (found["bound"], found["bound_max"]) == (0, 0)
    assert found["saved"]["1.0"] == pytest.approx(0)


def test_half_the_tokens_on_prompts_without_spread_are_half_the_variance() -> None:
    """Every batch holds all prompts: half of them are never solved, so that the others could have twice as many."""
    size = CONFIG.rollout.prompts_per_step
    found = room(sampled([0.0, 0.5] * (size // 2), [40] * size), CONFIG, epochs=2)
    assert found["bound"] == pytest.approx(0.5)
    assert 0.3 < found["saved"]["1.0"] < 0.5, "every prompt gets two responses at least"


def test_late_responses_are_those_beyond_the_quantile_and_its_grace() -> None:
    found = late(sampled([1.0] * 9 + [0.0], [50] * 9 + [300]))
    assert found["threshold_tokens"] == 66
    assert found["responses"] == pytest.approx(0.1)
    assert found["tokens_beyond"] == pytest.approx(234 / 750)
    assert (found["their_reward"], found["share_of_reward"]) == (0, 0)
    assert tables({}).startswith("| ")
