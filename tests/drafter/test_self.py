"""The self-drafter by itself: its formats and keys, when its copy is made, and what a draft of it says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.native.engine import NativeEngine
from config.formats import FORMATS
from config.rollout import EngineOptions
from config.speculation import SelfOptions, SpeculationOptions
from config.strategy import PLAIN, Strategy
from drafter.build import build_drafters
from drafter.self import SelfDrafter, format_of
from models import low_bit_copy, weights
from models.checkpoint import hf_state_dict
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.drafter.test_self_chain import Scene, wide_model
from tests.engine.support import assert_same, make_requests, options_of, run, tiny_model
from tests.native import needs_native

pytestmark = needs_native
ENGINE = EngineOptions(max_running=3, kv_tokens=512)
NAMED = SpeculationOptions(mode="fixed", strategies=("self:5",))


def with_format(name: str) -> SpeculationOptions:
    return NAMED.model_copy(update={"self": SelfOptions.model_validate({"format": name})})


def test_the_format_is_the_cheapest_that_the_device_computes_and_the_model_can_be_stored_in(tmp_path: Path) -> None:
    wide, tiny = wide_model(tmp_path / "wide"), tiny_model(tmp_path)
    auto = SelfOptions()
    assert format_of(auto, wide) is FORMATS["w4a8"]
    assert format_of(auto, tiny) is FORMATS["w8a8"]  # of 32 inputs, not a group of 64
    assert format_of(SelfOptions(format="w8a8"), wide) is FORMATS["w8a8"]
    assert (auto.on("cpu"), auto.on("cuda"), SelfOptions(format="none").on("cpu")) == ("w4a8", "w8a8", None)


def test_what_cannot_be_is_refused_with_its_key_and_a_remedy(tmp_path: Path) -> None:
    wide, tiny = wide_model(tmp_path / "wide"), tiny_model(tmp_path)
    with pytest.raises(ValueError, match=r"rollout\.speculation\.self\.format=w4a16 .* cuda only.*use auto"):
        build_drafters(with_format("w4a16"), wide, ENGINE)
    with pytest.raises(ValueError, match=r"rollout\.speculation\.self\.format=w4a8 does not fit.*use auto"):
        build_drafters(with_format("w4a8"), tiny, ENGINE)
    few_bits = Transformer(wide.config, low_bit=FORMATS["w8a8"])
    with pytest.raises(ValueError, match=r"strategies names self beside rollout\.quantization=w8a8.*quantization=none"):
        build_drafters(NAMED, few_bits, ENGINE)
    assert "self" not in build_drafters(SpeculationOptions(), few_bits, ENGINE)
    with pytest.raises(ValueError, match=r"names self, and rollout\.speculation\.self\.format=none: leave one"):
        build_drafters(with_format("none"), wide, ENGINE)
    nothing = SpeculationOptions.model_validate({"self": {"format": "none"}})
    assert "self" not in build_drafters(nothing, wide, ENGINE)


def test_its_copy_is_made_at_the_first_draft_of_every_version_and_never_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    round_again = low_bit_copy.round_again

    def counted(copy: Transformer, model: Transformer) -> None:
        made.append(1)
        round_again(copy, model)

    monkeypatch.setattr("drafter.self.round_again", counted)
    model = wide_model(tmp_path)
    drafters = build_drafters(NAMED, model, options_of())
    drafter = drafters["self"]
    assert isinstance(drafter, SelfDrafter)
    core = NativeEngine(model, options_of(), drafters=drafters, policy=FixedPolicy(PLAIN))
    requests = make_requests(4, seed=3)
    run(core, requests)
    manifest, buffer = weights.pack(hf_state_dict(model), version=1)
    core.update_weights(manifest, buffer)
    assert (made, drafter.bytes) == ([], 0)
    core.use(FixedPolicy(Strategy.parse("self:5")))
    for version in (2, 3):
        run(core, requests)
        run(core, requests)
        assert len(made) == version - 1
        core.update_weights(weights.pack(hf_state_dict(model), version=version)[0], buffer)
    assert drafter.bytes > 0


def test_after_an_update_it_drafts_with_the_new_weights(tmp_path: Path) -> None:
    """The drafter of an engine whose weights changed is that of an engine that started with them, to the last step."""
    model, other = wide_model(tmp_path / "one"), wide_model(tmp_path / "other", initializer_range=0.2)
    requests = make_requests(6, seed=4, max_new_tokens=40)
    records: dict[str, list] = {"updated": [], "fresh": []}
    core = NativeEngine(
        model,
        options_of(),
        drafters=build_drafters(NAMED, model, options_of()),
        policy=FixedPolicy(Strategy.parse("self:5")),
        steps=records["updated"],
    )
    run(core, requests)
    core.update_weights(*weights.pack(hf_state_dict(other), version=1))
    records["updated"].clear()
    again = run(core, requests)
    fresh = NativeEngine(
        other,
        options_of(),
        drafters=build_drafters(NAMED, other, options_of()),
        policy=FixedPolicy(Strategy.parse("self:5")),
        steps=records["fresh"],
    )
    assert_same(again, run(fresh, requests))
    ours, theirs = ([(r.drafted, r.accepted) for r in records[name]] for name in ("updated", "fresh"))
    assert ours == theirs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_rejection_a_draft_says_what_it_was_drawn_from(tmp_path: Path, temperature: float) -> None:
    model = wide_model(tmp_path)
    scene = Scene(model, 5, 4)
    drafter = SelfDrafter(model, FORMATS["w4a8"], sampled=True)
    with pytest.raises(RuntimeError, match="lends no KV cache"):
        drafter.propose(scene.batch, Strategy.parse("self:4"))
    drafter.attach(scene.chains)
    scene.batch.temperatures[:] = temperature
    drafts = drafter.propose(scene.batch, Strategy.parse("self:4"))
    assert drafts.caught_up
    assert not drafter.propose(scene.batch, Strategy.parse("self:4")).caught_up
    q = drafts.distributions
    assert q is not None
    assert q.dtype is torch.float32
    for r, count in enumerate(drafts.counts):
        for i in range(count):
            assert float(q[r, i].sum()) == pytest.approx(1, abs=1e-5)
            assert float(q[r, i, drafts.tokens[r, i]]) > 0
            assert int((q[r, i] > 0).sum()) <= (5 if scene.batch.top_k[r] else len(q[r, i]))
            if temperature == 0:
                assert float(q[r, i].max()) == 1
    np.testing.assert_array_equal(drafts.counts, np.minimum(scene.batch.room, 4))
