"""A user's modules lie in the folder that the command is started from: the installed script finds them there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.guess_and_check.make_data import write_all
from models.checkpoint import init_model, save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(sys.executable).with_name("paceline")
HELPER = "LENGTH = 3\n"
REWARD = """
from my_helper import LENGTH

def short(prompt, response, record):
    return float(len(response) < LENGTH)
"""
GAME = """
class Guess:
    def reset(self, record):
        return None

    def step(self, action):
        return "no", float(len(action) % 2), False
"""
PARTS = """
import numpy as np
from my_helper import LENGTH
from paceline.extend import Drafter, Drafts, TokenLosses

def loss(inputs, scale):
    return TokenLosses(-scale * inputs.advantages * inputs.logprobs, {"length": inputs.logprobs * 0 + LENGTH})

def advantages(rewards, lengths):
    return [np.arange(1.0, 1 + len(group)) for group in rewards]

class Sevens(Drafter):
    def __init__(self, slots, max_tokens):
        pass

    def propose(self, batch, strategy):
        size = len(batch.slots)
        return Drafts(np.full((size, strategy.depth), 7), np.full(size, strategy.depth))
"""
CONFIG = """
run: {name: own, steps: 1, dir: .}
model: {path: model}
data: {train: train.jsonl, chat_template: "{% for m in messages %}{{ m.content }}{% endfor %}", max_prompt_tokens: 32}
rollout:
  prompts_per_step: 2
  rollouts_per_prompt: 2
  sampling: {max_new_tokens: 16}
  engine: {threads: 1}
  speculation: {mode: fixed, strategies: ["sevens:2"], drafters: [{name: sevens, function: "my_parts:Sevens"}]}
objective: {loss: "my_parts:loss", loss_arguments: {scale: 0.5}, advantages: "my_parts:advantages"}
environment: {factory: "my_game:Guess", max_turns: 2, max_turn_tokens: 2}
reward: {terms: [{kind: environment}, {kind: python, name: short, function: "my_rewards:short"}]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory)


def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user's folder has: a configuration, a small model, prompts, modules; and packages called as ours are."""
    here = tmp_path_factory.mktemp("mine")
    write_all(here / "made", seed=0, demonstrations=32)
    shape = json.loads((here / "made/model/config.json").read_text())
    shape |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 32}
    (here / "shape").mkdir()
    (here / "shape/config.json").write_text(json.dumps(shape))
    network = init_model(here / "shape", seed=0, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(network, here / "model", tokenizer_dir=here / "made/model")
    lines = (here / "made/train.jsonl").read_text().splitlines()[:4]
    (here / "train.jsonl").write_text("\n".join(lines))
    files = {
        "my_helper.py": HELPER,
        "my_rewards.py": REWARD,
        "my_game.py": GAME,
        "my_parts.py": PARTS,
        "c.yaml": CONFIG,
    }
    for package in ("models", "launch", "actors"):
        files[f"{package}/__init__.py"] = "raise SystemExit('the module of a user was imported in place of ours')"
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    return here


def paceline(here: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=here, env=given, timeout=500)


def test_what_a_folder_has_is_found_and_what_it_has_not_is_named_with_the_folder(folder: Path) -> None:
    done = paceline(folder, "config", "c.yaml")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "reward.terms" not in said
    assert "environment" not in said
    assert "my_parts" not in said
    wrong = ("reward.terms.1.function=my_words:short", "environment.factory=my_games:Guess")
    said = " ".join(paceline(folder, "config", "c.yaml", *wrong).stderr.split())
    for key, module in zip(("reward.terms", "environment.factory"), ("my_words", "my_games"), strict=True):
        assert f"No module named '{module}'; looked in {folder}" in said, key
    assert said.count("put the module into one of these folders") == 2


@pytest.mark.ray
def test_a_run_grades_plays_learns_and_drafts_with_them(folder: Path) -> None:
    """In reward workers, environment processes, the learner, the driver and engines, beside a user's packages that are
    called as ours are."""
    done = paceline(folder, "train", "c.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = (json.loads(line) for line in (folder / "own/metrics.jsonl").read_text().splitlines())
    assert {"reward/short", "reward/environment"} <= step.keys()
    assert step["own_loss/length"] == 3
    assert step["groups/varied"] == step["groups/used"] == 2, "the advantages are the user's, whatever the rewards"
    assert "sevens" in (folder / "own/speculation.jsonl").read_text()
    assert "drafter_failed" not in (folder / "own/events.jsonl").read_text()
