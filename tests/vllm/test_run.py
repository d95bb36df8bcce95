"""Whole runs of the program with vLLM as the rollout engine: what is learned, recorded, warned of and resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.config import check_environment, load_config
from launch.report.summary import summarise
from tests.train.conftest import SHARP, Runs, runs
from tests.train.test_drafter_training import TRAINED, LongRuns, long
from tests.vllm.families import write_family
from tests.vllm.support import VLLM

__all__ = ["long", "runs"]  # fixtures
pytestmark = [*VLLM, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

BACKEND = (
    "rollout.engine.backend=vllm",
    "rollout.engine.vllm_arguments={enforce_eager: true}",
)  # no compiling: minutes
ENGINE = (*BACKEND, SHARP)
NEARLY = 5e-6  # mean gap, float32


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_agrees_with_its_engine_and_is_resumed(runs: Runs) -> None:
    """Adaptive speculation, two optimizer steps a step, evaluations at another temperature."""
    options = (*ENGINE, "eval.every=2", "eval.temperature=0", "rollout.workers=2")
    assert check_environment(load_config(runs.config, runs.overrides("vllm", *options)).config) == []
    steps = runs.run("vllm", *options, "run.steps=2")
    folder = runs.root / "vllm"
    for row in steps:
        assert row["groups/used"] > 0
        assert row["grad_norm/mean"] > 0
        assert 0 < row["logprob_gap/mean"] < NEARLY
        assert row["sampler_correction/weight"] == pytest.approx(1.0, abs=1e-4)
        assert row["sampler_correction/truncated"] == 0
        assert 0 <= row["speculation/share"] <= 1
    assert summarise(folder).correction == "by token, weights up to 2"
    kinds = [event["kind"] for event in events(folder)]
    assert kinds.count("not_repeatable") == 1
    again = runs.run("vllm", *options, "run.steps=3", resume=True)
    assert [row["step"] for row in again] == [1, 2, 3]
    assert again[:2] == steps
    assert again[2]["logprob_gap/mean"] < NEARLY
    assert len(runs.evaluations("vllm")) == 3  # greedy
    assert (folder / "model" / "config.json").is_file()


def test_a_low_bit_run_agrees_with_a_learner_that_mirrors_it(runs: Runs) -> None:
    """Weights come in few bits at every hand-over; vLLM cannot be evaluated in full precision afterwards."""
    options = (*ENGINE, "rollout.quantization=w8a8", "run.steps=2")
    assert check_environment(load_config(runs.config, runs.overrides("low-bit", *options)).config) == []
    aligned = runs.run("low-bit", *options)
    apart = runs.run("low-bit-unaligned", *options, "learner.quantization=none")
    for row, other in zip(aligned, apart, strict=True):
        assert row["groups/used"] > 0
        assert row["logprob_gap/mean"] < 0.2 * other["logprob_gap/mean"]


@pytest.mark.long
def test_weights_come_as_what_changed(runs: Runs) -> None:
    """Through the store, which is vLLM's way. With a generator for each request the tokens are those of full copies."""
    small = ("run.steps=2", "model.dtype=bfloat16", "learner.optimizer.lr=1e-6", "eval.every=0")
    options = (*ENGINE, *small, "rollout.engine.seeded_requests=true", "rollout.speculation.mode=off")
    whole = runs.run("vllm-whole", *options, "cluster.weights_delta=never")
    steps = runs.run("vllm-delta", *options, "cluster.weights_delta=always")
    for row, other in zip(steps, whole, strict=True):
        assert row["weights/by_delta"] == 1
        assert 0 < row["weights/delta_bytes"] < row["weights/bytes"] / 5
        assert (row["loss/mean"], row["reward/mean"]) == (other["loss/mean"], other["reward/mean"])
    assert runs.texts("vllm-delta") == runs.texts("vllm-whole")
    assert "weights_delta_refused" not in {event["kind"] for event in events(runs.root / "vllm-delta")}
    print([(row["weights/delta_bytes"], row["weights/bytes"]) for row in steps])


def test_another_architecture_learns(runs: Runs) -> None:
    """A learner of transformers' and vLLM's engine, through the program."""
    shutil.copytree(runs.root / "model", runs.root / "mistral")
    (runs.root / "mistral" / "model.safetensors").unlink()
    write_family("mistral", runs.root / "mistral")
    options = (*ENGINE, f"model.path={runs.root}/mistral", "run.steps=2")
    assert check_environment(load_config(runs.config, runs.overrides("mistral", *options)).config) == []
    for row in runs.run("mistral-run", *options):
        assert row["logprob_gap/mean"] < NEARLY
        assert row["groups/used"] > 0
    exported = json.loads((runs.root / "mistral-run" / "model" / "config.json").read_text())
    assert exported["architectures"] == ["MistralForCausalLM"]


def test_a_drafter_learns_in_the_tails_and_vllm_drafts_with_it(long: LongRuns) -> None:
    """From the states of the learner's pass: vLLM records none. Its weights are handed over while the run goes on."""
    name = "vllm-eagle"
    rows = long.run(name, lambda: long.has_trained(name), *TRAINED, *BACKEND)
    assert not long.says(name, "drafter_failed")
    assert not long.says(name, "trainer_lost")
    assert any(record["levels"].get("version", 0) > 0 for record in long.drafter(name))
    drafted = [use["drafted"] for record in long.speculation(name) for use in record["strategies"].values()]
    assert sum(drafted) > 0
    assert all(row["logprob_gap/mean"] < NEARLY for row in rows if "logprob_gap/mean" in row)
