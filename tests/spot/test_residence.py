"""A trainer that moves between the host and a device: the same numbers, and nothing of it stays behind."""

import gc
import weakref

import pytest
import torch

from actors.spot.residence import Residence, on_device
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from models.checkpoint import load_model
from tests.spot.support import options_of, record, save_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> TargetHead:
    return TargetHead.of(load_model(save_target(tmp_path_factory.mktemp("target"))), 0)


def newer(head: TargetHead, version: int) -> TargetHead:
    embedding = head.embedding + 0.1 * version
    return TargetHead(
        config=head.config, version=version, embedding=embedding, norm=head.norm, lm_head=embedding, rope=head.rope
    )


def test_sessions_on_a_device_are_one_training(head: TargetHead) -> None:
    """The device is the CPU here too, but for the trainer it is another place."""
    stays = DrafterTrainer(head, options_of())
    residence = Residence(DrafterTrainer(head, options_of()), CPU, moves=True)
    for session in range(3):
        residence.move_in()
        here = residence.trainer
        residence.move_in()
        assert residence.trainer is here, "it is there already"
        for seed in range(3):
            expected = stays.micro_step([record(10 * session + seed)])
            assert residence.trainer.micro_step([record(10 * session + seed)]).loss == expected.loss
        residence.move_out()
        assert residence.trainer is not here
        assert residence.trainer.export()[0] == stays.export()[0]
        for name, tensor in residence.trainer.state_dict().items():
            assert torch.equal(tensor, stays.state_dict()[name])


def test_nothing_stays_on_the_device(head: TargetHead) -> None:
    residence = Residence(DrafterTrainer(head, options_of()), CPU, moves=True)
    residence.move_in()
    residence.trainer.micro_step([record(0)])
    there = [weakref.ref(tensor) for tensor in residence.trainer.model.parameters()]
    trainer = weakref.ref(residence.trainer)
    residence.move_out()
    gc.collect()
    assert trainer() is None
    assert all(tensor() is None for tensor in there)


@pytest.mark.parametrize("moves", [True, False])
def test_a_new_target_reaches_it_wherever_it_is(head: TargetHead, moves: bool) -> None:
    stays = DrafterTrainer(head, options_of())
    residence = Residence(DrafterTrainer(head, options_of()), CPU, moves=moves)
    for version, inside in ((1, False), (2, True), (3, False)):
        residence.move_in() if inside else residence.move_out()
        residence.set_head(newer(head, version))
        stays.set_head(newer(head, version))
        residence.move_in()
        same = record(version, version=version)
        assert residence.trainer.micro_step([same]).loss == stays.micro_step([same]).loss
        assert residence.trainer.head.version == version


def test_a_tied_head_stays_tied(head: TargetHead) -> None:
    tied = newer(head, 1)
    moved = on_device(tied, CPU)
    assert moved.lm_head is moved.embedding
    untied = TargetHead(
        config=head.config,
        version=1,
        embedding=head.embedding,
        norm=head.norm,
        lm_head=head.embedding.clone(),
        rope=head.rope,
    )
    moved = on_device(untied, CPU)
    assert moved.lm_head is not moved.embedding
