"""New weights of a drafter between two steps of running requests: they change what is drafted, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.batch.speculation import MAX_FAILURES
from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from contracts.rollout import DrafterFailed, Event, Request
from drafter.build import build_drafters
from drafter.eagle.model import init_eagle
from drafter.protocol import BatchView, Drafter, Drafts
from models import weights
from models.manifest import WeightsManifest
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import (
    DrafterBase,
    assert_same,
    drain,
    engine,
    make_requests,
    options_of,
    rollouts,
    tiny_model,
)


class Told(FixedPolicy):
    """Notes which drafters are new, and which are gone."""

    def __init__(self, strategy: str) -> None:
        super().__init__(Strategy.parse(strategy))
        self.new: list[str] = []
        self.gone: list[str] = []

    def renewed(self, drafter: str) -> None:
        self.new.append(drafter)

    def unavailable(self, drafter: str) -> None:
        self.gone.append(drafter)
        super().unavailable(drafter)


def published(model: Transformer, version: int) -> tuple[WeightsManifest, weights.Buffer]:
    drafter = init_eagle(model.config, version, dtype=torch.float32, device="cpu", batch_invariant=True)
    return weights.pack(drafter.state_dict(), version)


@pytest.mark.parametrize("strategy", ["eagle:3", "eagle:3x2/6"])
@pytest.mark.parametrize("every_steps", [1, 4])
def test_tokens_and_the_targets_kv_stay(tmp_path: Path, strategy: str, every_steps: int) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=5, seed=6)

    def steps_of(core: NativeEngine) -> Iterator[list[Event]]:
        core.submit(requests)
        while core.has_work:
            yield core.step()

    told: list[EngineStepRecord] = []
    plain = NativeEngine(model, options_of(max_running=6), steps=told)
    expected = rollouts([event for events in steps_of(plain) for event in events])
    prefilled, kept = sum(step.prefill_tokens for step in told), 0

    speculation = SpeculationOptions(strategies=(strategy,), eagle=EagleOptions(path="random"))
    options, policy = options_of(max_running=6), Told(strategy)
    told.clear()
    core = NativeEngine(model, options, drafters=build_drafters(speculation, model, options), policy=policy, steps=told)
    events: list[Event] = []
    for number, found in enumerate(steps_of(core)):
        events += found
        if number % every_steps == 0:
            manifest, buffer = published(model, number + 1)
            answer = core.update_drafter("eagle", manifest, buffer)
            assert (answer.version, answer.checksum, answer.reason) == (number + 1, manifest.checksum, "")
            kept += 1
    assert_same(rollouts(events), expected)
    assert policy.new == ["eagle"] * kept
    assert sum(step.drafted for step in told) > 0
    assert sum(step.prefill_tokens for step in told) == prefilled, "no prompt is computed again"


class FailsAtTimes:
    """An EAGLE drafter that raises at each of these calls of `propose`."""

    needs_hidden = True
    trained = True

    def __init__(self, drafter: Drafter, at: set[int]) -> None:
        self._drafter, self._at, self.calls = drafter, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        self.calls += 1
        if self.calls in self._at:
            raise RuntimeError(f"out of order at call {self.calls}")
        return self._drafter.propose(batch, strategy)


def test_a_drafter_that_failed_comes_back_with_new_weights_a_bounded_number_of_times(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(8, prompts=4, seed=6, max_new_tokens=120)
    expected = rollouts(drain_all(engine(model), requests))
    speculation = SpeculationOptions(strategies=("eagle:3",), eagle=EagleOptions(path="random"))
    made = build_drafters(speculation, model, options_of())
    told: list[EngineStepRecord] = []
    policy = FixedPolicy(Strategy.parse("eagle:3"))
    drafter: Any = FailsAtTimes(made["eagle"], {3, 6, 9})
    core = NativeEngine(model, options_of(), drafters={"eagle": drafter}, policy=policy, steps=told)
    core.submit(requests)
    events, version, drafted = [], 0, []
    while core.has_work:
        found = core.step()
        events += found
        if any(isinstance(event, DrafterFailed) for event in found):
            before = len(told)
            events += core.step() + core.step()
            assert not any(step.drafted for step in told[before:]), "it decodes without"
            version += 1
            reason = core.update_drafter("eagle", *published(model, version)).reason
            assert bool(reason) == (version == MAX_FAILURES)
            drafted.append(sum(step.drafted for step in told))
    failures = [event for event in events if isinstance(event, DrafterFailed)]
    assert [(failure.name, failure.final) for failure in failures] == [("eagle", n == 3) for n in (1, 2, 3)]
    assert failures[0].reason == "RuntimeError: out of order at call 3"
    assert drafted == sorted(set(drafted)), "it drafts between two failures"
    assert sum(step.drafted for step in told) == drafted[-1], "and no more after the last"
    assert_same(rollouts(events), expected)


def drain_all(core: NativeEngine, requests: list[Request]) -> list[Event]:
    core.submit(requests)
    return drain(core)


class Breaks(DrafterBase):
    """Fails in the middle of taking new weights."""

    trained = True

    def update(self, version: int, tensors: object) -> None:
        raise RuntimeError("half of it is there")


def test_a_drafter_that_breaks_over_new_weights_is_given_up(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests, policy = make_requests(4, seed=2), Told("test:2")
    core = NativeEngine(model, options_of(), drafters={"test": Breaks()}, policy=policy)
    core.submit(requests)
    events = core.step()
    assert "half of it" in core.update_drafter("test", *published(model, 1)).reason
    assert policy.gone == ["test"]
    expected = engine(model)
    expected.submit(requests)
    assert_same(rollouts(events + drain(core)), rollouts(drain(expected)))
    assert "half of it" in core.update_drafter("test", *published(model, 2)).reason
    assert "half of it" in core.update_drafter("test", *published(model, 3)).reason
    assert "it failed 3 times" in core.update_drafter("test", *published(model, 4)).reason
