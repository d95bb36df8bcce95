"""Which drafters an engine gets for which options."""

import logging
from pathlib import Path

import pytest

from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from drafter import build
from drafter.build import build_drafters
from tests.engine.support import tiny_model
from tests.native import needs_native

ENGINE = EngineOptions(max_running=3, kv_tokens=512)


@needs_native
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["ngram", "self", "suffix"]),
        ({"mode": "off"}, []),
        ({"eagle": EagleOptions(path="random")}, ["eagle", "ngram", "self", "suffix"]),
        ({"strategies": ("suffix:4", "plain")}, ["suffix"]),
        ({"strategies": ("plain",)}, []),
        ({"strategies": ("eagle:3x2/6", "ngram:2"), "eagle": EagleOptions(path="random")}, ["eagle", "ngram"]),
    ],
    ids=str,
)
def test_drafters_by_options(tmp_path: Path, options: dict, names: list[str]) -> None:
    drafters = build_drafters(SpeculationOptions(**options), tiny_model(tmp_path), ENGINE)
    assert sorted(drafters) == names
    assert all(drafter.name == name for name, drafter in drafters.items())


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [("sufix:4", r"strategies names the drafter 'sufix'.*suffix, eagle, ngram"), ("eagle:4", "eagle.path")],
)
def test_a_drafter_that_cannot_be_is_named_with_its_key(tmp_path: Path, strategy: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build_drafters(SpeculationOptions(strategies=(strategy,)), tiny_model(tmp_path), ENGINE)


def test_without_the_extension_there_is_one_warning_and_no_model_free_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tmp_path)
    monkeypatch.setattr(build, "kernels", None)
    with caplog.at_level(logging.WARNING):
        assert build_drafters(SpeculationOptions(), model, ENGINE) == {}
    assert len(caplog.records) == 1
    assert "pip install -e ." in caplog.text
