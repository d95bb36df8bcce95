"""A run of the whole program, small enough for tests: a tiny untrained network, a reward that varies, five RL steps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.guess_and_check.make_data import write_all
from launch import local
from launch.config import load_config
from launch.observe import length_metrics
from launch.run.train import train
from models.checkpoint import init_model, save_model

STEPS = 5
SHARP = "rollout.sampling.temperature=0.3"  # an untrained network repeats itself then, and drafts are accepted


@dataclass(frozen=True)
class Alone:
    """What a run in this process, without Ray, did: the program's own (test_in_process.py), for a tenth of the time."""

    rows: list[dict[str, Any]]  # as Runs.steps
    evaluations: list[dict[str, float]]
    texts: list[str]  # as Runs.texts, of all responses
    asked: list[list[int]]  # rollouts of each prompt, by step, where that is decided


@dataclass(frozen=True)
class Runs:
    """Starts runs of one configuration in one folder."""

    config: Path
    root: Path

    def overrides(self, name: str, *extra: str) -> list[str]:
        return [f"run.name={name}", f"run.dir={self.root}", *extra]

    def run(self, name: str, *extra: str, resume: bool = False) -> list[dict[str, Any]]:
        """Run to the end in this process and return its step records."""
        loaded = load_config(self.config, self.overrides(name, *extra))
        assert train(loaded.config, config_source="test", resume=resume) == 0
        return self.steps(name)

    def alone(self, *extra: str) -> Alone:
        """Run to the end in this process, without Ray: plain decoding, one engine, no folder."""
        record = local.RunRecord(keep_responses=True)
        local.record_run(load_config(self.config, self.overrides("alone", *extra)).config, record)
        return Alone(
            rows=[{"step": step.step, **length_metrics(step.lengths), **step.metrics} for step in record.steps],
            evaluations=list(record.evaluations.values()),
            texts=sorted(
                f"{step} {sample.prompt} {sample.response} {sample.reward}"
                for step, samples in record.responses.items()
                for sample in samples
            ),
            asked=[list(step.rollouts_per_prompt) for step in record.steps],
        )

    def steps(self, name: str) -> list[dict[str, Any]]:
        path = self.root / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if row["kind"] == "step"]

    def evaluations(self, name: str) -> list[dict[str, float]]:
        """The metrics of every evaluation of the run."""
        rows = [json.loads(line) for line in (self.root / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows if row["kind"] == "eval"]

    def texts(self, name: str) -> list[str]:
        """Every response of the run, in canonical order per step."""
        rows = [json.loads(line) for line in (self.root / name / "samples.jsonl").read_text().splitlines()]
        return sorted(f"{row['step']} {row['prompt']} {row['response']} {row['reward']}" for row in rows)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("train")
    write_all(root / "data", seed=0, demonstrations=32)
    config = json.loads((root / "data/model/config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 32}
    (root / "small").mkdir()
    (root / "small/config.json").write_text(json.dumps(config))
    model = init_model(root / "small", seed=0, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(model, root / "model", tokenizer_dir=root / "data/model")
    path = root / "config.yaml"
    path.write_text(
        f"""
run: {{name: base, steps: {STEPS}}}
model: {{path: {root}/model}}
data: {{train: {root}/data/train.jsonl, eval: {root}/data/eval.jsonl, template: plain, limit: 8}}
rollout:
  workers: 1
  prompts_per_step: 4
  rollouts_per_prompt: 6
  sampling: {{max_new_tokens: 48}}
  engine: {{threads: 1, kv_tokens: 4096, progress_every_tokens: 8}}
learner: {{threads: 1, mini_batches: 2, optimizer: {{lr: 1.0e-3}}}}
reward: {{terms: [{{kind: format, pattern: "off|so x"}}]}}
eval: {{samples: 1}}
checkpoint: {{every: 2}}
observe: {{samples_per_step: 24, tensorboard: false}}
"""
    )
    return Runs(path, root)


@pytest.fixture(scope="session")
def base(runs: Runs, ray_head: str) -> list[dict[str, Any]]:
    """The step records of the run `base`: one worker, adaptive speculation. Others are compared with it."""
    return runs.run("base", SHARP)
