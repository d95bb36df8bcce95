"""What a warm start is found again by: everything that it depends on, by content, and nothing else."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import load_config
from launch.run.warmup import fingerprint

Write = Callable[..., Path]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a model, a tokenizer and demonstrations."""
    root = tmp_path / "one"
    for name, content in {
        "model/config.json": "{}",
        "tokenizer/tokenizer.json": "words",
        "demos.jsonl": '{"prompt": "a", "response": "b"}',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def key(write_config: Write) -> Callable[..., str]:
    def key_of(root: Path, *overrides: str) -> str:
        base = [
            f"model.path={root}/model",
            f"model.tokenizer={root}/tokenizer",
            f"warmup={{data: {root}/demos.jsonl, init: random, steps: 9}}",
        ]
        return fingerprint(load_config(write_config(), [*base, *overrides]).config)

    return key_of


def test_the_same_inputs_in_another_checkout_are_the_same_warm_start(key: Callable[..., str], checkout: Path) -> None:
    other = shutil.copytree(checkout, checkout.with_name("two"))
    assert key(other) == key(checkout)


@pytest.mark.parametrize("name", ["model/config.json", "tokenizer/tokenizer.json", "demos.jsonl"])
def test_other_content_is_another_warm_start(key: Callable[..., str], checkout: Path, name: str) -> None:
    before = key(checkout)
    (checkout / name).write_text("changed")
    assert key(checkout) != before


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9",
        "warmup.steps=8",
        "warmup.optimizer.lr=0.01",
        "data.max_prompt_tokens=9",
        "model.batch_invariant=false",
        "learner.threads=7",
        "learner.ranks=2",
        "learner.micro_batch_tokens=99",
        "learner.packing=false",
        "learner.autocast_bf16=true",
    ],
)
def test_what_changes_the_result_is_another_warm_start(key: Callable[..., str], checkout: Path, override: str) -> None:
    assert key(checkout, override) != key(checkout)


@pytest.mark.parametrize("override", ["run.name=b", "run.steps=9", "rollout.workers=2", "learner.mini_batches=2"])
def test_what_does_not_is_none(key: Callable[..., str], checkout: Path, override: str) -> None:
    assert key(checkout, override) == key(checkout)


def test_the_demo_with_vllm_takes_the_demos_warm_start(key: Callable[..., str], checkout: Path) -> None:
    """The Makefile's overrides: a learner on a CPU computes batch-invariantly unless it is told not to."""
    vllm = "rollout.engine.backend=vllm", "rollout.engine.vllm_arguments={enforce_eager: true}"
    assert key(checkout, "model.batch_invariant=null", *vllm) == key(checkout, "model.batch_invariant=true")


def test_threads_count_as_they_are_resolved(
    key: Callable[..., str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with other cores gives other last bits, and so another warm start."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert key(checkout) == key(checkout, "learner.threads=6")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert key(checkout) != key(checkout, "learner.threads=6")
