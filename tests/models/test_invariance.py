"""Batch invariance, bitwise: a row's logits depend on its own sequence only, whatever else is computed with it.

The oracle is the packed forward of one sequence alone, on one thread.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engine.native import core
from actors.engine.wire import Start
from config.model import ModelOptions, batch_invariance
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from models import ops
from models.checkpoint import hf_state_dict, load_hf_state_dict, load_model
from models.ops import native
from models.packed import PackedContext
from models.transformer import Transformer
from tests.models.cached import Cache, forward
from tests.models.families import FAMILIES, saved, tokens

pytestmark = pytest.mark.skipif(native.kernels is None, reason="needs the native kernels: `pip install -e .`")
BATCHES = (1, 2, 3, 4, 5, 7, 8, 11, 12, 15, 16, 17, 31, 32, 48, 64)


@pytest.fixture(params=[*FAMILIES, "qwen3 bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Transformer:
    name, *half = request.param.split()
    saved(name, tmp_path)
    return load_model(tmp_path, dtype=torch.bfloat16 if half else torch.float32)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sequences(count: int, seed: int = 0) -> list[Tensor]:
    rng = random.Random(seed)
    return [tokens(rng.randint(1, 90), seed=i) for i in range(count)]


@torch.no_grad()
def packed(model: Transformer, pieces: list[Tensor]) -> list[Tensor]:
    lengths = [len(piece) for piece in pieces]
    return list(model.logits(model(torch.cat(pieces), PackedContext.from_lengths(lengths))).split(lengths))


def alone_on_one_thread(model: Transformer, pieces: list[Tensor]) -> list[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [packed(model, [piece])[0] for piece in pieces]
    finally:
        torch.set_num_threads(before)


def test_packed_together_or_alone(model: Transformer, threads: int) -> None:
    pieces = sequences(24)
    expected = alone_on_one_thread(model, pieces)
    for count in (1, 2, 5, 24):
        for found, oracle in zip(packed(model, pieces[:count]), expected, strict=False):
            assert torch.equal(found, oracle)
    for found, oracle in zip(packed(model, pieces[::-1]), expected[::-1], strict=True):
        assert torch.equal(found, oracle)


def test_decoding_rows_in_batches_of_1_to_64(model: Transformer, threads: int) -> None:
    pieces = sequences(64)
    expected = alone_on_one_thread(model, pieces)
    cache = Cache(model, requests=64, max_tokens=90)
    prompts = [i for i, piece in enumerate(pieces) if len(piece) > 1]
    forward(model, cache, prompts, [0] * len(prompts), [pieces[i][:-1] for i in prompts])
    rng = random.Random(1)
    for batch in BATCHES:
        requests = rng.sample(range(64), batch)
        starts = [len(pieces[i]) - 1 for i in requests]
        found = forward(model, cache, requests, starts, [pieces[i][-1:] for i in requests])
        for request, logits in zip(requests, found, strict=True):
            assert torch.equal(logits[0], expected[request][-1]), f"batch of {batch}"


def test_prefill_in_chunks_of_any_size(model: Transformer, threads: int) -> None:
    piece = tokens(70)
    expected = alone_on_one_thread(model, [piece])[0]
    for chunk in (1, 3, 13, 16, 17, 64, 100):
        cache = Cache(model, requests=1, max_tokens=70, seed=chunk)
        starts = range(0, len(piece), chunk)
        found = [forward(model, cache, [0], [start], [piece[start : start + chunk]])[0] for start in starts]
        assert torch.equal(torch.cat(found), expected), f"chunks of {chunk}"


def test_prefill_decode_and_verification_mixed_in_one_batch(model: Transformer, threads: int) -> None:
    """Every request advances by a random number of tokens each step, as chunks, single tokens and drafts would."""
    pieces = sequences(12, seed=3)
    expected = alone_on_one_thread(model, pieces)
    cache, rng = Cache(model, requests=12, max_tokens=90), random.Random(2)
    done = [0] * len(pieces)
    while active := [i for i, piece in enumerate(pieces) if done[i] < len(piece)]:
        requests = rng.sample(active, rng.randint(1, len(active)))
        counts = [min(rng.choice([1, 1, 5, 9, 40]), len(pieces[i]) - done[i]) for i in requests]
        steps = [pieces[i][done[i] : done[i] + count] for i, count in zip(requests, counts, strict=True)]
        found = forward(model, cache, requests, [done[i] for i in requests], steps)
        for request, count, logits in zip(requests, counts, found, strict=True):
            assert torch.equal(logits, expected[request][done[request] : done[request] + count])
            done[request] += count


def test_gradients_enabled_or_not(model: Transformer) -> None:
    """The learner's forward keeps what the backward needs and still gives the engine's bits."""
    pieces = sequences(6)
    lengths = [len(piece) for piece in pieces]
    learner = model.logits(model(torch.cat(pieces), PackedContext.from_lengths(lengths)))
    assert learner.requires_grad
    assert torch.equal(learner, torch.cat(packed(model, pieces)))


def test_the_oracle_can_tell_rows_apart(model: Transformer) -> None:
    """One changed token changes every later row of its own segment, and no other segment."""
    pieces = sequences(3)
    changed = [piece.clone() for piece in pieces]
    changed[1][0] = (changed[1][0] + 1) % 101
    before, after = packed(model, pieces), packed(model, changed)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not (before[1] == after[1]).all(dim=1).any()


def test_weights_packed_for_inference_give_the_learners_bits(model: Transformer, threads: int) -> None:
    """The engine packs its weights, the learner cannot; after an update in place the old packing must not be used."""
    pieces = sequences(5)
    expected = alone_on_one_thread(model, pieces)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight") or name in ("lm_head.weight", "embed_tokens.weight"):
            ops.prepack(parameter)
    assert all(torch.equal(a, b) for a, b in zip(packed(model, pieces), expected, strict=True))
    assert torch.equal(packed(model, pieces[:1])[0], expected[0])

    load_hf_state_dict(model, {name: tensor * 0.5 for name, tensor in hf_state_dict(model).items()})
    halved = packed(model, pieces)
    assert not torch.equal(halved[0], expected[0])
    fresh = Transformer(model.config, dtype=model.norm.weight.dtype)
    load_hf_state_dict(fresh, hf_state_dict(model))
    assert all(torch.equal(a, b) for a, b in zip(halved, packed(fresh, pieces), strict=True))


def test_a_gpu_does_not_claim_it() -> None:
    assert batch_invariance(ModelOptions(path="x"), "cpu", "learner.device")
    assert batch_invariance(ModelOptions(path="x", batch_invariant=True), "cpu", "learner.device")
    assert not batch_invariance(ModelOptions(path="x", batch_invariant=False), "cpu", "learner.device")
    for engine in (False, True):
        assert not batch_invariance(ModelOptions(path="x"), "cuda", "learner.device", engine=engine)
        with pytest.raises(ValueError, match=r"model\.batch_invariant is true.*set learner\.device=cpu"):
            batch_invariance(ModelOptions(path="x", batch_invariant=True), "cuda", "learner.device", engine=engine)


def test_a_gpus_engine_can_be_asked_for_it_alone() -> None:
    asked = ModelOptions(path="x", batch_invariant="engine")
    assert batch_invariance(asked, "cuda", "rollout.engine.device", engine=True)
    assert not batch_invariance(asked, "cuda", "learner.device")
    assert batch_invariance(asked, "cpu", "learner.device")


def test_an_engine_without_kernels_does_not_claim_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "choose_device", lambda wanted, key: "cuda")
    monkeypatch.setattr(core, "installed", lambda: False)
    start = Start(
        model=ModelOptions(path="x", batch_invariant="engine"),
        options=EngineOptions(),
        speculation=SpeculationOptions(),
        seed=0,
        weights_version=0,
        niceness=0,
    )
    with pytest.raises(ValueError, match=r"needs the Triton kernels.*pip install triton"):
        core.build(start)
