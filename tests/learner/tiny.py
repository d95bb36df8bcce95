"""The tiny model and data of the learner's tests. Importable in child processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from actors.training.trainer import Trainer
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import Demonstration, TrainSequence
from models.checkpoint import init_model
from models.packed import PackedContext

VOCAB = 61
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def write_config(directory: Path, **changes: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def make_trainer(
    model_dir: Path,
    *,
    objective: ObjectiveOptions | None = None,
    optimizer: OptimizerOptions | None = None,
    implementation: str = "native",
    dtype: str = "float32",
    seed: int = 5,
    steps: int = 20,
    init: str = "random",
    **learner: object,
) -> Trainer:
    trainer = Trainer(
        ModelOptions(path=str(model_dir), implementation=implementation, dtype=dtype),
        LearnerOptions(**learner),
        objective or ObjectiveOptions(),
        init=init,
        seed=seed,
    )
    trainer.begin(optimizer or OptimizerOptions(lr=1e-2), steps)
    return trainer


def make_sequences(count: int = 10, seed: int = 0, longest: int = 20) -> list[TrainSequence]:
    """Random tokens; the sampler's log-probs are zeros (see with_sampler_logprobs)."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length = int(rng.integers(1, longest))
        sequences.append(
            TrainSequence(
                prompt_tokens=rng.integers(0, VOCAB, int(rng.integers(1, 8))).astype(np.int32),
                response_tokens=rng.integers(0, VOCAB, length).astype(np.int32),
                sampler_logprobs=np.zeros(length, np.float32),
                sampler_logprobs_t1=np.zeros(length, np.float32),
                advantage=float(rng.normal()),
                weight=float(rng.uniform(0.5, 2.0)),
            )
        )
    return sequences


def make_demonstrations(count: int = 6, seed: int = 1) -> list[Demonstration]:
    return [Demonstration(s.prompt_tokens, s.response_tokens) for s in make_sequences(count, seed)]


def direct_logprobs(
    model_dir: Path, sequences: Sequence[TrainSequence | Demonstration], temperature: float = 1.0, seed: int = 5
) -> list[torch.Tensor]:
    """One sequence at a time, the whole table of logits, no chunks: what every fast path has to equal."""
    model = init_model(model_dir, seed)
    result = []
    for s in sequences:
        tokens = torch.tensor([*s.prompt_tokens, *s.response_tokens])
        with torch.no_grad():
            hidden = model(tokens, PackedContext.from_lengths([len(tokens)]))
            table = torch.log_softmax(model.logits(hidden).double() / temperature, -1)
        rows = torch.arange(len(s.prompt_tokens) - 1, len(tokens) - 1)
        result.append(table[rows, tokens[rows + 1]])
    return result
