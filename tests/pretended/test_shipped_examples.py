"""Every shipped configuration for GPUs does two RL steps on the pretended device, with two thin layers of its model:
the real vocabulary and attention heads, its own engine, speculation, drafter and learner options. Decoding, learning
with several chunks of the head, weights into the engine, drafter training while the engine sleeps, and its result.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engine.core import EngineCore, build_core
from actors.engine.wire import Start
from actors.spot.child import _build
from actors.spot.residence import Residence
from actors.spot.wire import TrainerStart
from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from config.model import ModelOptions
from config.tree import Config
from contracts.engine import Sleep, Submit, UpdateDrafter, UpdateWeights, Wake
from contracts.rollout import (
    DrafterLoaded,
    Finished,
    Recorded,
    Request,
    Rollout,
    SamplingParams,
    Slept,
    WeightsLoaded,
)
from contracts.training import TrainSequence
from launch.run.opening import engine_start
from models.checkpoint import init_model, save_model
from models.noise import noise_key
from tests.examples.test_gpu_configurations import CONFIGS, VOCABULARY, load
from tests.learner.tiny import write_config
from tests.pretended.support import DEVICE

# Query and KV heads, their size.
HEADS = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128), "32B": (40, 8, 128)}
NEW_TOKENS = 8


def model_of(directory: Path, config: Config) -> ModelOptions:
    """Two thin layers of the configuration's model, as a directory."""
    size = next(size for size in VOCABULARY if f"-{size}" in Path(config.model.path).name)
    (vocabulary, tied), (heads, kv_heads, head_dim) = VOCABULARY[size], HEADS[size]
    changes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    changes |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "initializer_range": 0.3}
    write_config(directory, vocab_size=vocabulary, tie_word_embeddings=tied, **changes)
    save_model(init_model(directory, 0, batch_invariant=False), directory)
    return config.model.model_copy(update={"path": str(directory)})


def engine_of(config: Config, model: ModelOptions) -> EngineCore:
    """As the run's workers start theirs, with less room."""
    small = {"max_running": 2, "kv_tokens": 1024, "max_model_tokens": 128, "prefill_chunk_tokens": 16}
    engine = config.rollout.engine.model_copy(update=small)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
    start = engine_start(config, model)
    given = {name: start.keywords[name] for name in ("seed", "speculation", "recording_bytes")}
    return build_core(Start(model=start.args[0], options=start.args[1], weights_version=0, niceness=0, **given))


def decode(core: EngineCore, config: Config, step: int) -> tuple[list[tuple[Request, Rollout]], list[Any]]:
    """Two samples each of three prompts, and what was recorded of them."""
    rng = np.random.default_rng(step)
    prompts = [rng.integers(0, 151_000, 20).astype(np.int32) for _ in range(3)]
    sampling = config.rollout.sampling
    params = SamplingParams(NEW_TOKENS, sampling.temperature, sampling.top_k, sampling.top_p)
    requests = [
        Request(
            request_id=100 * step + i,
            prompt_id=i // 2,
            prompt_tokens=prompts[i // 2],
            noise_key=noise_key(0, step, i // 2, i % 2),
            sampling=params,
            expected_tokens=float(NEW_TOKENS),
        )
        for i in range(6)
    ]
    core.apply(Submit(tuple(requests)), None)
    finished: dict[int, Rollout] = {}
    records: list[Any] = []
    while core.has_work:
        for event in core.step():
            if isinstance(event, Finished):
                finished[event.rollout.request_id] = event.rollout
            elif isinstance(event, Recorded):
                records += event.records
    return [(request, finished[request.request_id]) for request in requests], records


def learned_from(pairs: list[tuple[Request, Rollout]]) -> list[TrainSequence]:
    return [
        TrainSequence(
            prompt_tokens=request.prompt_tokens,
            response_tokens=rollout.tokens,
            sampler_logprobs=rollout.logprobs,
            sampler_logprobs_t1=rollout.logprobs_t1,
            advantage=(-1.0) ** i,
            sampler="rollout-0",
        )
        for i, (request, rollout) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "qwen2.5-0.5b" else pytest.mark.pretended)
        for path in CONFIGS
    ],
)
def test_a_shipped_configuration_does_two_rl_steps(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(path)
    model = model_of(tmp_path / "model", config)
    learner = config.learner.model_copy(update={"ranks": 1, "micro_batch_tokens": 60})
    rank = Rank(device=DEVICE)
    trainer = Trainer(model, learner, config.objective, rank=rank, init="checkpoint", seed=config.run.seed)
    trainer.begin(config.learner.optimizer, config.run.steps)
    trainer.module.chunk_rows = 8  # several chunks in a micro-batch, as at real lengths
    core = engine_of(config, model)
    records: list[Any] = []
    for step in range(2):
        pairs, recorded = decode(core, config, step)
        records += recorded
        assert all(len(rollout.tokens) == NEW_TOKENS for _, rollout in pairs)
        assert {rollout.weights_version for _, rollout in pairs} == {step}
        result = trainer.rl_step(learned_from(pairs), temperature=config.rollout.sampling.temperature)
        assert all(np.isfinite(result.losses))
        assert all(norm > 0 for norm in result.grad_norms)
        assert result.metrics["logprob_gap/mean"] < 0.1, "engine and learner have the same weights"
        published = trainer.weights.publish(step + 1)
        assert published is not None
        manifest, buffer = published
        loaded = core.apply(UpdateWeights(manifest), np.asarray(buffer))
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.checksum == manifest.checksum
        if config.drafter.train:
            train_drafter(core, config, model, records, tmp_path)
    if config.drafter.train:
        assert records
        assert "eagle" in core._engine._speculator._drafters, "the drafter failed"  # type: ignore[attr-defined]


def train_drafter(core: EngineCore, config: Config, model: ModelOptions, records: list[Any], tmp_path: Path) -> None:
    """One session of the spot trainer beside a sleeping engine, which drafts with the result afterwards."""
    assert core.apply(Sleep(), None) == Slept()
    start = TrainerStart(
        model=model,
        options=config.drafter,
        init=0,
        checkpoint_dir=str(tmp_path / "drafter"),
        host="127.0.0.1",
        threads=None,
        device=config.rollout.engine.device,
        niceness=0,
    )
    residence = Residence(_build(start), DEVICE)
    residence.move_in()
    result = residence.trainer.micro_step(records)
    assert result.updated
    assert np.isfinite(result.loss)
    manifest, payload = residence.trainer.export()
    residence.move_out()
    core.apply(Wake(), None)
    answer = core.apply(UpdateDrafter("eagle", manifest), np.asarray(payload))
    assert isinstance(answer, DrafterLoaded)
    assert not answer.reason, answer.reason
