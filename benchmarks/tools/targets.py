"""The demo's target model at the sizes of the speed benchmarks, and the demo's prompts. Reads, never trains.

Inflation preserves the function (`benchmarks.tools.inflating`). So a 100M target has the cost of 100M parameters and
writes what the demo writes: lengths, repetition and acceptance are those of a model that does the task. For timing
alone, `fresh_model` has the shape and random weights.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.data import load_prompts, load_tokenizer
from benchmarks.harness import DEMO, ROOT
from benchmarks.tools.inflating import PRESETS, inflate, inflated_config
from config.data import DataOptions
from contracts.rollout import Request, SamplingParams
from models.checkpoint import hf_state_dict, init_model, load_hf_state_dict, load_model, parameter_count
from models.noise import noise_key
from models.transformer import Transformer

SIZES = ("demo", *PRESETS)
DTYPES = ("float32", "bfloat16")
PROMPT_TOKENS = 24  # of the synthetic requests
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 228,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # the demo's model


@dataclass(frozen=True, slots=True)
class Target:
    """A target model in fast mode. `size/dtype` names it in records."""

    size: str
    dtype: str
    model: Transformer
    parameters: int

    @property
    def name(self) -> str:
        return f"{self.size}/{self.dtype}"


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts (the demo's are in an order that mixes difficulties), and what ends a response."""

    prompts: list[NDArray[np.int32]]
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int = 200  # the demo's limit


def find_demo(given: Path | None) -> Path:
    """Return the demo's model directory: the given one, else the newest of a run of the demo, else its newest warm
    start. SystemExit if there is none."""
    if given is not None:
        return given
    return _newest("*/model/tokenizer.json") or find_warm_start(None)


def find_warm_start(given: Path | None) -> Path:
    """Return the demo's model before RL."""
    if found := given or _newest("warm_starts/*/tokenizer.json"):
        return found
    raise SystemExit(
        "no demo model in runs/: `paceline train examples/guess_and_check/config.yaml` makes one (or `paceline warmup` "
        "its warm start); or give one with --target"
    )


def _newest(pattern: str) -> Path | None:
    found = sorted((ROOT / "runs").glob(pattern), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else None


def load_target(directory: Path, size: str, dtype: str) -> Target:
    """Load the model of `directory`, inflated to `size` ("demo": unchanged), for CPU."""
    model = load_model(directory, batch_invariant=False)
    return _target(size, dtype, model if size == "demo" else inflated(model, PRESETS[size]))


def deep_target(target: Target, layers: int) -> Target:
    """Return the same function with more layers of the same width, since large models are deep relative to a drafter's
    one layer."""
    deep = _target(f"demo, {layers} layers", target.dtype, inflated(target.model, {"num_layers": layers}))
    return replace(deep, model=deep.model.requires_grad_(False))


def _target(size: str, dtype: str, model: Transformer) -> Target:
    return Target(size, dtype, model.to(getattr(torch, dtype)).eval(), parameter_count(model))


def inflated(
    model: Transformer, sizes: Mapping[str, int], *, batch_invariant: bool = False, seed: int = 0
) -> Transformer:
    """Return a larger model of the same function, in float32."""
    config = inflated_config(model.config, **sizes)
    larger = Transformer(config, batch_invariant=batch_invariant)
    load_hf_state_dict(larger, inflate(model.config, hf_state_dict(model), config, seed=seed))
    return larger


def fresh_model(size: str = "demo", dtype: str = "float32", **changes: Any) -> Transformer:
    """Return random weights in the demo's shape (with changes of its config.json) or a larger one, in fast mode."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE | changes))
        model = init_model(directory, 0, batch_invariant=False)
    if size != "demo":
        model = inflated(model, PRESETS[size])
    return model.to(getattr(torch, dtype)).eval()


def load_task(directory: Path, split: str = "train") -> Task:
    """Load the demo's prompts for training, or held out ("eval"). Raises actors.data.errors.DataError, naming the file,
    if they were not made."""
    tokenizer = load_tokenizer(str(directory))
    data = DEMO / "data" / f"{split}.jsonl"
    options = DataOptions(train=str(data), id_field="id", template="plain", max_prompt_tokens=16)
    prompts = load_prompts(options, "train", tokenizer)
    order = np.random.default_rng(0).permutation(len(prompts))
    return Task([prompts[int(i)].tokens for i in order], (int(tokenizer.eos_token_id),))


def requests_of(prompts: Iterable[Any], limits: Sequence[int], *, first: int = 0, seed: int = 0) -> list[Request]:
    """Return a request of `limits[i]` tokens, unless something stops it, for each prompt; request ids from
    `first` on."""
    return [
        Request(
            request_id=first + i,
            prompt_id=i,
            prompt_tokens=np.asarray(prompt, np.int32),
            noise_key=noise_key(seed, 0, i, first),
            sampling=SamplingParams(limit),
        )
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def random_prompts(count: int, seed: int = 0) -> NDArray[np.int32]:
    """Return random prompts, [count, PROMPT_TOKENS]."""
    return np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], (count, PROMPT_TOKENS)).astype(np.int32)


def long_tailed_lengths(count: int, seed: int = 0) -> list[int]:
    """Return response lengths like the demo's late in training: median 42, 90 % quantile 143, 99 % at the
    cap of 200."""
    quantiles, lengths = [0.0, 0.5, 0.9, 0.99, 1.0], [8, 42, 143, 200, 200]
    uniform = np.random.default_rng(seed).random(count)
    return [round(float(n)) for n in np.exp(np.interp(uniform, quantiles, np.log(lengths)))]
