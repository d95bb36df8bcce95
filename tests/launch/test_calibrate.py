"""`paceline calibrate` end to end on a tiny model: what it writes is what a run finds, and what it prints adds up."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from actors.engine.calibrated import device_name, model_shape
from actors.engine.native.measuring import PROBE, Check, Measured, Measuring
from actors.observer import UNOBSERVED
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from drafter.ngram import build as ngram
from launch.calibrations import CalibrationStore, file_of, read_calibration
from launch.commands.cli import app
from launch.config import load_config
from launch.run.opening import engine_options
from planner.calibrate import (
    DEPTHS,
    FREE,
    CalibrationReport,
    errors,
    measured_contexts,
    pays_up_to,
    plotted,
    speed,
)
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, PassCost
from tests.engine.support import tiny_model, write_config

KEY = CalibrationKey(model="m", precision="float32", device="d")


def config_file(tmp_path: Path) -> Path:
    """Of a model without weights, whose data are nowhere: neither is needed."""
    path = tmp_path / "config.yaml"
    values = {
        "run": {"name": "r", "dir": str(tmp_path / "runs"), "steps": 2},
        "model": {"path": str(write_config(tmp_path / "model"))},
        "data": {"train": "nowhere.jsonl", "max_prompt_tokens": 16},
        "rollout": {
            "sampling": {"max_new_tokens": 64},
            "engine": {"threads": 1, "max_running": 8, "kv_tokens": 2048, "device": "cpu"},
            "speculation": {"strategies": ["ngram:3", "suffix:4"]},
        },
    }
    path.write_text(yaml.safe_dump(values))
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_what_the_next_run_begins_with(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    code, out, err = run(str(path), "--seconds", "2")
    assert code == 0, err
    config = load_config(path, []).config
    store = CalibrationStore.of(config, UNOBSERVED)
    (found,) = store.given
    assert found.key == CalibrationKey(
        model=model_shape(config.model.path), precision="float32", device=device_name("cpu", engine_options(config))
    )
    file = file_of(store.folder, found.key)
    assert str(file) in out.replace("\n", "")
    assert ElementTree.parse(file.with_suffix(".svg")).getroot().tag.endswith("svg")
    assert {one.requests for one in found.passes} >= {1, 4}
    assert {one.strategy for one in found.drafts} == {"ngram:3", "suffix:4"}  # and no probe
    assert found.fitted is not None
    costs = CostModel(found)
    for one in found.passes:
        assert one.rows % one.requests == 0
        assert costs.step_s(one.requests, one.rows, one.context_tokens) == pytest.approx(one.seconds, rel=2)
    assert re.search(r"by the roofline alone\s*\S\s*\d+", out)
    assert "free drafts" in out


def test_another_folder_can_be_named_and_what_was_there_is_replaced(tmp_path: Path) -> None:
    path, out_dir = config_file(tmp_path), tmp_path / "elsewhere"
    config = load_config(path, []).config
    key = CalibrationKey(
        model=model_shape(config.model.path), precision="float32", device=device_name("cpu", engine_options(config))
    )
    out_dir.mkdir()
    Calibration(key=key, passes=(PassCost(requests=77, rows=77, context_tokens=9, seconds=9.0, count=1000),)).save(
        file_of(out_dir, key)
    )
    code, _, err = run(str(path), "--seconds", "1", "--out", str(out_dir))
    assert code == 0, err
    assert 77 not in {one.requests for one in read_calibration(file_of(out_dir, key)).passes}
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    code, _, err = run(str(config_file(tmp_path)), "rollout.engine.backend=vllm", "rollout.speculation.strategies=null")
    assert code != 0
    assert "vllm" in err


def test_low_bits_are_measured_as_what_they_are(tmp_path: Path) -> None:
    wide = write_config(tmp_path / "wide", hidden_size=128, intermediate_size=128, num_attention_heads=2, head_dim=64)
    path = config_file(tmp_path)
    code, _, err = run(str(path), f"model.path={wide}", "rollout.quantization=w8a8", "--seconds", "1")
    assert code == 0, err
    (file,) = (tmp_path / "runs" / "calibrations").glob("*.json")
    assert json.loads(file.read_text())["key"]["precision"] == "float32 w8a8"


class Ticking:
    """A tenth of a millisecond between any two looks at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


def test_the_order_is_coarse_first_and_the_time_is_kept_to(tmp_path: Path) -> None:
    """By a timer that the test moves: no time, the coarse cells alone; more, the fine ones, each predicted before."""
    told: list[tuple[float, str]] = []

    def measure(seconds: float) -> tuple[Calibration, tuple[Check, ...]]:
        options = EngineOptions(max_running=4, kv_tokens=2048, device="cpu")
        arms = [Strategy("ngram", 3)]
        model = tiny_model(tmp_path)
        drafters = {"ngram": ngram(SpeculationOptions(), options.max_running, 256)}
        measuring = Measuring(model, options, KEY, drafters, arms, [40, 80, 10], timer=Ticking())
        for found in measuring.run(seconds):
            if isinstance(found, tuple):
                told.append(found)
        assert isinstance(found, Measured)
        return found.calibration, found.checks

    coarse, checks = measure(1e-9)
    assert checks == ()
    assert {one.rows // one.requests for one in coarse.passes} <= {1, 4, 16}
    told.clear()
    fine, checks = measure(1e9)
    assert {one.rows // one.requests for one in fine.passes} == {1, 2, 3, 4, 6, 8, 12, 16}
    assert {one.requests for one in fine.passes} == {1, 2, 3, 4}
    assert {(check.requests, check.rows) for check in checks} <= {(one.requests, one.rows) for one in fine.passes}
    assert not any(one.strategy.startswith(PROBE) for one in fine.drafts)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == 1.0


def known(row_s: float) -> Calibration:
    """A machine whose passes cost 1 ms and row_s per row."""
    passes = tuple(
        PassCost(requests=n, rows=n * each, context_tokens=100 * n, seconds=1e-3 + row_s * n * each, count=50)
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for each in (1, 2, 4, 6, 9, 16)
    )
    return Calibration(key=KEY, passes=passes)


def test_the_boundary_is_where_more_rows_cost_what_they_bring() -> None:
    """t = 1 ms + c n (1 + d): it pays where (1 + ... + .8^d) (1 + c n) > 1 + c n (1 + d)."""
    row_s = 2e-5
    costs = CostModel(known(row_s))
    for depth in DEPTHS:
        tokens = sum(0.8**i for i in range(depth + 1))
        exact = (tokens - 1) / (row_s / 1e-3 * (1 + depth - tokens))
        assert pays_up_to(costs, FREE, depth, 100) == pytest.approx(exact, rel=0.2)
        there = tokens * (1e-3 + row_s * 4) / (1e-3 + row_s * 4 * (1 + depth))
        assert speed(costs, FREE, depth, 4, 100) == pytest.approx(there, rel=0.05)
    assert speed(costs, "suffix", 4, 4, 100) is None
    assert pays_up_to(costs, "suffix", 4, 100) == 0


def test_errors_and_plot_of_a_report(tmp_path: Path) -> None:
    report = CalibrationReport(
        path=tmp_path / "c.json",
        plot=tmp_path / "c.svg",
        calibration=known(2e-5),
        checks=(Check(4, 4, 400, 1.2e-3, 1.0e-3), Check(8, 8, 800, 0.9e-3, 1.0e-3)),
        context=100,
        seconds=1.0,
    )
    assert errors(report)["before it was measured"] == pytest.approx([0.2, 0.1])
    svg = ElementTree.fromstring(plotted(report))
    circles = [element for element in svg.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 + len(report.calibration.passes)
    lines = [element for element in svg.iter() if element.tag.endswith("polyline")]
    assert len(lines) == len(DEPTHS)
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"measured, ms", "predicted, ms", "before it was measured", "3 tokens"} <= set(texts)


def test_contexts_are_those_of_responses_and_bounded(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path), []).config
    assert measured_contexts(config) == [40, 80, 10]
    long = load_config(
        config_file(tmp_path), ["rollout.sampling.max_new_tokens=30000", "rollout.engine.kv_tokens=40000"]
    ).config
    assert measured_contexts(long) == [1024, 4096, 128]
