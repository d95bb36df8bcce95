"""What the drafter benchmarks compare is comparable: padded batches say what packed ones say."""

from pathlib import Path

import pytest
import torch

from benchmarks.drafter_packing import padded_loss
from config.drafter import DrafterOptions
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from tests.drafter.training_support import drafter_for, records_of
from tests.engine.support import tiny_model


@pytest.mark.parametrize("dense", [True, False])
def test_padding_changes_no_loss_and_no_gradient(tmp_path: Path, dense: bool) -> None:
    target = tiny_model(tmp_path).requires_grad_(False)
    records = records_of(target, [9, 23, 4, 14], all_layers=False)
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(), model=drafter_for(target, "eagle"))
    expected = trainer.evaluate(records)
    loss, rows = padded_loss(trainer, records, dense=dense)
    assert rows == expected.positions == 7 + 21 + 2 + 12
    assert float(loss.detach()) / rows == pytest.approx(expected.loss, rel=1e-5)
    weight = trainer.model.fuse.weight
    (padded,) = torch.autograd.grad(loss, weight)
    packed = sum(torch.autograd.grad(padded_loss(trainer, [r], dense=False)[0], weight)[0] for r in records)
    torch.testing.assert_close(padded, packed, rtol=1e-4, atol=1e-5)
