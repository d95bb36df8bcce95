"""Every shipped configuration for GPUs does one RL step of its learner on the CPU, with two layers and the vocabulary
of its model: the head then has several chunks, which a toy vocabulary never has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from config.learner import LearnerOptions
from config.model import ModelOptions
from config.tree import Config
from contracts.training import TrainSequence
from tests.learner.ranks import run_ranks
from tests.learner.tiny import write_config

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml") if "dtype: bfloat16" in path.read_text(encoding="utf-8"))
# Qwen2.5: size, tied head
VOCABULARY = {"0.5B": (151_936, True), "1.5B": (151_936, True), "7B": (152_064, False), "32B": (152_064, False)}


def load(path: Path) -> Config:
    return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def write_model(directory: Path, name: str) -> Path:
    """Two thin layers of the model with this name."""
    size = next(size for size in VOCABULARY if f"-{size}" in name)
    vocabulary, tied = VOCABULARY[size]
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return write_config(directory, vocab_size=vocabulary, tie_word_embeddings=tied, initializer_range=0.02, **family)


def one_step(rank: Rank, config: Config, model: Path) -> tuple[list[float], list[float], int]:
    """Losses, gradient norms, and chunks of the head in the largest micro-batch there can be."""
    learner: LearnerOptions = config.learner.model_copy(update={"device": "cpu", "ranks": rank.size})
    options: ModelOptions = config.model.model_copy(update={"path": str(model)})
    trainer = Trainer(options, learner, config.objective, rank=rank, init="random", seed=1)
    trainer.begin(config.learner.optimizer, config.run.steps)
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            prompt_tokens=rng.integers(0, 151_000, 5).astype(np.int32),
            response_tokens=rng.integers(0, 151_000, 120).astype(np.int32),
            sampler_logprobs=np.zeros(120, np.float32),
            sampler_logprobs_t1=np.zeros(120, np.float32),
            advantage=(-1.0) ** i,
        )
        for i in range(2 * config.learner.mini_batches * rank.size)
    ]
    result = trainer.rl_step(sequences, temperature=config.rollout.sampling.temperature)
    return list(result.losses), list(result.grad_norms), -(-240 // trainer.module.chunk_rows)


def sharded_steps(rank: Rank, models: dict[str, Path], configs: dict[str, Path]) -> dict[str, Any]:
    return {name: one_step(rank, load(path), models[name]) for name, path in configs.items()}


def check(config: Config, losses: list[float], norms: list[float], chunks: int) -> None:
    assert chunks > 1
    assert len(losses) == config.learner.mini_batches
    assert all(np.isfinite(losses))
    assert all(norm > 0 for norm in norms)


def test_the_examples_are_found() -> None:
    assert {path.parent.name for path in CONFIGS} == {"cluster", "coming_from", "gsm8k", "humaneval", "own_task"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_rank_does_a_step(path: Path, tmp_path: Path) -> None:
    config = load(path)
    model = write_model(tmp_path / "model", Path(config.model.path).name)
    check(config, *one_step(Rank(), config, model))


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_do_a_step_of_what_is_shipped_for_eight(tmp_path: Path) -> None:
    configs = {path.stem: path for path in CONFIGS if 1 < load(path).learner.ranks <= 8}
    assert len(configs) > 1
    models = {name: write_model(tmp_path / name, Path(load(path).model.path).name) for name, path in configs.items()}
    first, second = run_ranks(2, sharded_steps, models, configs)
    assert first == second
    for name, numbers in first.items():
        check(load(configs[name]), *numbers)
