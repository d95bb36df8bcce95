"""`paceline export-model`: the very weights of a checkpoint, as a Hugging Face model."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.training.checkpoint import write_checkpoint
from actors.training.options import OptimizerOptions
from launch.commands.export_model import export
from launch.errors import UsageError
from tests.learner.tiny import make_sequences, make_trainer, write_config

KL = {"kl": "k3", "kl_coef": 0.1}  # its checkpoints hold a reference model too


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of step 1 and 2, and beside each what the learner itself exports."""
    from policies.options import ObjectiveOptions

    folder, model = tmp_path / "run", write_config(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    trainer = make_trainer(model, objective=ObjectiveOptions(**KL))
    trainer.begin(OptimizerOptions(lr=1e-2), 4)
    for step in (1, 2):
        trainer.rl_step(make_sequences(6), temperature=1.0)
        write_checkpoint(folder / "checkpoints", step, trainer.save, {}, keep=2)
        trainer.export(tmp_path / f"exported-{step}")
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


def test_what_is_not_there_is_said_with_what_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint of step 7") as caught:
        export(run, tmp_path / "out", 7)
    assert "there are 1, 2" in str(caught.value.remedy)
    with pytest.raises(UsageError, match="no run in"):
        export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UsageError, match="holds a model already"):
        export(run, tmp_path / "exported-1")
