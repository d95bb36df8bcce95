"""A newcomer's hour with the installed wheel, from an empty folder: own model, reward, environment, LoRA, eval, export.

The wheel's layout lies in a virtual environment of its own, which sees this one's packages but not this checkout.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from native.wheel_layout import lay_out
from tests.train.test_own_folder import make_folder

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PLAIN = """
run: {name: plain, steps: 1, dir: .}
model: {path: model}
data: {train: train.jsonl, eval: train.jsonl, max_prompt_tokens: 16, template: plain}
rollout: {prompts_per_step: 2, rollouts_per_prompt: 2, sampling: {max_new_tokens: 16}, engine: {threads: 1}}
learner: {lora: {rank: 4}}
reward: {terms: [{kind: python, function: "my_rewards:short"}]}
"""
LOADS = """
import sys, torch, transformers
from peft import PeftModel
whole = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
adapted = PeftModel.from_pretrained(base, sys.argv[1] + "/adapter").merge_and_unload()
ids = torch.arange(8)[None]
print("DIFFERENCE", float((whole(ids).logits - adapted(ids).logits).abs().max()))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the wheel's layout."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    lay_out(ROOT, site)
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    return str(folder / "bin/python")


def test_own_modules_lora_eval_and_export(python: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    here = make_folder(tmp_path_factory)
    (here / "plain.yaml").write_text(PLAIN)
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}

    def call(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=here, env=known, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(ROOT) not in call("-c", "import paceline; print(paceline.__file__)")
    call("-m", "paceline", "config", "c.yaml")
    call("-m", "paceline", "train", "c.yaml")  # an environment and a reward of one's own
    call("-m", "paceline", "train", "plain.yaml")
    for run in ("own", "plain"):
        (step,) = (json.loads(line) for line in (here / run / "metrics.jsonl").read_text().splitlines())
        assert "reward/short" in step
        call("-m", "paceline", "report", run)
        assert (here / run / "report.html").stat().st_size > 10_000
    call("-m", "paceline", "eval", "plain")
    call("-m", "paceline", "export", "plain", "--step", "1", "--out", "exported")
    text = call("-c", LOADS, "exported", "model")
    assert float(text.rpartition("DIFFERENCE ")[2]) < 1e-4
