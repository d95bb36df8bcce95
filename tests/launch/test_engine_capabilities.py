"""What the engine in use cannot do, and which architectures are whose: refused at the key that asks for it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from actors.engine.capabilities import BACKENDS, NATIVE, Capabilities
from config.rollout import EngineOptions
from launch.config import ConfigError, check_environment, load_config

Write = Callable[..., Path]
VLLM = "rollout.engine.backend=vllm"
TRAINED = ("rollout.workers=2", "drafter.train=true")


@pytest.mark.parametrize(
    ("lacks", "overrides", "key"),
    [
        ({"batch_invariant": False}, ["model.batch_invariant=true"], "model.batch_invariant"),
        ({"max_temperature": 2.0}, ["rollout.sampling.temperature=2.5"], "rollout.sampling.temperature"),
        ({"max_temperature": 2.0}, ["eval.temperature=2.5"], "eval.temperature"),
        ({"logprobs_t1": False}, ["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p"),
        ({"logprobs_t1": False}, ["rollout.sampling.top_k=5"], "rollout.sampling.top_k"),
        ({"drafters": frozenset()}, ["rollout.speculation.mode=paper"], "rollout.speculation"),
        (
            {"drafters": frozenset({"ngram"})},
            ["rollout.speculation.strategies=[suffix:8]"],
            "rollout.speculation.strategies",
        ),
        ({"trees": False}, ["rollout.speculation.strategies=['suffix:8x2/12']"], "rollout.speculation.strategies"),
        ({"drafters": frozenset({"ngram"})}, TRAINED, "drafter.train"),
        ({"hidden_states": False}, [*TRAINED, "drafter.recording.source=engine"], "drafter.recording.source"),
        ({"batch_invariant": False}, ["rollout.speculation.verification=coupled"], "rollout.speculation.verification"),
        (
            {"drafters": frozenset({"ngram"})},
            ["rollout.speculation.eagle.path=random"],
            "rollout.speculation.eagle.path",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_at_its_key(
    write_config: Write, monkeypatch: pytest.MonkeyPatch, lacks: dict[str, Any], overrides: list[str], key: str
) -> None:
    path = write_config()
    load_config(path, overrides)
    monkeypatch.setitem(cast(dict[str, Capabilities], BACKENDS), "native", replace(NATIVE, **lacks))
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert key in [issue.key for issue in error.value.issues]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ((), ["model.path"]),  # the native engine does not compute it
        ((VLLM,), []),
        ((VLLM, "model.implementation=transformers"), []),
        ((VLLM, "model.implementation=native"), ["model.implementation"]),
        ((VLLM, "rollout.engine.max_model_tokens=3000"), ["rollout.engine.max_model_tokens"]),
    ],
)
def test_another_architecture_is_vllms_and_transformers(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], keys: list[str]
) -> None:
    monkeypatch.setattr("launch.config.environment.check_version", lambda: None)
    (tmp_path / "model").mkdir()
    mixtral = {"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 1900, "num_attention_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(mixtral))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "train.jsonl").touch()
    loaded = load_config(write_config(), [f"run.dir={tmp_path}/runs", *overrides])
    assert [issue.key for issue in check_environment(loaded.config)] == keys
    if not overrides:
        (issue,) = check_environment(loaded.config)
        assert "rollout.engine.backend=vllm" in issue.remedy


def test_each_backend_has_its_capabilities() -> None:
    field = EngineOptions.model_fields["backend"]
    assert set(get_args(field.annotation)) == set(BACKENDS)
