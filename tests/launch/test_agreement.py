"""The limit on the log-prob gap: who is named, and which numerics it allows for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from config.formats import FORMATS
from contracts.training import TrainSequence
from launch.config import Config, load_config
from launch.errors import PacelineError
from launch.run.agreement import DEFAULT_LIMITS, LOW_BIT_LIMITS, check_agreement, gap_limit

Write = Callable[..., Path]


def config(write_config: Write, *overrides: str) -> Config:
    return load_config(write_config(), overrides).config


@pytest.mark.parametrize("bad", [2e-3, float("inf"), float("nan")])
def test_only_the_worker_that_disagrees_is_named(write_config: Write, bad: float) -> None:
    gaps = {"logprob_gap/worker/rollout-0": 1e-7, "logprob_gap/worker/rollout-2": bad, "logprob_gap/max": 9.0}
    with pytest.raises(PacelineError, match="step 7") as caught:
        check_agreement(config(write_config), 7, gaps)
    assert "rollout-2" in caught.value.message
    assert "rollout-0" not in caught.value.message
    assert "rollout.max_logprob_gap" in str(caught.value.remedy)


def test_agreement_and_an_empty_step_pass(write_config: Write) -> None:
    check_agreement(config(write_config), 1, {"logprob_gap/worker/rollout-0": 9e-4, "logprob_gap/max": 9.0})
    check_agreement(config(write_config), 1, {})


def test_responses_of_older_weights_are_granted_the_policys_own_movement(write_config: Write) -> None:
    """By workers that drew enough of them; a limit that is written is one."""

    def drew(worker: str, tokens: int) -> TrainSequence:
        return TrainSequence(
            prompt_tokens=np.zeros(1, np.int32),
            response_tokens=np.zeros(tokens, np.int32),
            sampler_logprobs=np.zeros(tokens, np.float32),
            sampler_logprobs_t1=None,
            advantage=0.0,
            sampler=worker,
        )

    drawn = [drew("rollout-0", 200), drew("rollout-0", 200), drew("rollout-1", 20)]
    usual = config(write_config)
    moved = {"logprob_gap/worker/rollout-0": 0.1, "logprob_gap/worker/rollout-1": 2.0}
    check_agreement(usual, 2, moved, drawn, stale=True)
    with pytest.raises(PacelineError, match=r"rollout-0: 0\.1, rollout-1: 2"):
        check_agreement(usual, 2, moved, drawn)
    with pytest.raises(PacelineError, match="rollout-0: 3"):
        check_agreement(usual, 2, {**moved, "logprob_gap/worker/rollout-0": 3.0}, drawn, stale=True)
    with pytest.raises(PacelineError, match=r"rollout-0: 0\.1"):
        check_agreement(config(write_config, "rollout.max_logprob_gap=0.05"), 2, moved, drawn, stale=True)


@pytest.mark.parametrize("form", FORMATS)
def test_only_a_learner_that_computes_otherwise_is_granted_more(write_config: Write, form: str) -> None:
    def limit(*overrides: str) -> float:
        base = config(write_config, *overrides)
        rollout = base.rollout.model_copy(update={"quantization": form})
        return gap_limit(base.model_copy(update={"rollout": rollout}))

    assert limit() == DEFAULT_LIMITS["float32"]
    apart = limit("learner.quantization=none")
    assert apart == DEFAULT_LIMITS["float32"] + LOW_BIT_LIMITS[form]
    assert apart > 20 * {8: 2e-3, 4: 5e-3, 3: 2e-2, 2: 0.2}[FORMATS[form].bits], "what is expected is no fault"
    assert limit("rollout.engine.backend=vllm") == apart, "other kernels round other activations"


def test_without_a_format_neither_the_learners_key_nor_the_engine_changes_a_limit(write_config: Write) -> None:
    assert gap_limit(config(write_config, "learner.quantization=none")) == DEFAULT_LIMITS["float32"]
    assert gap_limit(config(write_config, "rollout.engine.backend=vllm")) == DEFAULT_LIMITS["float32"]


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 1e-3),
        (["model.dtype=bfloat16"], 0.1),
        (["learner.autocast_bf16=true"], 0.1),  # a float32 engine beside a bfloat16 learner is no fault
        (["learner.autocast_bf16=true", "rollout.max_logprob_gap=0.02"], 0.02),
    ],
)
def test_limit_follows_the_coarser_numerics(write_config: Write, overrides: list[str], limit: float) -> None:
    assert gap_limit(config(write_config, *overrides)) == limit
