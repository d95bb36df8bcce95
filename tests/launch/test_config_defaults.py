"""Defaults that follow from the engine: what they are, what is written wins, and where `paceline config` says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from actors.engine.capabilities import BACKENDS, NATIVE, Capabilities
from launch.config import Loaded, load_config
from launch.config.bias import biases_of
from launch.config.defaults import settled
from launch.config.show import resolved_lines, to_yaml
from policies import rounds
from policies.token_budget.skip import BIAS

Write = Callable[..., Path]
VLLM = "rollout.engine.backend=vllm"
ORIGIN = "rollout.engine.backend: vllm"
CORRECTION = "objective.sampler_correction"


def test_nothing_changes_with_the_native_engine(write_config: Write) -> None:
    """It computes with the learner's network, so no bit of a loss may come to depend on a correction."""
    loaded = load_config(write_config())
    assert not loaded.config.objective.sampler_correction.active
    assert loaded.config.rollout.speculation.verification == "coupled"
    assert loaded.config.drafter.recording.source == "engine"
    assert loaded.origins == {}


def test_an_engine_with_other_numerics_is_corrected_for_and_it_is_shown(write_config: Write) -> None:
    loaded = load_config(write_config(), [VLLM])
    correction = loaded.config.objective.sampler_correction
    assert (correction.weights, correction.truncate, correction.mask) == ("token", 2.0, "none")
    assert loaded.config.rollout.speculation.verification == "rejection"
    assert loaded.config.drafter.recording.source == "learner"
    shown = {line.strip(): source for line, source in resolved_lines(loaded)}
    assert shown["weights: token"] == shown["truncate: 2.0"] == shown["verification: rejection"] == ORIGIN
    assert shown["source: learner"] == ORIGIN


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["weights=none"], ("none", None, "none")),
        (["weights=sequence"], ("sequence", 2.0, "none")),
        (["truncate=3"], ("token", 3.0, "none")),
        (["truncate=null"], ("token", None, "none")),
        (["mask=token"], ("token", None, "token")),  # IcePop: masked beyond its bounds, cut nowhere
        (["mask=geometric", "weights=none"], ("none", None, "geometric")),
    ],
)
def test_what_is_written_of_the_correction_stays(
    write_config: Write, overrides: list[str], expected: tuple[object, ...]
) -> None:
    found = load_config(write_config(), [VLLM, *(f"{CORRECTION}.{text}" for text in overrides)])
    correction = found.config.objective.sampler_correction
    assert (correction.weights, correction.truncate, correction.mask) == expected


def test_a_run_s_own_configuration_comes_back_equal(write_config: Write, tmp_path: Path) -> None:
    loaded = load_config(write_config(), [VLLM, "objective.name=dapo"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(loaded.config))
    reloaded: Loaded = load_config(again)
    assert reloaded.config == loaded.config
    assert reloaded.origins == {}
    assert settled(loaded.config)[0] == loaded.config


def test_only_what_the_engine_lacks_is_changed(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast(dict[str, Capabilities], BACKENDS), "native", replace(NATIVE, learner_network=False))
    loaded = load_config(write_config())
    assert set(loaded.origins) == {f"{CORRECTION}.weights", f"{CORRECTION}.truncate"}
    assert loaded.config.rollout.speculation.verification == "coupled"


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (["rollout.budget.share=0.5"], "rollout.budget.share: 0.5"),
        (["rollout.budget.tokens_per_step=4000"], "rollout.budget.tokens_per_step: 4000"),
        (["rollout.abort.enabled=true"], "rollout.abort.enabled: true"),
    ],
)
def test_a_budget_or_an_abort_makes_duet_the_objective_and_it_is_shown(
    write_config: Write, overrides: list[str], origin: str
) -> None:
    loaded = load_config(write_config(), [*overrides, "objective.clip_high=0.3"])
    objective = loaded.config.objective
    assert (objective.name, objective.baseline, objective.aggregation) == (
        *("duet", "leave_one_out", "fixed_mean_token_sum_norm"),
    )
    assert objective.sum_divisor == loaded.config.rollout.sampling.max_new_tokens
    assert objective.clip_high == 0.3
    shown = {line.strip(): source for line, source in resolved_lines(loaded)}
    assert shown["name: duet"] == origin
    assert shown["baseline: leave_one_out"] == "objective.name: duet"
    assert load_config(write_config(), [*overrides, "objective.name=grpo"]).config.objective.aggregation == "token_mean"


def test_a_budget_that_is_off_makes_nothing_the_objective(write_config: Write) -> None:
    overrides = ["rollout.budget.share=null", "rollout.abort.enabled=false"]
    assert load_config(write_config(), overrides).config.objective.name == "grpo"


def test_an_objective_that_a_budget_biases_is_called_so(write_config: Write) -> None:
    budget = ["rollout.budget.share=0.5", "learner.mini_batches=1"]
    assert biases_of(load_config(write_config(), budget).config) == []
    assert biases_of(load_config(write_config(), [*budget, "objective.name=grpo"]).config)
    assert biases_of(load_config(write_config(), ["rollout.skip.after=2"]).config) == [BIAS]
    assert biases_of(load_config(write_config(), ["rollout.rounds.factor=1.25"]).config) == [rounds.BIAS]


def test_an_older_policys_responses_are_weighed_and_it_is_shown(write_config: Write) -> None:
    loaded = load_config(write_config(), ["rollout.staleness=1"])
    correction = loaded.config.objective.sampler_correction
    assert (correction.weights, correction.truncate) == ("token", 2.0)
    shown = {line.strip(): source for line, source in resolved_lines(loaded)}
    assert shown["weights: token"] == shown["truncate: 2.0"] == "rollout.staleness: 1"
    parts = load_config(write_config(), ["rollout.partial.tokens_per_step=16"])
    shown = {line.strip(): source for line, source in resolved_lines(parts)}
    assert shown["weights: token"] == "rollout.partial.tokens_per_step: 16"
    written = load_config(write_config(), ["rollout.staleness=1", f"{CORRECTION}.weights=sequence"]).config
    assert written.objective.sampler_correction.weights == "sequence"
    masked = load_config(write_config(), ["rollout.staleness=1", f"{CORRECTION}.mask=token"]).config
    assert (masked.objective.sampler_correction.weights, masked.objective.sampler_correction.truncate) == (
        "token",
        None,
    )
    (bias,) = biases_of(
        load_config(
            write_config(), ["rollout.staleness=1", "rollout.budget.share=0.5", "learner.mini_batches=1"]
        ).config
    )
    assert bias.startswith("rollout.staleness")
