"""Runs with a token budget and an abort: whatever drafts, they ask for the same responses, end them at the same tokens,
and learn the same. In one process, without Ray; whole programs are in test_ruled_programs.py."""

from dataclasses import dataclass
from typing import Any

import pytest

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.step.types import Settled
from actors.engine.batch.stops import RuleStops
from actors.engine.process import NO_SPECULATION
from config.speculation import SpeculationOptions
from launch.config import load_config
from launch.local import RunRecord, initial_weights, record_run
from tests.train.conftest import Runs

RULED = (
    "rollout.sampling.max_new_tokens=64",
    "rollout.budget.share=0.75",
    "rollout.abort={enabled: true, marker: boxed, keep: 0.25, grace_tokens: 3, window: 200, warmup_responses: 20}",
    "rollout.abort.abort_quantile=0.4",
    "reward.terms=[{kind: python, function: 'tests.train.early_reward:early', prefix_sufficient: true}]",
)
DECIDED = ("budget/", "abort/", "reward/", "length/", "loss/", "grad_norm/", "groups/", "tokens/", "rollouts/")
W8A8 = "rollout.quantization=w8a8"


def writer(runs: Runs) -> str:
    """The override that names a network which has learned in a second to write answers, few of them right."""
    demonstrations = f"data: '{runs.root}/data/demos.jsonl', init: random, steps: 60, batch_size: 8"
    warmup = f"warmup={{{demonstrations}, optimizer: {{lr: 3.0e-3, warmup_steps: 10}}}}"
    return f"model.path={initial_weights(load_config(runs.config, runs.overrides('writer', warmup)).config)}"


@dataclass(frozen=True)
class Told:
    """What a run decided, sampled and learned."""

    asked: list[list[int]]
    metrics: list[dict[str, float]]
    responses: list[tuple[Any, ...]]
    evaluations: list[dict[str, float]]

    def reasons(self) -> set[str]:
        return {str(reason) for *_, reason in self.responses}


def told(runs: Runs, speculation: SpeculationOptions, *extra: str) -> Told:
    config = load_config(runs.config, runs.overrides("ruled", writer(runs), *RULED, *extra)).config
    record_run(config, record := RunRecord(keep_responses=True), speculation=speculation)
    return Told(
        asked=[list(step.rollouts_per_prompt) for step in record.steps],
        metrics=[{k: v for k, v in step.metrics.items() if k.startswith(DECIDED)} for step in record.steps],
        responses=[
            (step, s.prompt, s.response, s.tokens, s.reward, s.finish_reason)
            for step, samples in record.responses.items()
            for s in samples
        ],
        evaluations=list(record.evaluations.values()),
    )


def fixed(*strategies: str) -> SpeculationOptions:
    return SpeculationOptions(mode="fixed", strategies=strategies)


@pytest.fixture(scope="module")
def plain(runs: Runs) -> Told:
    """Plain decoding; with responses of every end, unequal counts, and late ones that were kept."""
    found = told(runs, NO_SPECULATION)
    assert found.reasons() == {"stop", "length", "answered", "given_up"}
    assert any(len(set(counts)) > 2 for counts in found.asked)
    assert any(metrics["abort/kept_late_share"] > 0 for metrics in found.metrics)
    assert all(metrics["groups/used"] > 0 for metrics in found.metrics)
    return found


@pytest.mark.parametrize(
    "speculation",
    [SpeculationOptions(), fixed("suffix:6"), fixed("suffix:4x2/8"), fixed("ngram:4"), fixed("self:3")],
    ids=["adaptive", "chain", "tree", "ngram", "self"],
)
def test_drafts_change_nothing_that_is_asked_for_ended_or_learned(
    runs: Runs, plain: Told, speculation: SpeculationOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted, apply = [0, 0], RuleStops.apply

    def heard(stops: RuleStops, plan: StepPlan, settled: Settled) -> Settled:
        after = apply(stops, plan, settled)
        accepted[0] += after.accepted_tokens
        accepted[1] += settled.new_tokens - after.new_tokens
        return after

    monkeypatch.setattr(RuleStops, "apply", heard)
    assert told(runs, speculation) == plain
    if speculation.mode == "fixed":
        assert accepted[0] > 0, "nothing was drafted that stood"
    if speculation.strategies == ("self:3",):
        assert accepted[1] > 0, "no draft ran past an end"


def test_low_bit_rollouts_with_drafts_are_ruled_as_without(runs: Runs) -> None:
    plain = told(runs, NO_SPECULATION, W8A8)
    assert {"answered", "given_up"} <= plain.reasons()
    assert told(runs, fixed("suffix:4x2/8"), W8A8) == plain
