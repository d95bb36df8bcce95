"""What stops a run is found before Ray, by `paceline config` and by the run alike; what is right is not accused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from coordinator.transport.security import write_keys
from examples.guess_and_check.make_data import write_all
from launch.commands.cli import app
from launch.commands.preflight import Command, preflight
from launch.config import load_config
from tests.drafter.published_support import write_head


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer (its weights are empty: nothing here reads them), data, a configuration."""
    root = tmp_path_factory.mktemp("inputs")
    write_all(root / "data", seed=0, demonstrations=32)
    shutil.copytree(root / "data/model", root / "model")
    (root / "model/model.safetensors").touch()
    (root / "config.yaml").write_text(
        f"""
run: {{name: checked, steps: 5, dir: {root}/runs}}
model: {{path: {root}/model}}
data: {{train: {root}/data/train.jsonl, eval: {root}/data/eval.jsonl, template: plain, max_prompt_tokens: 16}}
rollout: {{sampling: {{max_new_tokens: 48}}}}
warmup: {{data: {root}/data/demos.jsonl}}
"""
    )
    return root


def found(inputs: Path, *overrides: str, command: Command = "train") -> list[str]:
    return [str(issue) for issue in preflight(load_config(inputs / "config.yaml", overrides).config, command)]


def model_like(inputs: Path, name: str, **changes: Any) -> str:
    """A copy of the model whose config.json is changed; returns the override."""
    folder = inputs / name
    shutil.copytree(inputs / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return f"model.path={folder}"


def data(inputs: Path, name: str, text: str) -> str:
    (inputs / name).write_text(text)
    return f"data.train={inputs / name}"


def tokenizer_without_bytes(inputs: Path) -> str:
    """As BERT's; returns the override."""
    folder = inputs / "wordpiece"
    shutil.copytree(inputs / "model", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return f"model.tokenizer={folder}"


TRAINED = ["rollout.workers=2", "drafter.train=true"]


def keys(inputs: Path, roles: tuple[str, ...]) -> Path:
    folder = inputs / f"keys-{len(roles)}"
    shutil.rmtree(folder, ignore_errors=True)
    write_keys(folder, roles)
    return folder


Case = Callable[[Path], list[str]]
GOOD = '{"prompt": "1", "answer": "1"}\n'
CASES: dict[str, tuple[Case, str, str]] = {  # overrides, the key, what the message must say
    "gemma": (
        lambda root: [model_like(root, "gemma", architectures=["GemmaForCausalLM"])],
        "model.path",
        "GemmaForCausalLM is not supported by this version: rollouts need one of LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM with full attention",
    ),
    "quantized": (
        lambda root: [model_like(root, "gptq", quantization_config={"quant_method": "gptq"})],
        "model.path",
        "a quantized checkpoint (quantization_config) is not supported",
    ),
    "too long a limit": (
        lambda root: ["rollout.engine.max_model_tokens=100000"],
        "rollout.engine.max_model_tokens",
        "or leave it out",
    ),
    "no chat template": (lambda root: ["data.template=chat"], "data.train", "use data.template=plain"),
    "another vocabulary": (
        lambda root: [model_like(root, "small", vocab_size=8)],
        "model.tokenizer",
        "name the model's own tokenizer in model.tokenizer, or give the model more embeddings",
    ),
    "a stop token that is not there": (
        lambda root: ["rollout.sampling.stop_token_ids=[1, 999999]"],
        "rollout.sampling.stop_token_ids",
        "999999 is outside the model's vocabulary",
    ),
    "stop strings with a tokenizer that has no bytes": (
        lambda root: ["rollout.sampling.stop_strings=['}']", tokenizer_without_bytes(root)],
        "rollout.sampling.stop_strings",
        "WordPiece",
    ),
    "an empty stop string": (
        lambda root: ["rollout.sampling.stop_strings=['}', '']"],
        "rollout.sampling.stop_strings",
        "end every response",
    ),
    "a negative stop token": (
        lambda root: ["rollout.sampling.stop_token_ids=[-1]"],
        "rollout.sampling.stop_token_ids",
        "-1 is outside the model's vocabulary",
    ),
    "no room": (
        lambda root: [model_like(root, "short", max_position_embeddings=2)],
        "data.train",
        "set data.max_prompt_tokens=1",
    ),
    "too long": (
        lambda root: [data(root, "long.jsonl", json.dumps({"prompt": "1 " * 90}) + "\n")],
        "data.train",
        "1 prompts too long",
    ),
    "another field": (
        lambda root: ["data.prompt_field=question"],
        "data.train",
        "no field 'question' (data.prompt_field); the record has",
    ),
    "another answer": (lambda root: ["data.answer_field=gold"], "data.train", "no field 'gold' (data.answer_field)"),
    "csv": (lambda root: [data(root, "t.csv", "prompt,answer\n1,1\n")], "data.train", "read_csv('t.csv').to_json("),
    "null device": (lambda root: ["data.train=/dev/null"], "data.train", "is neither a file nor a folder"),
    "empty folder": (lambda root: [f"data.train={root}/model"], "data.train", "holds no data files"),
    "bad demonstration": (
        lambda root: [data(root, "demos.jsonl", GOOD).replace("data.train", "warmup.data")],
        "warmup.data",
        "no field 'response' (warmup.response_field)",
    ),
    "no such function": (
        lambda root: ["reward.terms=[{kind: python, function: 'nowhere.at_all:grade'}]"],
        "reward.terms.0.function",
        "nowhere",
    ),
    "no keys": (
        lambda root: [*TRAINED, f"coordinator.curve.directory={root}/data"],
        "coordinator.curve.directory",
        "make the files with python -m coordinator keys",
    ),
    "only the coordinator's keys": (
        lambda root: [*TRAINED, f"coordinator.curve.directory={keys(root, ('coordinator',))}"],
        "coordinator.curve.directory",
        "worker-key.json",
    ),
    "no host": (
        lambda root: [*TRAINED, "coordinator.host=not a host"],
        "coordinator.host",
        "'not a host' is no address of this machine",
    ),
    "another machine's address": (
        lambda root: [*TRAINED, "coordinator.host=192.0.2.7"],  # of no machine: kept for documents
        "coordinator.host",
        "'192.0.2.7' is no address of this machine",
    ),
    "another machine's address for the admin service": (
        lambda root: [*TRAINED, "coordinator.admin_host=192.0.2.7"],
        "coordinator.admin_host",
        "name one of this machine's addresses",
    ),
    "a hub model": (
        lambda root: ["model.path=Qwen/Qwen2.5-0.5B-Instruct"],
        "model.path",
        "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir hub/Qwen2.5-0.5B-Instruct",
    ),
    "a recipe's model": (
        lambda root: ["model.path=hub/Qwen2.5-0.5B-Instruct"],
        "model.path",
        "download it first: hf download ORGANISATION/Qwen2.5-0.5B-Instruct --local-dir hub/Qwen2.5-0.5B-Instruct",
    ),
    "a hub data set": (
        lambda root: ["data.train=openai/gsm8k"],
        "data.train",
        "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stops_a_run_is_known_before_ray(inputs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    overrides, key, words = CASES[name]
    issues = found(inputs, *overrides(inputs))
    assert issues
    assert issues[0].startswith(f"{key}: "), issues
    assert words in issues[0], issues


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "lo"])
def test_a_coordinators_own_keys_and_addresses_are_silent(
    inputs: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    all_keys = f"coordinator.curve.directory={keys(inputs, ('coordinator', 'worker', 'driver'))}"
    assert found(inputs, *TRAINED, all_keys, f"coordinator.host={host}") == []
    assert found(inputs, "coordinator.host=192.0.2.7") == []  # no drafter is trained: there is no coordinator
    elsewhere = [*TRAINED, "cluster.address=head:6379", "coordinator.host=192.0.2.7"]
    assert not any(issue.startswith("coordinator") for issue in found(inputs, *elsewhere))


def test_what_is_right_is_silent(inputs: Path) -> None:
    """Also where the first records are too long or bad, and later ones are not."""
    assert found(inputs) == []
    assert "hf download" not in found(inputs, "data.train=data/absent.jsonl")[0]
    longer = (json.dumps({"prompt": "1 " * 90}) + "\n") * 70
    assert found(inputs, data(inputs, "late.jsonl", longer + GOOD)) == []
    assert found(inputs, data(inputs, "skip.jsonl", "{\n" * 70 + GOOD), "data.on_bad_line=skip") == []


def test_a_command_is_asked_only_for_what_it_uses(inputs: Path) -> None:
    gemma = model_like(inputs, "gemma", architectures=["GemmaForCausalLM"])
    assert found(inputs, gemma, command="warmup") == []  # the learner takes it
    assert len(found(inputs, gemma, command="eval")) == 1
    bad = data(inputs, "bad.jsonl", "{\n")
    assert len(found(inputs, bad)) == 1
    assert found(inputs, bad, command="eval") == found(inputs, bad, command="warmup") == []


def test_train_refuses_what_config_refuses_and_leaves_no_trace(inputs: Path) -> None:
    arguments = [str(inputs / "config.yaml"), model_like(inputs, "gemma", architectures=["GemmaForCausalLM"])]
    shown, refused = (CliRunner().invoke(app, [command, *arguments]) for command in ("config", "train"))
    assert (shown.exit_code, refused.exit_code) == (2, 2)
    assert "error: model.path" in shown.stderr
    assert "path: " in shown.stdout  # the configuration is printed all the same
    assert CliRunner().invoke(app, ["config", arguments[0]]).exit_code == 0
    assert "GemmaForCausalLM is not supported" in " ".join(refused.stderr.split())
    assert "--resume" not in refused.stderr
    assert not (inputs / "runs").exists()


def test_a_published_head_is_looked_into(inputs: Path) -> None:
    """Its config.json and its tensors, against the model, before Ray: file and key are named. A whole one is fine."""
    model = inputs / "deep"
    override = model_like(inputs, "deep", num_hidden_layers=6)
    shape = json.loads((model / "config.json").read_text())
    vocab, hidden = shape["vocab_size"], shape["hidden_size"]

    def issues(name: str, **changes: Any) -> list[str]:
        head = inputs / "heads" / name
        tensors = write_head(head, "speculators", vocab, torch.arange(0, vocab, 3), hidden=hidden)
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | changes))
        if name == "half":
            del tensors["fc.weight"]
        if name == "far":
            tensors["d2t"][5] = vocab
        save_file(tensors, head / "model.safetensors")
        told = found(inputs, override, f"rollout.speculation.eagle.path={head}", *TRAINED, "drafter.algorithm=eagle3")
        return [issue for issue in told if "eagle" in issue]

    assert issues("whole") == []
    for name, changes, text in (
        ("kind", {"speculators_model_type": "peagle"}, "config.json: speculators_model_type is 'peagle'"),
        (
            "layers",
            {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            "eagle_aux_hidden_state_layer_ids is [2, 16, 29]",
        ),
        ("half", {}, "model.safetensors: fc.weight is missing"),
        ("far", {}, f"model.safetensors: d2t[5] = {vocab}"),
    ):
        (issue,) = issues(name, **changes)
        assert issue.startswith("rollout.speculation.eagle.path")
        assert str(inputs / "heads" / name) in issue
        assert text in issue
    (issue,) = found(inputs, override, f"rollout.speculation.eagle.path={inputs}/heads/whole", *TRAINED)
    assert "eagle trains a drafter of kind eagle, and" in issue


def test_a_speculator_of_vllms_is_looked_into(inputs: Path) -> None:
    """Before anything starts, file and key are named. Needs no vLLM."""
    shape = json.loads((inputs / "model/config.json").read_text())
    whole = {
        **shape,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]},
    }

    def issues(name: str, names: tuple[str, ...] = ("fc.weight", "norm.weight", "layers.0.x"), **changes: Any) -> str:
        head = inputs / "speculators" / name
        head.mkdir(parents=True)
        (head / "config.json").write_text(json.dumps(whole | changes))
        save_file({each: torch.zeros(1) for each in names}, head / "model.safetensors")
        told = found(inputs, "rollout.engine.backend=vllm", f"rollout.speculation.dflash.path={head}")
        mine = [issue for issue in told if issue.startswith("rollout.speculation.dflash.path")]
        assert all(str(head / "config.json") in issue for issue in mine)
        return "; ".join(mine)

    assert issues("whole") == ""
    assert "made for another target: its vocab_size is 7" in issues("other", vocab_size=7)
    assert "speculators_model_type is 'xpress', which is no dflash" in issues("kind", speculators_model_type="xpress")
    assert "hold no layers.0.*: half a checkpoint" in issues("half", names=("fc.weight", "norm.weight"))
    (issue,) = (
        issue
        for issue in found(inputs, "rollout.engine.backend=vllm", "rollout.speculation.peagle.path=nowhere")
        if issue.startswith("rollout.speculation.peagle.path")
    )
    assert "no directory of a speculator" in issue
