"""A newcomer's hour with the installed wheel, from an empty folder: own model, reward, environment, LoRA; train,
resume, eval, chat, export, and the export in transformers and peft. Then what a newcomer gets wrong, and what is said.

The wheel is built as a user builds it, or is the file that PACELINE_WHEEL names, and is installed into a virtual
environment of its own, which sees this one's packages but not this checkout.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NO_BACKEND = ("No matching distribution", "Could not find a version", "connection", "resolve")  # pip without a network
MODEL = """
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config
torch.manual_seed(0)
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
special = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
tokenizer.train_from_iterator(["What is 3 + 4?"], trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
fast.chat_template = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}")
shape = dict(vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, eos_token_id=0, bos_token_id=None, pad_token_id=0)
for name, kind in (("llama", LlamaConfig), ("qwen2", Qwen2Config)):
    AutoModelForCausalLM.from_config(kind(**shape)).save_pretrained(name)
    fast.save_pretrained(name)
"""
REWARD = '''
def grade(prompt, response, record):
    """The share of letters: differs from response to response."""
    return sum(sign.isalpha() for sign in response) / max(1, len(response))

def raises(prompt, response, record):
    return float(response == record["solution"])

def takes_answer(prompt, response, answer):
    return float(response == answer)
'''
GAME = '''
class Parity:
    """An action as long as is asked for, up to a multiple of two, ends the game."""

    def reset(self, record):
        self.wanted = int(record["answer"]) % 2
        return None

    def step(self, action):
        right = len(action) % 2 == self.wanted
        return "again", float(right), right
'''
OWN = """
run: {name: own, steps: 2}
model: {path: llama}
data: {train: train.jsonl, eval: held_out.jsonl, system_prompt: "Answer with the number only.", max_prompt_tokens: 96}
rollout: {prompts_per_step: 2, rollouts_per_prompt: 4, sampling: {max_new_tokens: 12}, engine: {threads: 1}}
learner: {lora: {rank: 4}, optimizer: {lr: 1.0e-3}}
reward: {terms: [{kind: python, function: "my_reward:grade"}]}
cluster: {layout: embedded}
"""
GAMES = """
run: {name: game, steps: 1}
model: {path: qwen2}
data: {train: train.jsonl, max_prompt_tokens: 96}
rollout: {prompts_per_step: 2, rollouts_per_prompt: 4, sampling: {max_new_tokens: 12}, engine: {threads: 1}}
environment: {factory: "my_game:Parity", max_turns: 2, max_turn_tokens: 4}
cluster: {layout: embedded}
"""
LOADS = """
import sys, torch, transformers
from peft import PeftModel
torch.set_grad_enabled(False)
whole = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = transformers.AutoTokenizer.from_pretrained(sys.argv[1]).apply_chat_template(
    [{"role": "user", "content": "What is 3 + 4?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
assert whole.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] > tokens.input_ids.shape[1]
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
before = base(**tokens).logits.clone()
adapted = PeftModel.from_pretrained(base, sys.argv[1] + "/adapter").merge_and_unload()(**tokens).logits
after = whole(**tokens).logits
print(f"CHANGED {(after - before).abs().max():.9f} DIFFERENCE {(after - adapted).abs().max():.9f}")
"""
DROPS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}A:"


@dataclass(frozen=True)
class Newcomer:
    """Types commands in a folder."""

    folder: Path
    bin: Path

    def python(self, *arguments: str) -> str:
        return self._said([str(self.bin / "python"), *arguments])

    def paceline(self, *arguments: str, code: int = 0) -> str:
        """All that is shown, white space joined and without the frames of boxes. Fails unless it ends with `code`."""
        shown = self._said([str(self.bin / "paceline"), *arguments], code)
        assert "Traceback" not in shown, shown
        assert "this is a bug" not in shown, shown
        return " ".join(shown.replace("\u2502", " ").split())

    def _said(self, command: list[str], code: int = 0) -> str:
        known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=known, timeout=400)
        shown = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{shown}"
        return shown

    def steps(self, run: str) -> list[dict[str, Any]]:
        rows = map(json.loads, (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines())
        return [row for row in rows if row["kind"] == "step"]


def _built(pip: list[str], folder: Path) -> str:
    command = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode and any(words in done.stderr + done.stdout for words in NO_BACKEND):
        pytest.skip("pip cannot fetch what builds the wheel (scikit-build-core, nanobind): no package index")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return str(wheel)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """An empty folder but for the user's own files, and an environment with the wheel."""
    there = tmp_path_factory.mktemp("newcomer")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = os.environ.get("PACELINE_WHEEL") or _built(pip, there / "wheels")
    environment, mine = there / "environment", there / "mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=120)
    install = [*pip, "--python", str(environment / "bin/python"), "install", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    site = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    mine.mkdir()
    files = {"make_model.py": MODEL, "my_reward.py": REWARD, "my_game.py": GAME, "own.yaml": OWN, "game.yaml": GAMES}
    files |= dict.fromkeys(("models.py", "launch.py", "actors.py"), "raise SystemExit('in place of Paceline's')")
    for name, count in (("train.jsonl", 8), ("held_out.jsonl", 2)):
        lines = [{"prompt": f"What is {number} + 4?", "answer": str(number + 4)} for number in range(count)]
        files[name] = "\n".join(map(json.dumps, lines))
    for name, text in files.items():
        (mine / name).write_text(text)
    user = Newcomer(mine, environment / "bin")
    user.python("make_model.py")
    return user


def test_own_model_reward_and_lora_from_config_to_export(newcomer: Newcomer) -> None:
    assert str(ROOT) not in newcomer.python("-c", "import paceline; print(paceline.__file__)")
    assert "my_reward:grade" in newcomer.paceline("config", "own.yaml")
    assert "finished: 2 RL steps" in newcomer.paceline("train", "own.yaml")
    first = newcomer.steps("own")
    assert all(step["groups/used"] == 2 and "reward/python" in step for step in first)
    said = newcomer.paceline("train", "own.yaml", "--resume", "run.steps=3")
    assert "from step 2" in said
    assert newcomer.steps("own")[:2] == first
    assert len(newcomer.steps("own")) == 3
    evaluated = newcomer.paceline("eval", "runs/own", "--base")
    assert all(words in evaluated for words in ("base", "trained", "difference", "eval_samples.jsonl"))
    assert "are trained" not in evaluated
    newcomer.paceline("chat", "runs/own", "--prompt", "What is 3 + 4?")
    newcomer.paceline("report", "runs/own")
    assert (newcomer.folder / "runs/own/report.html").stat().st_size > 10_000
    assert "the model after 3 RL steps" in newcomer.paceline("export", "runs/own", "--out", "exported")
    said = newcomer.python("-c", LOADS, "exported", "llama")
    found = re.search(r"CHANGED ([\d.]+) DIFFERENCE ([\d.]+)", said)
    assert found is not None, said
    changed, difference = map(float, found.groups())
    assert difference < 1e-4 < changed


def test_own_environment(newcomer: Newcomer) -> None:
    assert "finished: 1 RL steps" in newcomer.paceline("train", "game.yaml")
    (step,) = newcomer.steps("game")
    assert "reward/environment" in step


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["config", "onw.yaml"], 2, ["no such configuration file: onw.yaml", "game.yaml, own.yaml"]),
        (["config", "own.yaml", "learner.optimiser.lr=1e-3"], 2, ["did you mean learner.optimizer.lr=0.001?"]),
        (["config", "own.yaml", "batch_size=8"], 2, ["rollout.prompts_per_step", "rollout.rollouts_per_prompt"]),
        (["config", "own.yaml", f"data.chat_template={DROPS}"], 2, ["not a YAML value", "KEY='\"TEXT\"'"]),
        (["train", "own.yaml", f'data.chat_template="{DROPS}"'], 2, ["leaves out the prompt", "is a text here"]),
        (["train", "own.yaml", "data.train=trian.jsonl"], 2, ["data.train", "trian.jsonl", "looked in"]),
        (["train", "own.yaml", "model.path=lama"], 2, ["model.path", "config.json", "looked in"]),
        (["train", "own.yaml", "data.prompt_field=question"], 2, ["train.jsonl, line 1", "has answer, prompt"]),
        (["train", "own.yaml", "reward.terms.0.function=my_reward:grad"], 2, ["did you mean grade?"]),
        (["train", "own.yaml", "reward.terms.0.function=my_reward.py:grade"], 2, ["write my_reward:NAME"]),
        (["train", "own.yaml", "reward.terms.0.function=my_rewards:grade"], 2, ["No module named", "looked in"]),
        (["train", "own.yaml", "reward.terms.0.function=my_reward:takes_answer"], 2, ['read record["answer"]']),
        (["train", "game.yaml", "environment.factory=my_game:Party"], 2, ["environment.factory", "it has Parity"]),
        (["chat", "runs/nothing"], 2, ["runs/nothing is neither", "a run's folder has config.yaml"]),
        (["export", "runs/nothing"], 2, ["no run in runs/nothing", "config.yaml"]),
    ],
    ids=lambda value: value[-1][:40] if isinstance(value, list) else str(value),
)
def test_what_is_wrong_is_named_with_the_remedy(
    newcomer: Newcomer, command: list[str], code: int, words: list[str]
) -> None:
    said = newcomer.paceline(*command, code=code)
    assert all(each in said for each in words), said


def test_a_reward_that_raises_stops_the_run_and_is_named_with_its_line(newcomer: Newcomer) -> None:
    command = ["train", "own.yaml", "run.name=raised", "reward.terms.0.function=my_reward:raises"]
    said = newcomer.paceline(*command, "reward.max_failures_per_step=0", code=1)
    line = REWARD.splitlines().index('    return float(response == record["solution"])') + 1
    assert f"KeyError: 'solution' (my_reward.py:{line})" in said
    assert "reward.max_failures_per_step" in said
