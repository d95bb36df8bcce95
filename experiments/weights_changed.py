"""The share of published weights that changes per update, and the size of a delta, by learning rate and format.

    python -m experiments.weights_changed [--steps 6] [--models demo smollm2] [--rates 1e-6 1e-5 3e-4]

The product's learner has float32 masters, AdamW and the default objective. It does `steps` RL steps on random sequences
with random advantages, and publishes after each like a run. models.delta compares consecutive buffers. The training
data do not matter, since Adam's step has the size of the learning rate, whatever the gradient's. `demo` is the 0.6M
model of examples/guess_and_check with fresh weights, `smollm2` SmolLM2-135M-Instruct with its own.
Owns results/weights_changed.json.
"""

import gc
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import numpy as np

from actors.training.trainer import Trainer
from benchmarks.engine_smollm import gguf_file
from benchmarks.harness import ROOT, command, write
from config.formats import Quantization
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from examples.guess_and_check.make_data import write_all
from models.delta import Held, changed_elements, encode
from models.gguf import convert

MODELS = ("demo", "smollm2")
FORMATS: Mapping[str, Quantization] = {"bfloat16": "none", "w8a8": "w8a8"}


def trainer_of(model: str, form: str, rate: float, steps: int, folder: Path) -> Trainer:
    path = str(folder / ("model" if model == "demo" else "smollm2"))
    trainer = Trainer(
        ModelOptions(path=path, dtype="bfloat16"),
        LearnerOptions(),
        ObjectiveOptions(),
        init="random" if model == "demo" else "checkpoint",
        seed=0,
        quantization=FORMATS[form],
    )
    trainer.begin(OptimizerOptions(lr=rate), steps)
    return trainer


def batch(random: np.random.Generator, vocabulary: int, count: int = 8, tokens: int = 48) -> Iterator[TrainSequence]:
    for index in range(count):
        zeros = np.zeros(tokens, np.float32)
        yield TrainSequence(
            prompt_tokens=random.integers(0, vocabulary, 16).astype(np.int32),
            response_tokens=random.integers(0, vocabulary, tokens).astype(np.int32),
            sampler_logprobs=zeros,
            sampler_logprobs_t1=zeros,
            advantage=1.0 if index % 2 else -1.0,
        )


def one(model: str, form: str, rate: float, steps: int, folder: Path) -> dict[str, Any]:
    trainer, random = trainer_of(model, form, rate, steps, folder), np.random.default_rng(0)
    shares, sizes = [], []
    last: Held | None = None
    for version in range(steps + 1):
        if version:
            trainer.rl_step(list(batch(random, cast(Any, trainer.network).config.vocab_size)), temperature=1.0)
        published = trainer.weights.publish(version)
        assert published is not None
        now = Held(*published)
        if last is not None:
            delta = encode(last, now, limit_bytes=1 << 62)
            assert delta is not None
            shares.append(changed_elements(delta) / sum(math.prod(spec.shape) for spec in now.manifest.tensors))
            sizes.append(delta.size)
        last = replace(now, buffer=now.buffer.copy())
    assert last is not None
    total = last.manifest.total_bytes
    del trainer
    gc.collect()
    return {
        "model": model,
        "format": form,
        "lr": rate,
        "total_bytes": total,
        "changed_first": round(shares[0], 6),
        "changed_median": round(median(shares[1:]), 6),
        "delta_bytes_median": int(median(sizes[1:])),
        "times_smaller": round(total / median(sizes[1:]), 2),
    }


def main(
    steps: Annotated[int, "RL steps; the first one's update is the largest"] = 6,
    models: Annotated[Sequence[str], "in turn", MODELS] = ("demo", "smollm2"),
    rates: Annotated[Sequence[float], "learning rates"] = (1e-6, 1e-5, 3e-4),
    out: Path = ROOT / "experiments/results/weights_changed.json",
) -> int:
    rows = []
    with tempfile.TemporaryDirectory(prefix="paceline-changed-") as folder:
        write_all(Path(folder), seed=0, demonstrations=1)
        if models != ["demo"]:
            convert(gguf_file(), Path(folder) / "smollm2")
        for model in models:
            for form in FORMATS:
                for rate in rates:
                    rows.append(one(model, form, rate, steps, Path(folder)))
                    print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    write(out, "which share of the weights changes per update?", {"rows": rows}, settings={"steps": steps, "seed": 0})
    return 0


if __name__ == "__main__":
    command(main)
