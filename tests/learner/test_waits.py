"""A learner's step asks the device for nothing in its micro-batches, and once per optimizer step for loss and norm."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.training.recording import RecordingPlan, StepRecording
from config.objective import ObjectiveOptions, SamplerCorrectionOptions
from models.packed import PackedContext
from tests.learner.tiny import make_demonstrations, make_sequences, make_trainer
from tests.waits import NoWaits, WaitError

OBJECTIVES = {
    "GRPO": ObjectiveOptions(),
    "KL and entropy": ObjectiveOptions(kl="k3", kl_coef=0.05, entropy_coef=0.01),
    "GSPO": ObjectiveOptions(name="gspo"),
    "TBPO": ObjectiveOptions(name="tbpo"),
    "corrected": ObjectiveOptions(
        sampler_correction=SamplerCorrectionOptions(
            weights="sequence", truncate=2.0, mask="geometric", low=0.5, high=2.0
        )
    ),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize(
    "learner",
    [{}, {"autocast_bf16": True, "dtype": "bfloat16"}, {"activation_checkpointing": True}, {"packing": False}],
    ids=str,
)
def test_no_operation_of_a_step_waits(model_dir: Path, learner: dict[str, Any], objective: ObjectiveOptions) -> None:
    trainer = make_trainer(model_dir, objective=objective, mini_batches=2, micro_batch_tokens=40, **learner)
    trainer.module.chunk_rows = 7
    sequences = [replace(s, sampler=f"w{i % 3}") for i, s in enumerate(make_sequences())]
    recording = StepRecording(RecordingPlan(1 << 20), 0, torch.float32)
    with NoWaits():
        trainer.sft_step(make_demonstrations())
        result = trainer.rl_step(sequences, temperature=0.8, recording=recording)
        if objective.kl != "none":
            trainer.reference_kl(sequences, temperature=0.8)
    assert recording.records
    assert {"logprob_gap/worker/w0", "logprob_gap/worker/w2"} <= result.metrics.keys()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.bincount(x),
        lambda x: x.repeat_interleave(x),
        lambda x: torch.segment_reduce(x.float(), "sum", lengths=torch.tensor([3])),
        lambda x: PackedContext(torch.tensor([0, 3], dtype=torch.int32)),
    ],
)
def test_waits_are_seen(compute: Callable[[torch.Tensor], object]) -> None:
    with NoWaits(), pytest.raises(WaitError):
        compute(torch.tensor([1, 2, 3]))


def test_gaps_are_told_per_worker(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, micro_batch_tokens=40)
    sequences = [replace(s, sampler=f"w{i % 3}") for i, s in enumerate(make_sequences())]
    (whole,) = make_trainer(model_dir, packing=False, micro_batch_tokens=10**6).logprobs(sequences, temperature=1.0)
    lengths = [len(s.response_tokens) for s in sequences]
    gaps = np.split(np.abs(whole.numpy()), np.cumsum(lengths)[:-1])  # the sampler's log-probs are zeros
    metrics = trainer.rl_step(sequences, temperature=1.0).metrics
    for worker in range(3):
        expected = np.concatenate(gaps[worker::3]).mean()
        assert metrics[f"logprob_gap/worker/w{worker}"] == pytest.approx(expected, rel=1e-4)
    assert metrics["logprob_gap/mean"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
