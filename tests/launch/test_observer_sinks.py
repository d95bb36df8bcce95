"""What others than the run's folder get of a run: TensorBoard, Weights & Biases, Ray's gauges."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PacelineError
from launch.observe import Observer, Sample
from tests.launch.test_observer import make_config, record


def test_tensorboard_scalars_and_purge_on_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(tensorboard=True)
    with Observer(tmp_path, config) as observer:
        for step in (1, 2, 3):
            observer.step(record(step, 0.1 * step))
    with Observer(tmp_path, config, resume_from=1) as observer:
        observer.step(record(2, 0.9))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = [(event.step, round(event.value, 3)) for event in board.Scalars("reward/mean")]
    assert scalars == [(1, 0.1), (2, 0.9)]
    assert "seconds/rollout" in board.Tags()["scalars"]


def test_tensorboard_has_hyperparameters_and_responses(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    with Observer(tmp_path, make_config(tensorboard=True)) as observer:
        observer.samples(
            1,
            [
                Sample(prompt="what?", response="this\nand that", reward=1.0, tokens=3, finish_reason="stop"),
                Sample(prompt="p", response="bad", reward=0.0, tokens=3, finish_reason="stop"),
            ],
        )
        observer.samples(
            1, [Sample(prompt="held", response="out", reward=0.5, tokens=3, finish_reason="stop")], held_out=True
        )
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    texts = [text.decode() for text in board.Tensors("samples")[0].tensor_proto.string_val]
    assert texts[0] == "reward 1, 3 tokens\n\n    what?\n\n    this\n    and that\n"
    assert len(texts) == 2
    assert board.Tensors("eval_samples")[0].step == 1
    metadata = board.SummaryMetadata("_hparams_/session_start_info")
    started = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
    chosen = started.hparams
    assert chosen["run.steps"].number_value == 10
    assert chosen["run.name"].string_value == "demo"
    assert chosen["observe.tensorboard"].bool_value is True
    assert "model.tokenizer" not in chosen  # unset
    assert "kind" in chosen["reward.terms"].string_value


def fake_wandb(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    wandb = types.ModuleType("wandb")
    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)


def test_a_second_run_of_a_name_is_another_run_for_wandb_and_a_resumed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []

    def init(**given: Any) -> types.SimpleNamespace:
        ids.append(given["id"])
        return types.SimpleNamespace(finish=lambda: None)

    fake_wandb(monkeypatch, init)
    config = make_config(wandb_project="p")
    for folder, resume_from in (("a", None), ("a", 0), ("b", None)):
        with Observer(tmp_path / folder, config, resume_from=resume_from):
            pass
    assert ids[0] == ids[1] != ids[2]
    assert all(run_id.startswith("demo-") for run_id in ids)


def test_wandb_that_refuses_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("api_key not configured (no-tty)")

    fake_wandb(monkeypatch, refuse)
    with pytest.raises(PacelineError, match="api_key not configured") as caught:
        Observer(tmp_path, make_config(wandb_project="p"))
    assert "wandb login" in str(caught.value.remedy)


class FakeGauge:
    made: dict[str, "FakeGauge"]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values: list[tuple[float, dict[str, str]]] = []
        assert tag_keys == ("run",)
        FakeGauge.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tags))


@pytest.mark.parametrize("initialised", [True, False])
def test_ray_gauges_only_when_ray_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialised: bool) -> None:
    FakeGauge.made = {}
    ray, util, metrics = (types.ModuleType(name) for name in ("ray", "ray.util", "ray.util.metrics"))
    ray.is_initialized = lambda: initialised  # type: ignore[attr-defined]
    metrics.Gauge = FakeGauge  # type: ignore[attr-defined]
    for module in (ray, util, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with Observer(tmp_path, make_config()) as observer:
        observer.step(record(1, float("nan")))
        observer.step(record(2, 0.5))
    if not initialised:
        assert FakeGauge.made == {}
        return
    assert FakeGauge.made["paceline_reward_mean"].values == [(0.5, {"run": "demo"})]
    assert [value for value, _ in FakeGauge.made["paceline_rl_step"].values] == [1.0, 2.0]


def test_wandb_only_if_asked_and_clear_if_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PacelineError, match="wandb is not installed"):
        Observer(tmp_path / "a", make_config(wandb_project="p"))
    logged: list[tuple[int, dict[str, float]]] = []
    arguments: dict[str, Any] = {}
    wandb = types.ModuleType("wandb")

    def init(**given: Any) -> object:
        arguments.update(given)
        log: Callable[..., None] = lambda values, step: logged.append((step, values))  # noqa: E731
        return types.SimpleNamespace(log=log, finish=lambda: logged.append((-1, {})))

    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Observer(tmp_path / "b", make_config(wandb_project="p")) as observer:
        observer.step(record(1))
    assert arguments["project"] == "p"
    assert [step for step, _ in logged] == [1, -1]
    assert logged[0][1]["reward/mean"] == 0.5
