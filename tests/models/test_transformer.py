"""The transformer against `transformers`: logits, gradients, packing, activation checkpointing."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models.checkpoint import hf_state_dict, load_model
from models.packed import PackedContext
from models.rope import SequenceTooLongError
from models.transformer import Transformer
from tests.models.families import CONFIGS, FAMILIES, saved, tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_logits_equal_transformers(name: str, batch_invariant: bool, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = load_model(tmp_path, batch_invariant=batch_invariant)
    ids = tokens(200)  # past the 64 positions where Llama-3 scaling changes the frequencies
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        found = ours.logits(ours(ids, PackedContext.from_lengths([200])))
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_mistrals_window_hides_nothing_from_a_sequence_of_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest sequence that `models.config` lets through; theirs does differ with a window of one token less."""
    theirs = saved("mistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 200, "max_position_embeddings": 200}))
    ours, ids = load_model(tmp_path), tokens(200)
    monkeypatch.setattr(theirs.config, "sliding_window", 200)
    with torch.no_grad():
        found = ours.logits(ours(ids, PackedContext.from_lengths([200])))
        torch.testing.assert_close(found, theirs(ids[None]).logits[0], atol=2e-5, rtol=2e-5)
        monkeypatch.setattr(theirs.config, "sliding_window", 199)
        assert not torch.allclose(found, theirs(ids[None]).logits[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_rounds_the_same_network(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = load_model(tmp_path, dtype=torch.bfloat16)
    ids = tokens(60)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        found = ours.logits(ours(ids, PackedContext.from_lengths([60])))
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    ours = load_model(tmp_path)
    lengths, ids = [13, 1, 30], tokens(44)
    targets = tokens(44, seed=1)

    F.cross_entropy(ours.logits(ours(ids, PackedContext.from_lengths(lengths))), targets, reduction="sum").backward()
    for piece_ids, piece_targets in zip(ids.split(lengths), targets.split(lengths), strict=True):
        F.cross_entropy(theirs(piece_ids[None]).logits[0], piece_targets, reduction="sum").backward()

    with torch.no_grad():
        for parameter in ours.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)  # so that hf_state_dict names the gradients
    found = hf_state_dict(ours)
    for hf_name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            found[hf_name], parameter.grad, atol=2e-4, rtol=2e-4, msg=lambda m, n=hf_name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_each_sequence_alone(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = load_model(tmp_path)
    lengths, ids = [1, 40, 2, 17, 100], tokens(160)
    with torch.no_grad():
        together = model.logits(model(ids, PackedContext.from_lengths(lengths))).split(lengths)
        for piece, expected in zip(ids.split(lengths), together, strict=True):
            alone = model.logits(model(piece, PackedContext.from_lengths([len(piece)])))
            torch.testing.assert_close(alone, expected, atol=2e-5, rtol=2e-5)


def test_activation_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    model = load_model(tmp_path)
    gradients = []
    for enabled in (False, True):
        model.set_activation_checkpointing(enabled)
        model.zero_grad()
        model(tokens(30), PackedContext.from_lengths([10, 20])).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_meta_device_holds_shapes_only(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    config = load_model(tmp_path).config
    model = Transformer(config, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(load_model(tmp_path).state_dict())
    ids = tokens(10)
    context = PackedContext.from_lengths([10])
    assert torch.equal(model(ids, context), load_model(tmp_path)(ids, context))


@pytest.mark.parametrize("bad", [torch.tensor([0, 3]), torch.tensor([[0, 3]], dtype=torch.int32)])
def test_packed_context_rejects_wrong_offsets(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be int32"):
        PackedContext(bad)


def test_positions_restart_in_every_segment() -> None:
    context = PackedContext.from_lengths([3, 0, 2])
    assert context.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert context.positions.tolist() == [0, 1, 2, 0, 1]


def test_a_sequence_longer_than_the_model_is_named(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    model = load_model(tmp_path)
    limit = model.config.max_position_embeddings
    assert model(tokens(limit), PackedContext.from_lengths([limit])).shape[0] == limit
    with pytest.raises(SequenceTooLongError, match=rf"{limit + 3} tokens, but the model has {limit} positions"):
        model(tokens(limit + 3), PackedContext.from_lengths([limit + 3]))
