"""A micro-step of a drafter's trainer asks the device for nothing until it brings its numbers to the host, together."""

from dataclasses import replace
from pathlib import Path

import pytest

from config.drafter import Algorithm, DrafterOptions
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from tests.drafter.training_support import records_of
from tests.engine.support import tiny_model
from tests.waits import NoWaits


@pytest.mark.parametrize("algorithm", ["eagle", "hass", "eagle3", "osd"])
@pytest.mark.parametrize("stale", [False, True])
def test_no_operation_of_a_micro_step_waits(algorithm: Algorithm, stale: bool, tmp_path: Path) -> None:
    target = tiny_model(tmp_path, "qwen2", invariant=False).requires_grad_(False)
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(algorithm=algorithm))
    records = records_of(target, [9, 30, 14])
    if stale:
        records[1] = replace(records[1], target_version=-1)
    with NoWaits(tensor for name, tensor in trainer.state_dict().items() if name.endswith(".step")):
        result = trainer.micro_step(records)
        assert trainer.micro_step([]).positions == 0
        assert trainer.evaluate(records).positions == result.positions
    assert result.updated
    assert result.loss > 0
