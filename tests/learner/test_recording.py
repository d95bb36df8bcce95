"""Hidden states from the learner's log-prob pass: bitwise those of a fresh forward, within the budget, for nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.training.recording import RecordingPlan, StepRecording
from contracts.records import SequenceRecord
from models.checkpoint import init_model
from tests.engine.test_recording import check
from tests.learner.tiny import make_sequences, make_trainer

BIG = 1 << 30
F32 = torch.float32


def by_tokens(records: list[SequenceRecord]) -> dict[bytes, SequenceRecord]:
    return {record.tokens.tobytes(): record for record in records}


@pytest.mark.parametrize("layers", [(), (0, 1)])
@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"micro_batch_tokens": 32},
        {"micro_batch_tokens": 64, "packing": False},
        {"mini_batches": 3},  # the weights change in the step, the states do not
        {"activation_checkpointing": True},
    ],
)
def test_rows_are_those_of_a_fresh_forward_and_no_number_changes(
    model_dir: Path, learner: dict[str, object], layers: tuple[int, ...]
) -> None:
    sequences = make_sequences(11)
    recording = StepRecording(RecordingPlan(BIG, layers), 7, F32)
    result = make_trainer(model_dir, **learner).rl_step(sequences, temperature=0.8, recording=recording)
    plain = make_trainer(model_dir, **learner).rl_step(sequences, temperature=0.8)
    assert (result.losses, result.grad_norms) == (plain.losses, plain.grad_norms)
    model = init_model(model_dir, 5)
    records = by_tokens(recording.records)
    assert len(recording.records) == len(records) == 11
    for s in sequences:
        record = records[np.concatenate((s.prompt_tokens, s.response_tokens)).tobytes()]
        assert record.prompt_length == len(s.prompt_tokens)
        check(model, record, version=7, layers=layers)
    assert result.metrics["recording/sequences"] == 11
    assert result.metrics["recording/bytes"] == sum(record.bytes for record in recording.records)
    assert 0 < result.metrics["recording/seconds"] < 60


def test_the_budget_holds_and_length_has_no_part_in_the_choice(model_dir: Path) -> None:
    trainer = make_trainer(model_dir)
    sequences = make_sequences(40, longest=30)
    whole = StepRecording(RecordingPlan(BIG), 0, F32)
    trainer.rl_step(sequences, temperature=1.0, recording=whole)
    everything = sum(record.bytes for record in whole.records)
    chosen: list[set[bytes]] = []
    lengths: list[int] = []
    for version in range(60):
        recording = StepRecording(RecordingPlan(everything // 3, seed=1), version, F32)
        recording.choose(sequences, 32)
        kept = [s for s in sequences if id(s) in recording._kept]
        size = sum(4 * 32 * (len(s.prompt_tokens) + len(s.response_tokens) - 1) for s in kept)
        assert everything / 6 < size < everything / 3
        chosen.append({s.response_tokens.tobytes() for s in kept})
        lengths += [len(s.response_tokens) for s in kept]
    again = StepRecording(RecordingPlan(everything // 3, seed=1), 0, F32)
    again.choose(sequences, 32)
    assert {s.response_tokens.tobytes() for s in sequences if id(s) in again._kept} == chosen[0] != chosen[1]
    mean = np.mean([len(s.response_tokens) for s in sequences])
    assert 0.9 < np.mean(lengths) / mean < 1.1
    recording = StepRecording(RecordingPlan(everything // 3), 0, F32)
    trainer.rl_step(sequences, temperature=1.0, recording=recording)
    assert 0 < sum(record.bytes for record in recording.records) <= everything // 3


def test_states_are_what_the_engine_would_have(model_dir: Path) -> None:
    """In the engine's dtype, whatever the learner computes in."""
    recording = StepRecording(RecordingPlan(BIG), 0, torch.bfloat16)
    trainer = make_trainer(model_dir, dtype="bfloat16", autocast_bf16=True)
    trainer.rl_step(make_sequences(3), temperature=1.0, recording=recording)
    assert {(r.dtype, r.width, r.states.shape[1]) for r in recording.records} == {("bfloat16", 32, 64)}


def test_layers_of_a_foreign_network_are_an_error(model_dir: Path) -> None:
    trainer = make_trainer(model_dir, implementation="transformers")
    sequences = make_sequences(3)
    recording = StepRecording(RecordingPlan(BIG), 0, F32)
    trainer.rl_step(sequences, temperature=1.0, recording=recording)
    assert {record.width for record in recording.records} == {32}
    with pytest.raises(ValueError, match=r"model\.implementation"):
        trainer.rl_step(sequences, temperature=1.0, recording=StepRecording(RecordingPlan(BIG, (0,)), 0, F32))
