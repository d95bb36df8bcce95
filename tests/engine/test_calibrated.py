"""An engine's calibration: the names of shapes, which one is its own, and what the driver hears of passes and drift."""

import json
from pathlib import Path

import pytest
import torch

from actors.engine.calibrated import (
    DRIFT_S,
    DRIFT_STEPS,
    REFINED_S,
    PassNews,
    calibrated,
    device_name,
    model_shape,
    precision_name,
)
from actors.engine.native.core import build
from actors.engine.native.engine import NativeEngine
from actors.engine.wire import Start
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import PLAIN
from contracts.rollout import EngineWindow, Event, PassesDrifted, PassesKnown, PassesRefined
from launch.cluster.installed import native_stamp
from models.checkpoint import save_model
from models.config import ModelConfigError
from models.ops import native
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, PassCost
from policies.speculation.policy import FixedPolicy
from tests.engine.support import drain, make_requests, options_of, tiny_model, write_config
from tests.windows import engine_window

KEY = CalibrationKey(model="m", precision="float32", device="d")


def window(end_s: float, engine_steps: int = 1) -> EngineWindow:
    return engine_window(start_s=end_s, end_s=end_s, engine_steps=engine_steps, running=1)


def start_of(model: Path, *calibrations: Calibration, path: str = "", **changes: object) -> Start:
    values: dict[str, object] = {
        "model": ModelOptions(path=str(model)),
        "options": EngineOptions(device="cpu", max_running=4, kv_tokens=512),
        "seed": 0,
        "weights_version": 0,
        "niceness": 0,
        "speculation": SpeculationOptions(),
        "calibrations": calibrations,
        "calibration_path": path,
    }
    return Start(**(values | changes))


def with_passes(key: CalibrationKey, seconds: float = 1e-3) -> Calibration:
    passes = tuple(PassCost(requests=n, rows=n, context_tokens=32 * n, seconds=seconds, count=9) for n in (1, 2, 4))
    return Calibration(key=key, passes=passes)


def test_a_shape_is_what_a_pass_computes_and_nothing_else(tmp_path: Path) -> None:
    model = write_config(tmp_path / "a")
    shape = model_shape(model)
    assert shape == "qwen3, 2 layers of 32, 4/2 heads of 16, inner 48, vocabulary 61, tied"
    save_model(tiny_model(tmp_path / "b"), tmp_path / "saved")  # as a warm start writes it
    assert model_shape(tmp_path / "saved") == shape
    longer = write_config(tmp_path / "c", max_position_embeddings=512, bos_token_id=3, initializer_range=0.1)
    assert model_shape(longer) == shape
    for change in ({"num_hidden_layers": 3}, {"intermediate_size": 64}, {"vocab_size": 62}, {"num_key_value_heads": 4}):
        assert model_shape(write_config(tmp_path / f"d{next(iter(change))}", **change)) != shape


def test_an_architecture_that_is_not_ours_has_a_shape_too(tmp_path: Path) -> None:
    def config(**changes: object) -> Path:
        path = tmp_path / "config.json"
        raw = {"architectures": ["GemmaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 1}
        path.write_text(json.dumps(raw | changes))
        return path

    shape = model_shape(config())
    assert shape.startswith("GemmaForCausalLM ")
    assert model_shape(config(eos_token_id=7, max_position_embeddings=99, transformers_version="5")) == shape
    assert model_shape(config(hidden_size=128)) != shape
    with pytest.raises(ModelConfigError):
        model_shape(tmp_path / "nothing")


def test_precision_and_device_have_names() -> None:
    assert precision_name("bfloat16", "none") == "bfloat16"
    assert precision_name("float32", "w8a8") == "float32 w8a8"
    name = device_name("cpu", options_of())
    assert name.endswith(f"{torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1))
    assert device_name("cpu", options_of(), "vllm 0.32.0") == f"{name}, vllm 0.32.0"


def test_kernels_of_another_build_are_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier kernels took says nothing of these, and would send drafts where they lose."""
    if native.kernels is None:
        pytest.skip("the native kernels are not installed")
    before = device_name("cpu", options_of())
    stamp = native.kernel_stamp()
    assert stamp
    assert stamp == native_stamp()
    assert stamp in before
    monkeypatch.setattr(native, "kernel_stamp", lambda: "0" * 12)
    assert device_name("cpu", options_of()) == before.replace(stamp, "0" * 12) != before


def test_an_engine_takes_its_own_device_s_of_those_it_is_handed(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model")
    key = CalibrationKey(model=model_shape(model), precision="float32", device=device_name("cpu", options_of()))
    other = key.model_copy(update={"device": "another machine"})
    costs, news = calibrated(start_of(model, with_passes(other, 5.0), with_passes(key, 2e-3)), "cpu")
    assert costs.step_s(2, 2, 64) == pytest.approx(2e-3, rel=0.05)
    assert news.after_window(window(1.0), idle=False) == [PassesKnown(key, 3)]
    costs, news = calibrated(start_of(model, with_passes(other, 5.0)), "cpu")
    assert costs.step_s(2, 2, 64) is None
    assert news.after_window(window(1.0), idle=False) == [PassesKnown(key, 0)]


def test_a_demanded_calibration_of_another_device_ends_the_start_by_name(tmp_path: Path) -> None:
    save_model(tiny_model(tmp_path), tmp_path / "model")
    key = CalibrationKey(model=model_shape(tmp_path / "model"), precision="float32", device="GPU of another kind")
    here = device_name("cpu", options_of())
    with pytest.raises(ValueError, match=r"rollout.speculation.calibration=/c.json is of another engine") as refused:
        build(start_of(tmp_path / "model", with_passes(key), path="/c.json"))
    assert f"device is 'GPU of another kind', not '{here}'" in str(refused.value)
    assert "paceline calibrate" in str(refused.value)
    build(start_of(tmp_path / "model", with_passes(key)))  # handed over, not demanded


def test_what_was_learned_is_told_when_the_engine_idles_often_at_first(tmp_path: Path) -> None:
    costs = CostModel(with_passes(KEY))
    news = PassNews(costs, KEY, None)
    told = []
    for step in range(1, 200):
        events = news.after_window(window(step * 1e-3), idle=step % 10 == 0)
        told += [step for event in events if isinstance(event, PassesRefined)]
    assert told == [10, 20, 40, 80, 160]
    (refined,) = news.after_window(window(1.0 + REFINED_S), idle=True)
    assert isinstance(refined, PassesRefined)
    assert refined.calibration.key == KEY
    assert len(refined.calibration.passes) == 3
    nothing = PassNews(CostModel(), KEY, None).after_window(window(0.0), idle=True)
    assert nothing == [PassesKnown(KEY, 0)]  # and nothing to keep


def test_an_engine_that_was_slowed_says_so_once_and_again_when_it_recovers(tmp_path: Path) -> None:
    """Another tenant: every step takes twice its time for a while. Its clock and its steps' times are the test's."""
    now, step_s = [0.0], [1e-3]

    def timer() -> float:
        now[0] += step_s[0] / 2  # called at the begin and at the end of a step
        return now[0]

    passes = tuple(
        PassCost(requests=n, rows=n, context_tokens=c * n, seconds=step_s[0] / 2, count=20)
        for n in (1, 2, 4, 8)
        for c in (16, 64, 200)
    )
    calibration = Calibration(key=KEY, passes=passes)
    costs = CostModel(calibration)
    core = NativeEngine(
        tiny_model(tmp_path),
        options_of(kv_tokens=4096),
        policy=FixedPolicy(PLAIN, costs=costs),
        clock=lambda: now[0] * 100,
        timer=timer,
        news=PassNews(costs, KEY, calibration),
    )

    def decode(seed: int) -> list[PassesDrifted]:
        core.submit(make_requests(8, seed=seed, max_new_tokens=200))
        events: list[Event] = drain(core)
        return [event for event in events if isinstance(event, PassesDrifted)]

    assert decode(1) == []
    step_s[0] *= 2
    (slower,) = decode(2) + decode(3)
    assert (slower.factor, slower.before) == (pytest.approx(2.0, rel=0.3), 1.0)
    step_s[0] /= 2
    (again,) = decode(4) + decode(5)
    assert (again.factor, again.before) == (pytest.approx(1.0, abs=0.3), slower.factor)


def test_a_short_disturbance_is_no_drift() -> None:
    class Costs(CostModel):
        drift = 1.0

    costs = Costs()
    news = PassNews(costs, KEY, with_passes(KEY))
    news.after_window(window(0.0), idle=False)
    costs.drift = 3.0
    for step in range(DRIFT_STEPS - 1):
        assert news.after_window(window(10.0 + step), idle=False) == []
    costs.drift = 1.0
    assert news.after_window(window(500.0), idle=False) == []
    costs.drift = 3.0
    for step in range(4 * DRIFT_STEPS):  # many steps, in less than the time that counts
        assert news.after_window(window(600.0 + step * DRIFT_S / (4 * DRIFT_STEPS)), idle=False) == []
    assert news.after_window(window(600.0 + 2 * DRIFT_S), idle=False) == [PassesDrifted(3.0, 1.0)]
