"""Defaults that follow from the engine: what they are, what is written wins, and where `paceline config` says so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from actors.engine.capabilities import BACKENDS, NATIVE, Capabilities
from launch.config import Loaded, load_config
from launch.config.defaults import settled
from launch.config.show import resolved_lines, to_yaml

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
