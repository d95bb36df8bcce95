"""The shipped drafters where it gets rough: preemption, re-issued prefixes, new weights, sleep, save and load."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from drafter.build import build_drafters
from models import weights
from models.checkpoint import hf_state_dict
from policies.speculation.policy import FixedPolicy
from tests.engine.support import as_prefix, assert_same, engine, make_requests, options_of, rollouts, run
from tests.native import needs_native
from tests.speculation.support import Mixed, model_of

pytestmark = needs_native
OPTIONS = SpeculationOptions(eagle=EagleOptions(path="random"))
STRATEGIES = ("plain", "ngram:4", "ngram:3x2/6", "suffix:5", "suffix:4x2/8", "eagle:3", "eagle:3x2/6", "self:4")


@pytest.mark.parametrize("seed", range(3))
def test_no_token_changes_under_pressure_with_prefixes_and_new_weights(tmp_path: Path, seed: int) -> None:
    model = model_of(tmp_path, "qwen2")
    shape = options_of(kv_tokens=160, max_model_tokens=90)
    requests = make_requests(24, prompts=5, seed=80 + seed, max_new_tokens=70, temperature=0.8, top_k=12)
    expected = run(NativeEngine(model, shape), requests)
    manifest, buffer = weights.pack(hf_state_dict(model), version=1)  # the same weights: tokens stay
    issued = [
        replace(r, prefix=as_prefix(expected[r.request_id], 1 + i)) if i % 3 == 0 else r for i, r in enumerate(requests)
    ]
    records: list[EngineStepRecord] = []
    core = NativeEngine(
        model,
        shape,
        drafters=build_drafters(OPTIONS, model, shape),
        policy=Mixed(STRATEGIES, seed),
        steps=records,
    )
    for again in range(2):
        core.submit(issued)
        events = []
        while core.has_work:
            events += core.step()
            if len(records) % 37 == 0:
                core.update_weights(replace(manifest, version=len(records)), buffer)
        assert_same(rollouts(events), expected)
        core.sleep()
        core.wake()
        assert core._scheduler.preempted > 0, again
    for name in STRATEGIES[1:]:
        assert sum(record.drafted for record in records if str(record.strategy) == name) > 0, name


def test_what_was_saved_drafts_in_another_engine(tmp_path: Path) -> None:
    """A prompt that comes back: the suffix drafter of a new process knows it, and tokens are the same."""
    model = model_of(tmp_path, "llama")
    requests = make_requests(8, prompts=2, seed=90, max_new_tokens=60)
    expected = run(engine(model), requests)
    shape, accepted = options_of(), []
    for restored in (False, True):
        records: list[EngineStepRecord] = []
        core = NativeEngine(
            model,
            shape,
            drafters=build_drafters(SpeculationOptions(strategies=("suffix:8",)), model, shape),
            policy=FixedPolicy(Strategy.parse("suffix:8")),
            steps=records,
        )
        if restored:
            core.load_drafters(str(tmp_path / "drafters"))
        assert_same(run(core, requests), expected)
        core.save_drafters(str(tmp_path / "drafters"))
        accepted.append(sum(record.accepted for record in records))
    tokens = sum(len(rollout.tokens) for rollout in expected.values())
    # The same requests again: nearly every token is in the window.
    assert accepted[1] > accepted[0] + 0.5 * (tokens - accepted[0])


@pytest.mark.parametrize("name", ["ngram", "suffix", "eagle", "self"])
def test_what_an_engine_never_does_is_refused_or_ignored_and_leaves_the_drafter_usable(
    tmp_path: Path, name: str
) -> None:
    model = model_of(tmp_path, "qwen3")
    requests = make_requests(8, prompts=2, seed=91)
    expected = run(engine(model), requests)
    drafter = build_drafters(OPTIONS, model, options_of())[name]
    nothing, some = np.zeros(0, np.int32), np.arange(9, dtype=np.int32)
    calls = [
        lambda slot: drafter.end(slot, some[:5], 3, True),
        lambda slot: drafter.begin(slot, some[:3], nothing),
        lambda slot: drafter.begin(slot, some[:4], some[:2]),  # without an end
        lambda slot: drafter.end(slot, some, 4, False),
        lambda slot: drafter.end(slot, some, 4, True),
        lambda slot: drafter.remember([some[:4]], [nothing]),
        lambda slot: drafter.remember([some], []),
        lambda slot: drafter.new_target(-1),
    ]
    for slot in (0, 7, -1, 8, 10**6):
        for call in calls:
            with suppress(ValueError, IndexError):
                call(slot)
    core = NativeEngine(model, options_of(), drafters={name: drafter}, policy=FixedPolicy(Strategy.parse(f"{name}:4")))
    assert_same(run(core, requests), expected)
