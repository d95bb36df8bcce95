"""Every supervised position of a packed batch against drafting from scratch, and nothing across sequences."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from config.drafter import Algorithm
from contracts.records import SequenceRecord
from drafter.training import losses, passes
from drafter.training.head import TargetHead
from drafter.training.losses import objective_of
from drafter.training.packing import MIN_ROWS, PackedBatch, pack_records
from drafter.training.passes import run_passes
from drafter.training.variants import VARIANTS
from models.transformer import Transformer
from tests.drafter.eagle_oracle import true_rows
from tests.drafter.training_oracle import StepOracle
from tests.drafter.training_support import ALGORITHMS, drafter_for, records_of
from tests.engine.support import tiny_model

VERSION = 3


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("target"), request.param).requires_grad_(False)


def packed(records: list[SequenceRecord]) -> PackedBatch:
    batch = pack_records(records, VERSION)
    assert batch is not None
    return batch


def assert_gradient(actual: Tensor, expected: Tensor) -> None:
    """Equal up to rounding, which is relative to the largest component: each is a sum over all rows."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(tokens, first position with states, target version) of some sequences; at least one is long enough."""
    some = st.tuples(st.integers(4, 12), st.integers(0, 6), st.sampled_from([VERSION, VERSION, VERSION - 1]))
    drawn = [(n + first, first, version) for n, first, version in draw(st.lists(some, min_size=1, max_size=4))]
    short = draw(st.lists(st.integers(2, MIN_ROWS), max_size=2))  # n - 1 rows: too few
    return [*((n, 0, VERSION) for n in short), *drawn]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=8, deadline=None)
@given(sequences=shapes(), seed=st.integers(0, 100))
def test_every_position_equals_drafting_from_scratch(
    target: Transformer, algorithm: Algorithm, sequences: list[tuple[int, int, int]], seed: int
) -> None:
    """Outputs of every row in every pass, what they are compared with, and the loss."""
    lengths, firsts, versions = zip(*sequences, strict=True)
    records = records_of(target, lengths, firsts=firsts, versions=versions, seed=seed)
    model, head, variant = drafter_for(target, algorithm), TargetHead.of(target, VERSION), VARIANTS[algorithm]
    oracle = StepOracle(target, model, variant, VERSION)
    batch = packed(records)
    with torch.no_grad():
        outputs = run_passes(model, head, batch, variant.passes)
        objective = objective_of(model, head, batch, variant)
        used = [record for record in records if record.rows >= MIN_ROWS]
        assert batch.segments.lengths == tuple(record.rows - 1 for record in used)
        at, checked, total, weight = 0, 0, 0.0, 0.0
        for record in used:
            tokens = record.tokens.tolist()
            true = true_rows(target, tokens, model.layers)
            for row in range(record.rows - 1):
                position = record.first + row
                assert int(batch.positions[at]) == position
                assert batch.tokens[at] == tokens[position + 1]
                assert batch.labels[at] == tokens[position + 2]
                width = target.config.hidden_size
                torch.testing.assert_close(batch.states[batch.at[at]][-width:], true[position, -width:])
                torch.testing.assert_close(batch.states[batch.at[at] + 1][-width:], true[position + 1, -width:])
                count = min(variant.passes, record.rows - 1 - row)
                for mine, theirs in zip(outputs, oracle.outputs(record, row, count), strict=False):
                    torch.testing.assert_close(mine[at], theirs, rtol=1e-4, atol=1e-5)
                    checked += 1
                at += 1
            expected, share = oracle.loss(record)
            total, weight = total + float(expected), weight + share
    assert at == batch.rows == objective.rows
    assert checked == sum(min(variant.passes, r.rows - 1 - row) for r in used for row in range(r.rows - 1))
    assert objective.weight == pytest.approx(weight, rel=1e-6)
    assert float(objective.loss) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_soft_targets_are_those_of_the_position(target: Transformer, algorithm: Algorithm) -> None:
    """Row by row: the present version's distribution, or the drawn token of an older one."""
    records = records_of(target, [9, 8, 7], firsts=[0, 2, 0], versions=[VERSION, VERSION - 1, VERSION])
    batch, head, variant = packed(records), TargetHead.of(target, VERSION), VARIANTS[algorithm]
    wanted = losses._targets(head, batch, variant)
    if variant.reverse:
        wanted = wanted.exp()
    at = 0
    for record in records:
        true = true_rows(target, record.tokens.tolist(), ())
        for row in range(record.rows - 1):
            if record.target_version == VERSION:
                expected = target.logits(true[record.first + row + 1][None])[0].softmax(-1)
                torch.testing.assert_close(wanted[at], expected)
            elif not variant.reverse:
                assert wanted[at].argmax() == record.tokens[record.first + row + 2]
                assert wanted[at].max() == wanted[at].sum() == 1
            at += 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_leaks_across_sequences(target: Transformer, algorithm: Algorithm) -> None:
    """Other tokens and states in one sequence change no output of the others, and no gradient reaches them."""
    records = records_of(target, [9, 12, 8], firsts=[0, 3, 1])
    other = records_of(target, [9, 12, 8], firsts=[0, 3, 1], seed=1)
    model, head, variant = drafter_for(target, algorithm), TargetHead.of(target, VERSION), VARIANTS[algorithm]
    batch, changed = packed(records), packed([records[0], other[1], records[2]])
    inside = slice(batch.segments.lengths[0], batch.segments.lengths[0] + batch.segments.lengths[1])
    outside = torch.ones(batch.rows, dtype=torch.bool)
    outside[inside] = False
    with torch.no_grad():
        for mine, theirs in zip(*(run_passes(model, head, b, variant.passes) for b in (batch, changed)), strict=True):
            assert torch.equal(mine[outside], theirs[outside])
            assert not torch.allclose(mine[inside], theirs[inside])
    states = batch.states.clone().requires_grad_()
    outputs = run_passes(model, head, replace(batch, states=states), variant.passes)
    torch.stack(outputs)[:, inside].square().sum().backward()
    assert states.grad is not None
    own = torch.zeros(len(states), dtype=torch.bool)
    own[batch.at[inside]] = True
    assert (states.grad[~own] == 0).all()
    assert (states.grad[own].abs().sum(1) > 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_of_a_pack_are_the_sum_of_its_sequences(target: Transformer, algorithm: Algorithm) -> None:
    records = records_of(target, [9, 12, 8], firsts=[0, 3, 1], versions=[VERSION, VERSION, VERSION - 1])
    model, head, variant = drafter_for(target, algorithm), TargetHead.of(target, VERSION), VARIANTS[algorithm]

    def gradients(chosen: list[SequenceRecord]) -> list[Tensor]:
        loss = objective_of(model, head, packed(chosen), variant).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    alone = [gradients([record]) for record in records]
    for together, *parts in zip(gradients(records), *alone, strict=True):
        assert_gradient(together, torch.stack(parts).sum(0))


@dataclass(frozen=True)
class WatchedHead(TargetHead):
    """Refuses the states that it must not judge."""

    forbidden: Tensor | None = None
    judged: list[Tensor] | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.forbidden is not None
        assert self.judged is not None
        same = (hidden[:, None] == self.forbidden[None]).all(-1)
        assert not same.any(), "a state of an older version became a soft target"
        self.judged.append(hidden)
        return TargetHead.logits(self, hidden)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_older_versions_never_give_soft_targets(target: Transformer, algorithm: Algorithm) -> None:
    """Neither their distribution nor their states are learned from; the tokens they drew are."""
    records = records_of(target, [9, 12, 8], versions=[VERSION, VERSION - 1, VERSION - 3])
    plain, model, variant = TargetHead.of(target, VERSION), drafter_for(target, algorithm), VARIANTS[algorithm]
    width = target.config.hidden_size
    old = packed(records[1:]).states[:, -width:]
    parts = {name: getattr(plain, name) for name in ("config", "version", "embedding", "norm", "lm_head", "rope")}
    judged: list[Tensor] = []
    watched = WatchedHead(**parts, forbidden=old, judged=judged)
    with torch.no_grad():
        mixed = objective_of(model, watched, packed(records), variant)
        assert len(judged[0]) == records[0].rows - 1  # the fresh record's, all of them
        watched.judged.clear()  # type: ignore[union-attr]
        only_old = objective_of(model, watched, packed(records[1:]), variant)
        assert len(judged) == variant.passes  # the drafter's own states only
        # The last state only supervises: nothing may depend on it. A label may.
        blind = [replace(r, states=np.concatenate((r.states[:-1], r.states[:1]))) for r in records[1:]]
        assert float(objective_of(model, plain, packed(blind), variant).loss) == float(only_old.loss)
        drawn = records[1].tokens.copy()
        drawn[-1] = (drawn[-1] + 1) % target.config.vocab_size
        relabelled = [replace(records[1], tokens=drawn), records[2]]
        assert float(objective_of(model, plain, packed(relabelled), variant).loss) != float(only_old.loss)
        fresh = replace(records[0], states=np.concatenate((records[0].states[:-1], records[0].states[:1])))
        assert float(objective_of(model, plain, packed([fresh, *records[1:]]), variant).loss) != float(mixed.loss)


@pytest.mark.parametrize("algorithm", ["eagle3", "hass"])
def test_memory_bounds_change_nothing(
    target: Transformer, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores in chunks and computed twice, logits computed twice: the same loss and gradients."""
    records = records_of(target, [23, 12])
    model, head, variant = drafter_for(target, algorithm), TargetHead.of(target, VERSION), VARIANTS[algorithm]

    def run() -> tuple[float, list[Tensor]]:
        loss = objective_of(model, head, packed(records), variant).loss
        return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))

    loss, gradients = run()
    monkeypatch.setattr(passes, "_CHUNK_ROWS", 5)
    monkeypatch.setattr(passes, "_KEPT_SCORES", 16)
    monkeypatch.setattr(losses, "_KEPT_LOGITS", 1)
    bounded, bounded_gradients = run()
    assert bounded == pytest.approx(loss, rel=1e-5)
    for mine, theirs in zip(bounded_gradients, gradients, strict=True):
        assert_gradient(mine, theirs)


def test_the_last_position_is_not_passed(tmp_path: Path) -> None:
    """A sequence that ends at the model's last position: later passes of its last rows mean and fail nothing."""
    target = tiny_model(tmp_path)
    limit = target.config.max_position_embeddings
    record = records_of(target, [limit], firsts=[limit - 9])[0]
    batch = packed([record])
    outputs = run_passes(drafter_for(target, "eagle3"), TargetHead.of(target, VERSION), batch, 7)
    assert all(torch.isfinite(out).all() for out in outputs)


def test_records_that_cannot_be_packed_say_why(target: Transformer) -> None:
    whole, final_only = records_of(target, [9])[0], records_of(target, [9], all_layers=False)[0]
    assert pack_records([], VERSION) is None
    assert pack_records(records_of(target, [3, MIN_ROWS]), VERSION) is None
    with pytest.raises(ValueError, match="different widths"):
        pack_records([whole, final_only], VERSION)
    with pytest.raises(ValueError, match="request 0 has states for positions 2 to 9"):
        pack_records([replace(whole, first=2)], VERSION)
    model, head = drafter_for(target, "eagle3"), TargetHead.of(target, VERSION)
    with pytest.raises(ValueError, match="eagle3 needs states recorded with its layers"):
        objective_of(model, head, packed([final_only]), VARIANTS["eagle3"])
