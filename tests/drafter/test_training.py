"""The trainer: losses by hand, learning, members, resuming, and weights on their way to an engine."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from config.drafter import Algorithm, DrafterOptions
from config.speculation import EagleOptions
from contracts.records import SequenceRecord
from drafter.eagle import EagleDrafter, EagleWeightsError, init_eagle, load_eagle, save_eagle
from drafter.training.cut import HEAD_TENSORS, cut_head
from drafter.training.head import TargetHead
from drafter.training.losses import objective_of
from drafter.training.packing import pack_records
from drafter.training.trainer import DrafterTrainer
from drafter.training.variants import VARIANTS, Variant
from models.checkpoint import hf_state_dict
from models.config import ModelConfig
from models.rope import RopeTable, Rotation
from models.transformer import AttentionContext, Transformer
from models.weights import WeightsCorruptError, pack, unpack
from tests.drafter.training_support import ALGORITHMS, records_of
from tests.engine.support import hf_config, tiny_model

LENGTHS = [9, 30, 14, 22]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("target")).requires_grad_(False)


def trainer_of(target: Transformer, algorithm: Algorithm = "eagle", **options: object) -> DrafterTrainer:
    return DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(algorithm=algorithm, **options))


# Losses.


@dataclass
class Constant:
    """Puts out the same state everywhere."""

    config: ModelConfig
    out: Tensor
    kind = "eagle"
    layers = ()
    rope = lm_head = ids = None

    def features(self, rows: Tensor) -> Tensor:
        return rows

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        return self.out.expand(len(features), 2)

    def readout(self, features: Tensor) -> Tensor:
        return features


LN3 = math.log(3)
SOFT = math.log(2)  # cross-entropy of (1/2, 1/2) with anything
REVERSE = (math.log(2 / 3) + math.log(2)) / 2  # KL((1/2, 1/2) || (3/4, 1/4))
HIDDEN = (LN3 - 0.5) / 2  # smooth L1 of (ln 3, 0) to (0, 0): linear from 1 on; mean of two components


@pytest.mark.parametrize(
    ("variant", "fresh", "expected"),
    [
        (Variant(network="eagle"), True, SOFT),
        (Variant(network="eagle", hidden_weight=2.0), True, SOFT + 2 * HIDDEN),
        (Variant(network="eagle", reverse=True), True, REVERSE),
        (Variant(network="eagle", hidden_weight=1.0, reverse=True), True, REVERSE + HIDDEN),
        (Variant(network="eagle", hidden_weight=1.0), False, math.log(2)),
        (Variant(network="eagle", hidden_weight=1.0, reverse=True), False, math.log(2)),
    ],
)
def test_losses_by_hand(variant: Variant, fresh: bool, expected: float) -> None:
    """Two tokens, a head that is the identity: a state is its own logits. Target (ln 3, 0), drafter 0."""
    config = ModelConfig.from_hf(
        hf_config(vocab_size=2, hidden_size=2, num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    )
    identity = torch.eye(2)
    head = TargetHead(
        config=config, version=5, embedding=identity, norm=torch.ones(2), lm_head=identity, rope=RopeTable(config)
    )
    states = np.full((4, 2), [LN3, 0], np.float32).view(np.uint8)
    record = SequenceRecord(
        tokens=np.array([0, 1, 0, 1, 1], np.int32),
        prompt_length=1,
        first=0,
        states=states,
        dtype="float32",
        width=2,
        target_version=5 if fresh else 4,
    )
    for passes, decay, weight in ((1, 1.0, 3), (2, 0.5, 3 + 0.5 * 2), (9, 1.0, 3 + 2 + 1)):
        batch = pack_records([record], head.version)
        assert batch is not None
        chosen = replace(variant, passes=passes, pass_decay=decay)
        objective = objective_of(Constant(config, torch.zeros(2)), head, batch, chosen)
        assert objective.weight == weight
        assert float(objective.loss) / weight == pytest.approx(expected, rel=1e-5)
        sure = objective_of(Constant(config, torch.tensor([0.0, 1.0])), head, batch, chosen)
        assert (objective.rows, int(sure.correct), int(sure.among_top3)) == (3, 2, 3)  # of the labels 0, 1, 1


def test_variants_are_those_of_the_paper() -> None:
    """Passes as in TLT Table 7's cost; hidden loss for EAGLE and HASS, none for EAGLE-3; OSD reversed."""
    assert {name: v.passes for name, v in VARIANTS.items()} == {"eagle": 1, "hass": 3, "eagle3": 7, "osd": 1}
    assert {name for name, v in VARIANTS.items() if v.hidden_weight} == {"eagle", "hass", "osd"}
    assert {name for name, v in VARIANTS.items() if v.reverse} == {"osd"}
    assert {name for name, v in VARIANTS.items() if v.network == "eagle3"} == {"eagle3"}


# Learning.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_some_sequences_by_heart(target: Transformer, algorithm: Algorithm) -> None:
    """Older ones too, whose tokens are random: only their tokens can be learned, and are."""
    records = records_of(target, [24, 30], versions=[0, -1])
    trainer = trainer_of(target, algorithm, learning_rate=1e-2, warmup_steps=5)
    first = trainer.micro_step(records)
    for _ in range(60):
        last = trainer.micro_step(records)
    assert first.positions == last.positions == 22 + 28
    assert last.loss < 0.7 * first.loss
    old = trainer.evaluate(records[1:])
    assert old.accuracy > 0.9
    assert old.top3_accuracy >= old.accuracy
    assert trainer.steps == 61


def test_evaluation_changes_nothing(target: Transformer) -> None:
    records = records_of(target, LENGTHS)
    trainer, twin = trainer_of(target), trainer_of(target)
    seen = trainer.evaluate(records)
    mine, theirs = trainer.micro_step(records), twin.micro_step(records)
    assert (seen.loss, seen.accuracy, seen.updated) == (mine.loss, mine.accuracy, False)
    assert mine == theirs
    assert trainer.micro_step(records) == twin.micro_step(records)


def test_warm_up_and_clipping(target: Transformer) -> None:
    """The first update is one of a warm-up, and AdamW's first update is the learning rate whatever the gradient."""
    records = records_of(target, LENGTHS)
    for warmup, scale in ((4, 1.0), (0, 0.5)):
        trainer = trainer_of(target, learning_rate=0.01, warmup_steps=warmup, max_grad_norm=1e-3)
        trainer.rate_scale = scale
        before = trainer.model.fuse.weight.detach().clone()
        trainer.micro_step(records)
        moved = (trainer.model.fuse.weight.detach() - before).abs()
        assert float(moved.median()) == pytest.approx(0.01 * (scale / 4 if warmup else scale), rel=0.05)


def test_a_gradient_that_is_not_finite_changes_nothing(target: Transformer) -> None:
    record = records_of(target, [12])[0]
    states = record.states.copy().view(np.float32)
    states[3, -1] = np.nan
    trainer = trainer_of(target)
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    result = trainer.micro_step([replace(record, states=states.view(np.uint8))])
    assert math.isnan(result.loss)
    assert not result.updated
    assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in before.items())
    assert trainer.micro_step([record]).updated


# Members.


def replace_by(total: Tensor, sums: Tensor) -> None:
    sums.copy_(total)


def sums_of(member: DrafterTrainer, records: list[SequenceRecord]) -> Tensor:
    """What the member hands to the collective, which then breaks."""
    parts: list[Tensor] = []

    def take(sums: Tensor) -> None:
        parts.append(sums.clone())
        raise InterruptedError

    with pytest.raises(InterruptedError):
        member.micro_step(records, reduce=take)
    return parts[0]


def test_members_together_are_one_trainer(target: Transformer) -> None:
    """Uneven shares, one of them empty; each member's update is that of one trainer with all records."""
    records = records_of(target, LENGTHS, versions=[0, -1, 0, 0])
    whole = trainer_of(target)
    members = [trainer_of(target) for _ in range(3)]
    shares = [records[:1], [], records[1:]]
    for _ in range(3):
        whole.micro_step(records)
        total = torch.stack([sums_of(member, share) for member, share in zip(members, shares, strict=True)]).sum(0)
        for member, share in zip(members, shares, strict=True):
            result = member.micro_step(share, reduce=partial(replace_by, total))
            assert result.updated
            assert result.positions == sum(record.rows - 1 for record in share)
    for name, tensor in whole.state_dict().items():
        for member in members:
            torch.testing.assert_close(member.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
            assert torch.equal(member.state_dict()[name], members[0].state_dict()[name])


def test_a_broken_collective_and_nothing_to_learn_change_nothing(target: Transformer) -> None:
    trainer = trainer_of(target)
    trainer.micro_step(records_of(target, LENGTHS))
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}

    def broken(sums: Tensor) -> None:
        sums.mul_(3)
        raise ConnectionError("a member is gone")

    with pytest.raises(ConnectionError):
        trainer.micro_step(records_of(target, LENGTHS), reduce=broken)
    nothing = trainer.micro_step(records_of(target, [2, 3]))
    assert (nothing.positions, nothing.updated) == (0, False)
    assert math.isnan(nothing.loss)
    assert trainer.steps == 1
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, before[name])


# Resuming, versions, weights.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_trainer_goes_on_bitwise(target: Transformer, algorithm: Algorithm) -> None:
    packs = [records_of(target, LENGTHS, seed=seed) for seed in range(6)]
    trainer = trainer_of(target, algorithm, warmup_steps=4)
    for records in packs[:3]:
        trainer.micro_step(records)
    saved = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    expected = [trainer.micro_step(records) for records in packs[3:]]
    resumed = trainer_of(target, algorithm, warmup_steps=4, seed=99)
    resumed.load_state_dict(saved)
    assert resumed.steps == 3
    assert [resumed.micro_step(records) for records in packs[3:]] == expected
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])


def test_state_is_of_what_is_trained_only(target: Transformer) -> None:
    trainer = trainer_of(target)
    state, trained = trainer.state_dict(), sum(p.numel() for p in trainer.model.parameters())
    values = sum(tensor.numel() for name, tensor in state.items() if not name.endswith((".step", "counters")))
    assert values == 3 * trained
    other = trainer_of(target, "eagle3").state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"drafter\.algorithm"):
        trainer.load_state_dict(other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())


def test_a_new_version_of_the_target_makes_old_records_hard(target: Transformer, tmp_path: Path) -> None:
    records = records_of(target, LENGTHS)
    trainer = trainer_of(target)
    soft = trainer.evaluate(records)
    newer = tiny_model(tmp_path, seed=5)
    trainer.set_head(TargetHead.of(newer, 1))
    hard = trainer.evaluate(records)
    assert hard.loss != soft.loss
    assert hard.loss == trainer.evaluate([replace(record, target_version=-4) for record in records]).loss
    again = trainer.evaluate([replace(record, target_version=1) for record in records_of(newer, LENGTHS)])
    assert again.loss != hard.loss
    with pytest.raises(ValueError, match="another network"):
        trainer.set_head(TargetHead.of(tiny_model(tmp_path, "llama"), 2))


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # tied, and with a head of its own
def test_the_head_travels_alone(tmp_path: Path, family: str) -> None:
    model = tiny_model(tmp_path, family).requires_grad_(False)
    manifest, buffer = pack(hf_state_dict(model), 4)
    cut, small = cut_head(manifest, buffer)
    assert {spec.name for spec in cut.tensors} == set(HEAD_TENSORS) - ({"lm_head.weight"} if model.tied else set())
    assert small.nbytes < 0.5 * buffer.nbytes
    tokens, hidden = torch.tensor([3, 60, 0]), torch.randn(3, model.config.hidden_size)
    for head in (TargetHead.unpacked(model.config, cut, small), TargetHead.unpacked(model.config, manifest, buffer)):
        assert head.version == 4
        assert torch.equal(head.embed(tokens), model.embed_tokens(tokens))
        torch.testing.assert_close(head.logits(hidden), model.logits(hidden))
        assert torch.equal(head.norm, model.norm.weight)
    kept = TargetHead.unpacked(model.config, cut, small)
    small[:] = 0
    assert torch.equal(kept.embed(tokens), model.embed_tokens(tokens))
    without = pack({name: t for name, t in unpack(manifest, buffer) if name != "model.norm.weight"}, 4)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        TargetHead.unpacked(model.config, *without)
    with pytest.raises(ValueError, match="embed_tokens"):
        TargetHead.unpacked(replace(model.config, vocab_size=60), manifest, buffer)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_weights_reach_another_member_and_an_engine(target: Transformer, algorithm: Algorithm, tmp_path: Path) -> None:
    """Exported, loaded by a trainer and by a drafter in place: the same weights, versioned by updates."""
    records = records_of(target, LENGTHS)
    trainer, other = trainer_of(target, algorithm), trainer_of(target, algorithm, seed=5)
    for _ in range(3):
        trainer.micro_step(records)
    manifest, payload = trainer.export()
    assert manifest.version == 3
    other.micro_step(records)
    other.load(manifest, payload)
    assert other.steps == 3
    assert other.evaluate(records) == trainer.evaluate(records)
    assert all(float(t.abs().sum()) == 0 for name, t in other.state_dict().items() if name.startswith("optimizer."))
    corrupt = payload.copy()
    corrupt[5] ^= 1
    with pytest.raises(WeightsCorruptError):
        other.load(manifest, corrupt)
    wrong = trainer_of(target, "eagle" if algorithm == "eagle3" else "eagle3")
    with pytest.raises(ValueError, match="version 3"):
        wrong.load(manifest, payload)

    settings = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
    start = init_eagle(target.config, 1, VARIANTS[algorithm].network, **settings)
    save_eagle(start, tmp_path / "start")
    drafter = EagleDrafter(target, EagleOptions(path=str(tmp_path / "start")), 4, 64, 8)
    before = drafter.model.fuse.weight
    drafter.update(manifest.version, dict(unpack(manifest, payload)))
    assert drafter.version == 3
    assert drafter.model.fuse.weight is before
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(drafter.model.state_dict()[name], tensor)
    with pytest.raises(EagleWeightsError, match=r"drafter\.algorithm"):
        drafter.update(4, wrong.model.state_dict())
    assert drafter.version == 3
    save_eagle(trainer.model, tmp_path / "trained")
    again = DrafterTrainer(
        TargetHead.of(target, 0),
        DrafterOptions(algorithm=algorithm),
        model=load_eagle(tmp_path / "trained", target.config, **settings),
    )
    assert again.evaluate(records) == trainer.evaluate(records)
    with pytest.raises(ValueError, match=r"drafter\.algorithm"):
        DrafterTrainer(TargetHead.of(target, 0), wrong.options, model=trainer.model)
