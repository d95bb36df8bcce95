"""`paceline export`: the very weights of a checkpoint, as a Hugging Face model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from config.formats import FORMATS
from config.learner import OptimizerOptions
from launch.commands.export_model import export, export_best
from launch.errors import UsageError
from models.checkpoint import load_model
from models.compressed_tensors import quantization_config
from models.config import ModelConfigError
from models.durable import seal
from models.low_bit import quantised
from tests.checkpoints import write_checkpoint
from tests.learner.tiny import make_sequences, make_trainer, write_config

KL = {"kl": "k3", "kl_coef": 0.1}  # its checkpoints hold a reference model too


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of step 1 and 2, and beside each what the learner itself exports."""
    from config.objective import ObjectiveOptions

    folder, model = tmp_path / "run", write_config(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    trainer = make_trainer(model, objective=ObjectiveOptions(**KL))
    trainer.begin(OptimizerOptions(lr=1e-2), 4)
    for step in (1, 2):
        trainer.rl_step(make_sequences(6), temperature=1.0)
        write_checkpoint(folder / "checkpoints", step, trainer.save, {}, keep=2)
        trainer.weights.export(tmp_path / f"exported-{step}")
    config = {"run": {"name": "run"}, "model": {"path": str(model)}, "data": {"train": "t"}, "objective": KL}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize(("step", "exported"), [(1, 1), (2, 2), (None, 2)])
def test_the_weights_are_those_of_the_checkpoint(run: Path, tmp_path: Path, step: int | None, exported: int) -> None:
    said = export(run, tmp_path / "out", step)
    assert f"after {exported} RL steps" in said
    found = load_file(tmp_path / "out/model.safetensors")
    wanted = load_file(tmp_path / f"exported-{exported}/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_in_few_bits_it_is_what_engines_are_handed_and_what_was_evaluated_is_noted(run: Path, tmp_path: Path) -> None:
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"rollout": {"quantization": "w8a8"}}))
    state = run / "checkpoints/step_000002/state.json"
    evaluations = {"2": {"eval/reward": 0.5, "eval/master_reward": 0.4}}
    state.write_text(json.dumps({"step": 2, "evaluations": evaluations}))
    seal(state.parent)
    said = export(run, tmp_path / "out", quantization="w8a8")
    assert "2 RL steps, in w8a8; rollouts and evaluations of the run are in w8a8" in said
    found = load_file(tmp_path / "out/model.safetensors")
    masters = load_file(tmp_path / "exported-2/model.safetensors")
    expected = dict(quantised(masters.items(), FORMATS["w8a8"]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"] == quantization_config(FORMATS["w8a8"])
    note = json.loads((tmp_path / "out/evaluation.json").read_text())
    rewards = {"w8a8": 0.5, "float32": 0.4}
    assert note == {"step": 2, "weights": "w8a8", "evaluated_as": "w8a8", "eval/reward": rewards}
    with pytest.raises(ModelConfigError, match="master weights"):
        load_model(tmp_path / "out")
    export(run, tmp_path / "full")
    assert json.loads((tmp_path / "full/evaluation.json").read_text()) == note | {"weights": "float32"}


def test_adapters_are_merged_into_the_weights_that_the_run_began_with(run: Path, tmp_path: Path) -> None:
    base = tmp_path / "exported-1"
    trainer = make_trainer(base, init="checkpoint", lora={"rank": 2})
    trainer.rl_step(make_sequences(6), temperature=1.0)
    write_checkpoint(run / "checkpoints", 3, trainer.save, {}, keep=3)
    trainer.weights.export(tmp_path / "own")
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"learner": {"lora": {"rank": 2}}}
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"model": {"path": str(base)}}))
    said = export(run, tmp_path / "out", 3)
    assert str(tmp_path / "out/adapter") in said
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found, wanted = load_file(tmp_path / "out" / name), load_file(tmp_path / "own" / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    (base / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="hold adapters"):
        export(run, tmp_path / "again", 3)


def test_a_format_without_a_checkpoint_is_refused_with_those_that_have_one(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint is written in w4a8") as caught:
        export(run, tmp_path / "out", quantization="w4a8")
    assert "w8a8, fp8" in str(caught.value.remedy)


def test_what_is_not_there_is_said_with_what_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint of step 7") as caught:
        export(run, tmp_path / "out", 7)
    assert "there are 1, 2" in str(caught.value.remedy)
    with pytest.raises(UsageError, match="no run in"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UsageError, match="holds a model already"):
        export(run, tmp_path / "exported-1")


def test_the_best_is_copied_as_it_was_kept(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no best model"):
        export_best(run, tmp_path / "out")
    shutil.copytree(tmp_path / "exported-1", run / "best")
    (run / "best/best.json").write_text(json.dumps({"step": 1, "eval/aime/pass@8": 0.75}))
    assert "after 1 RL steps, the best by eval/aime/pass@8, 0.75" in export_best(run, tmp_path / "out")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "exported-1"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(UsageError, match="holds a model already"):
        export_best(run, tmp_path / "out")
