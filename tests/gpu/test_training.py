"""The learner and the drafters' trainer on CUDA against the CPU, which other tests hold to oracles: numbers of whole
steps, in float32 and bfloat16. Skipped where there is no CUDA device, real or pretended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.spot.residence import Residence
from actors.training.parallel import Rank
from actors.training.recording import RecordingPlan, StepRecording
from actors.training.trainer import Trainer
from config.drafter import Algorithm, DrafterOptions
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import StepResult
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models import ops
from models.ops import varlen
from tests.drafter.training_support import ALGORITHMS, records_of
from tests.engine.support import tiny_model
from tests.learner.tiny import make_demonstrations, make_sequences, make_trainer, write_config

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
OBJECTIVE = ObjectiveOptions(kl="k3", kl_coef=0.05, entropy_coef=0.01)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
CHUNK_ROWS = 7  # several chunks of the head


def trainer_of(
    model: Path, device: torch.device, dtype: torch.dtype, optimizer: str = "adamw", **learner: Any
) -> Trainer:
    options = {"micro_batch_tokens": 64, "mini_batches": 2, "autocast_bf16": dtype is torch.bfloat16}
    trainer = Trainer(
        ModelOptions(path=str(model), dtype=str(dtype).removeprefix("torch.")),
        LearnerOptions(**(options | learner)),
        OBJECTIVE,
        rank=Rank(device=device),
    )
    trainer.module.chunk_rows = CHUNK_ROWS
    trainer.begin(OptimizerOptions(name=optimizer, lr=1e-3, eps=1e-4), 10)
    return trainer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_trainer(write_config(tmp_path / "config")).weights.export(tmp_path / "model")
    return tmp_path / "model"


def steps(trainer: Trainer) -> list[StepResult]:
    sequences = [replace(s, sampler=f"w{i % 2}") for i, s in enumerate(make_sequences(12))]
    return [
        trainer.sft_step(make_demonstrations()),
        trainer.rl_step(sequences, temperature=0.8),
        trainer.rl_step(sequences, temperature=1.0),
    ]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten().cpu() for p in trainer.module.parameters()])


def assert_alike(found: list[StepResult], expected: list[StepResult], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        assert one.losses == pytest.approx(other.losses, rel=tolerance, abs=tolerance)
        assert one.grad_norms == pytest.approx(other.grad_norms, rel=10 * tolerance)
        for name in ("entropy", "kl", "logprob_gap/mean", "logprob_gap/worker/w1"):
            if name in other.metrics:
                assert one.metrics[name] == pytest.approx(other.metrics[name], rel=tolerance, abs=tolerance), name


@DTYPES
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "muon"}, {"activation_checkpointing": True}, {"packing": False}],
    ids=["adamw", "muon", "checkpointing", "padded"],
)
def test_steps_of_the_learner_are_the_cpus(options: dict[str, Any], dtype: torch.dtype, model: Path) -> None:
    ours, theirs = trainer_of(model, CUDA, dtype, **options), trainer_of(model, CPU, dtype, **options)
    before = weights(theirs)
    assert_alike(steps(ours), steps(theirs), TOLERANCE[dtype])
    moved = weights(theirs) - before
    assert (weights(ours) - weights(theirs)).norm() <= 20 * TOLERANCE[dtype] * moved.norm()
    assert {p.dtype for p in ours.module.parameters()} == {torch.float32}


@DTYPES
def test_without_master_weights_they_are_the_cpus_too(dtype: torch.dtype, model: Path) -> None:
    ours, theirs = (trainer_of(model, device, dtype, autocast_bf16=False) for device in (CUDA, CPU))
    assert_alike([ours.sft_step(make_demonstrations())], [theirs.sft_step(make_demonstrations())], TOLERANCE[dtype])
    assert {p.dtype for p in ours.module.parameters()} == {dtype}


@DTYPES
def test_recorded_states_are_the_cpus(dtype: torch.dtype, model: Path) -> None:
    found = []
    for device in (CUDA, CPU):
        recording = StepRecording(RecordingPlan(1 << 20, (0,)), 3, dtype)
        trainer_of(model, device, dtype).rl_step(make_sequences(12), temperature=1.0, recording=recording)
        found.append({tuple(record.tokens): record for record in recording.records})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert len(ours) == 12
    for tokens, record in ours.items():
        pair = (torch.frombuffer(bytearray(r.states), dtype=dtype).float() for r in (record, theirs[tokens]))
        torch.testing.assert_close(*pair, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@DTYPES
def test_a_checkpoint_goes_on_and_what_is_published_is_the_model(
    dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    whole, stopped = trainer_of(model, CUDA, dtype), trainer_of(model, CUDA, dtype)
    for trainer in (whole, stopped):
        steps(trainer)
    stopped.save(tmp_path / "checkpoint")
    resumed = trainer_of(model, CUDA, dtype)
    resumed.load(tmp_path / "checkpoint")
    assert_alike(steps(resumed), steps(whole), TOLERANCE[dtype])
    ours, theirs = resumed.weights.publish(1), whole.weights.publish(1)
    assert ours is not None
    assert theirs is not None
    assert [t.name for t in ours[0].tensors] == [t.name for t in theirs[0].tensors]
    resumed.weights.export(tmp_path / "exported")
    again = trainer_of(tmp_path / "exported", CUDA, dtype)
    assert (weights(again) - weights(resumed)).abs().max() <= 0.01 * weights(resumed).abs().max()


@DTYPES
def test_gradients_of_ragged_segments_are_the_oracles(dtype: torch.dtype) -> None:
    """Through torch's variable-length kernel in bfloat16, which must be sound on this machine, and through groups."""
    lengths, heads, dim = [1, 0, 130, 64, 1, 200], (4, 2, 2), 64
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(sum(lengths), count, dim, generator=generator).to(dtype) for count in heads]
    grad = torch.randn(sum(lengths), heads[0], dim, generator=generator).to(dtype)
    offsets, segments = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), ops.Segments(lengths)
    sound = varlen.variable_length(CUDA, dtype, *heads[:2], dim) is not None
    assert sound == (dtype is torch.bfloat16 and torch.cuda.get_device_capability(CUDA) >= (8, 0))
    results = []
    for way in ("chosen", "groups", "cpu"):
        place, kind = (CPU, torch.float32) if way == "cpu" else (CUDA, dtype)
        leaves = [x.to(place, kind).requires_grad_() for x in given]
        if way == "groups":
            out = varlen.grouped_attention(leaves[0], leaves[1], leaves[2], segments.groups_on(CUDA), dim**-0.5)
        else:
            q, k, v = leaves
            out = ops.packed_attention(q, k, v, offsets.to(place), dim**-0.5, segments=segments)
        found = (out, *torch.autograd.grad(out, leaves, grad.to(place, kind)))
        results.append([x.detach().float().cpu() for x in found])
    for one, other, expected in zip(*results, strict=True):
        for ours in (one, other):
            assert (ours - expected).abs().max() <= 0.02 * expected.abs().max()


@DTYPES
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sessions_of_a_drafters_trainer_are_the_cpus(algorithm: Algorithm, dtype: torch.dtype, tmp_path: Path) -> None:
    """In and out of the device, a new version of the target meanwhile, records of an older one."""
    target = tiny_model(tmp_path, "qwen2", invariant=False).requires_grad_(False)
    records = records_of(target, [9, 30, 14])
    old = [replace(records[0], target_version=-1), *records[1:]]
    heads = [replace(TargetHead.of(target.to(dtype), 0), version=version) for version in (0, 1)]
    options = DrafterOptions(algorithm=algorithm, warmup_steps=0)
    ours, theirs = Residence(DrafterTrainer(heads[0], options), CUDA), DrafterTrainer(heads[0], options)
    for session in range(2):
        ours.move_in()
        for batch in (records, old):
            fresh = [replace(r, target_version=r.target_version + session) for r in batch]
            one, other = ours.trainer.micro_step(fresh), theirs.micro_step(fresh)
            assert one.updated
            assert one.positions == other.positions
            assert one.loss == pytest.approx(other.loss, rel=TOLERANCE[dtype])
        ours.set_head(heads[1])
        theirs.set_head(heads[1])
        ours.move_out()
        assert all(p.device == CPU for p in ours.trainer.model.parameters())
    assert ours.trainer.export()[0].version == 4
    moved = torch.cat([p.detach().flatten() for p in ours.trainer.model.parameters()])
    expected = torch.cat([p.detach().flatten() for p in theirs.model.parameters()])
    start = torch.cat([p.detach().flatten() for p in DrafterTrainer(heads[0], options).model.parameters()])
    assert (moved - expected).norm() <= 10 * TOLERANCE[dtype] * (expected - start).norm()
