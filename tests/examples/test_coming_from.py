"""Three well-known scripts of TRL and verl as they are here: they parse, are checked as far as this machine goes, and
grade; one runs whole with a tiny model."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data import load_prompts, load_tokenizer
from actors.rewards import GradeItem, build
from examples.guess_and_check.make_data import write_all
from examples.guess_and_check.task import Problem
from launch import local
from launch.config import check_environment, load_config
from models.checkpoint import init_model, save_model

FOLDER = Path(__file__).parents[2] / "examples" / "coming_from"
SCRIPTS = sorted(FOLDER.glob("*.yaml"))
NOT_HERE = {"cluster.layout", "model.path", "data.train", "data.eval"}  # no GPU, no model, no data


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_is_a_configuration_that_lacks_nothing_but_model_data_and_gpu(path: Path) -> None:
    config = load_config(path).config
    assert {issue.key for issue in check_environment(config)} <= NOT_HERE
    assert config.rollout.rollouts_per_prompt * config.rollout.prompts_per_step >= 64


@pytest.mark.parametrize(
    ("name", "record", "response", "parts"),
    [
        ("trl_gsm8k", {"answer": "6 * 7 is 42\n#### 1,042"}, "It is 1042.", {"correct": 1, "numeric": 1}),
        ("trl_gsm8k", {"answer": "#### 42"}, "41", {"correct": 0, "numeric": 1}),
        ("trl_gsm8k", {"answer": "#### 42"}, "forty-two", {"correct": 0, "numeric": 0}),
        ("trl_format", {"solution": "X"}, "<think>a\nb</think>\n<answer> x </answer>", {"format": 1, "accuracy": 1}),
        ("trl_format", {"solution": "X"}, "so <answer>x</answer>", {"format": 0, "accuracy": 1}),
        ("verl_gsm8k", {"answer": "42"}, "so it is\n#### 42", {"math": 1}),
        ("verl_gsm8k", {"answer": "42"}, "so it is 41", {"math": 0}),
    ],
)
def test_rewards(name: str, record: dict[str, str], response: str, parts: dict[str, float]) -> None:
    grader = build(load_config(FOLDER / f"{name}.yaml").config.reward)
    try:
        grade = grader.grade(GradeItem(prompt="?", response=response, record=record, finish_reason="stop"))
    finally:
        grader.close()
    assert (grade.parts, grade.error) == (parts, None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ of the demo, and a network of two thin layers in model/."""
    root = tmp_path_factory.mktemp("coming_from")
    write_all(root / "data", seed=0, demonstrations=32)
    config = json.loads((root / "data/model/config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 32}
    (root / "small").mkdir()
    (root / "small/config.json").write_text(json.dumps(config))
    import torch

    network = init_model(root / "small", seed=0, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(network, root / "model", tokenizer_dir=root / "data/model")
    return root


def test_the_files_that_verl_prepares_are_read_as_they_are(tiny: Path) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": Problem(5, 2, 1).prompt}],
            "reward_model": {"style": "rule", "ground_truth": "3"},
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows), tiny / "train.parquet")
    given = ["data.chat_template='{{ messages[0].content }}'", f"data.train={tiny}/train.parquet"]
    options = load_config(FOLDER / "verl_gsm8k.yaml", given).config.data
    (prompt,) = load_prompts(options, "train", load_tokenizer(str(tiny / "model")))
    assert (prompt.text, prompt.record["answer"]) == (Problem(5, 2, 1).prompt, "3")


def test_one_runs_whole(tiny: Path) -> None:
    problems = [Problem(5, a, c) for a in (2, 3) for c in (1, 2)]
    lines = [json.dumps({"question": p.prompt, "answer": f"so\n#### {p.answer}"}) for p in problems]
    (tiny / "train.jsonl").write_text("\n".join(lines))
    given = [
        *(f"model.path={tiny}/model", "model.dtype=float32", f"data.train={tiny}/train.jsonl", f"run.dir={tiny}"),
        *("run.steps=2", "cluster.layout=embedded", "cluster.gpu=null", "learner.autocast_bf16=false"),
        *("rollout.sampling.max_new_tokens=1", "rollout.prompts_per_step=4", "data.max_prompt_tokens=32"),
        *("rollout.engine={threads: 1, kv_tokens: 4096}", "learner.threads=1", "rollout.rollouts_per_prompt=4"),
    ]
    record = local.RunRecord()
    local.record_run(load_config(FOLDER / "trl_gsm8k.yaml", given).config, record)
    assert [step.step for step in record.steps] == [1, 2]
    assert all(0 < step.metrics["reward/numeric"] < 1 for step in record.steps)  # an untrained network's
    assert all(step.metrics["grad_norm/mean"] > 0 for step in record.steps)
    assert record.steps[-1].metrics["kl"] > 0  # against the model that it began with
