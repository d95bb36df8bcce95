"""Contradictions between keys and what the machine lacks: each rule is shown to fire, and to stay silent otherwise."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.engine.vllm.versions import UnsupportedVllmError
from config.installed import install_extra
from launch.config import ConfigError, check_environment, load_config

Write = Callable[..., Path]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 4),
    "num_attention_heads": 2,
}
VLLM = "rollout.engine.backend=vllm"
VLLM_ON_GPUS = (VLLM, "cluster.layout=disaggregated")
TRAINED = ("rollout.workers=2", "drafter.train=true")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["objective.kl_coef=0.1"], "objective.kl_coef"),
        (["objective.sum_divisor=512"], "objective.sum_divisor"),
        (["objective.name=rloo", "objective.clip_high=0.2"], "objective.clip_high"),
        (["objective.kl_in=reward"], "objective.kl_in"),
        (["objective.name=tbpo"], "learner.mini_batches"),  # 1: its bands would do nothing
        (["objective.band_high=7e-4"], "objective.band_high"),
        (["objective.overlong.buffer_tokens=2000"], "objective.overlong.buffer_tokens"),
        (["rollout.abort.enabled=true", "objective.length_penalty=0.05"], "objective.length_penalty"),
        (["objective.sampler_correction.weights=token", "rollout.sampling.top_p=0.9"], "objective.sampler_correction"),
        (["rollout.sampling.stop_token_ids=[]"], "rollout.sampling.stop_token_ids"),
        (["learner.mini_batches=200"], "learner.mini_batches"),
        (["rollout.engine.max_model_tokens=100"], "rollout.engine.max_model_tokens"),
        (["rollout.engine.kv_tokens=512"], "rollout.engine.kv_tokens"),
        ([VLLM, "model.batch_invariant=true"], "model.batch_invariant"),
        (["reward.terms.0.kind=format"], "reward.terms.0.pattern"),
        (["reward.terms.0={kind: format, pattern: '('}"], "reward.terms.0.pattern"),
        (["reward.terms.0={kind: math, pattern: a}"], "reward.terms.0.pattern"),
        (["reward.terms.0={kind: python, function: nocolon}"], "reward.terms.0.function"),
        (["reward.terms=[{kind: format, pattern: a}, {kind: format, pattern: b}]"], "reward.terms.1.name"),
        (["reward.terms.0={kind: code, fallback: gsm8k}"], "reward.terms.0.fallback"),
        (["reward.terms.0={kind: math, memory_mb: 64}"], "reward.terms.0.memory_mb"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature"),
        (["cluster.layout=disaggregated", "cluster.gpus_per_worker=16"], "cluster.gpus_per_worker"),
        (
            ["cluster.layout=disaggregated", "cluster.gpus_per_worker=2", "rollout.engine.tensor_parallel=4"],
            "rollout.engine.tensor_parallel",
        ),
        (["rollout.engine.tensor_parallel=9"], "rollout.engine.tensor_parallel"),
        ([VLLM, "rollout.engine.tensor_parallel=2"], "rollout.engine.tensor_parallel"),  # without GPUs
        (["rollout.engine.tensor_parallel=2", "rollout.quantization=w8a8"], "rollout.quantization"),
        (
            ["rollout.engine.tensor_parallel=2", "rollout.speculation.self.format=w8a8"],
            "rollout.speculation.self.format",
        ),
        (
            ["rollout.engine.tensor_parallel=2", "rollout.speculation={mode: fixed, strategies: [self:4]}"],
            "rollout.speculation.strategies",
        ),
        (["rollout.engine.tensor_parallel=2", "rollout.max_logprob_gap=1e-8"], "rollout.max_logprob_gap"),
        (["cluster.gpus_per_worker=2"], "cluster.gpus_per_worker"),
        (["rollout.engine.backend=vllm", "cluster.weights=ipc"], "cluster.weights"),
        ([*VLLM_ON_GPUS, "cluster.gpus_per_worker=1.5"], "cluster.gpus_per_worker"),
        ([*VLLM_ON_GPUS, "cluster.gpus_per_worker=2", "rollout.engine.device=cpu"], "cluster.gpus_per_worker"),
        (["eval.every=5"], "eval.every"),
        (["eval.sets=[{name: a, path: e}]", "data.eval=e"], "eval.sets"),
        (["eval.sets=[{name: a, path: e}, {name: a, path: f}]"], "eval.sets.1.name"),
        (["data.train=null"], "data.train"),
        (["data.sets=[{name: a, path: e}]"], "data.sets"),  # beside data.train
        (["data.train=null", "data.sets=[{name: a, path: e}, {name: a, path: f}]"], "data.sets.1.name"),
        (["data.success={field: rate, file: f}"], "data.success.file"),
        (["data.success={field: rate, min: 0.5, max: 0.4}"], "data.success.min"),
        (["data.success.max=0.9"], "data.success"),
        (["rollout.skip={after: 2, target: 0.5}"], "rollout.skip.after"),
        (["rollout.rounds.quantile=0.5"], "rollout.rounds.quantile"),
        (["rollout.rounds.window=9"], "rollout.rounds.window"),
        *(
            (["rollout.rounds.factor=1.25", other], "rollout.rounds.factor")
            for other in (
                "rollout.staleness=1",
                "rollout.partial.tokens_per_step=100",
                "rollout.budget.share=0.5",
                "rollout.abort={enabled: true, marker: boxed}",
                "rollout.skip.after=2",
                "objective={name: dapo, dynamic_sampling: {max_rounds: 2}}",
            )
        ),
        (["eval.every=5", "data.eval=e", "checkpoint.best_metric=eval/pass@9"], "checkpoint.best_metric"),
        (
            ["eval={every: 5, sets: [{name: a, path: e}]}", "checkpoint.best_metric=eval/b/reward"],
            "checkpoint.best_metric",
        ),
        (["eval.sets=[{name: source, path: e}]"], "eval.sets.0.name"),
        (["eval.sets=[{name: a, path: e, samples: 8}]", "eval.at=[1, 9]"], "eval.at"),
        (["eval.max_new_tokens=40000", "rollout.engine.kv_tokens=32768"], "rollout.engine.kv_tokens"),
        ([VLLM, "eval.sets=[{name: a, path: e, temperature: 9}]"], "eval.sets.0.temperature"),
        (["data.template=plain", "data.chat_template=x"], "data.chat_template"),
        (["learner.optimizer.betas=[0.9, 1.0]"], "learner.optimizer.betas"),
        (["learner.device=cuda"], "learner.device"),
        (
            ["cluster.layout=colocated", "learner.device=cuda", "model.batch_invariant=true"],
            "model.batch_invariant",
        ),
        (["cluster.layout=colocated", "model.batch_invariant=true"], "model.batch_invariant"),  # auto finds the GPU
        (
            ["cluster.layout=colocated", "learner.device=cpu", "model.batch_invariant=true"],
            "model.batch_invariant",
        ),
        (["cluster.rollout_resource=spot"], "cluster.rollout_resource"),
        (["cluster.layout=colocated", "cluster.gpus_per_worker=0.5"], "cluster.gpus_per_worker"),
        (["cluster.layout=colocated", "cluster.gpus_per_learner=0.5"], "cluster.gpus_per_learner"),
        (["cluster.layout=colocated", "learner.ranks=2"], "learner.ranks"),
        (["rollout.speculation.strategies=[oracle:4, plain]"], "rollout.speculation.strategies"),
        (["rollout.speculation.strategies=[eagle:4]"], "rollout.speculation.eagle.path"),
        (["rollout.speculation.mtp.path=somewhere"], "rollout.speculation.mtp.path"),  # the native engine has none
        (["rollout.speculation.strategies=[dflash:4]"], "rollout.speculation.strategies"),
        (
            [VLLM, "rollout.speculation={eagle: {path: random}, mtp: {path: x}}"],  # one network drafts
            "rollout.speculation.strategies",
        ),
        (["rollout.speculation.mode=fixed"], "rollout.speculation.strategies"),
        (
            ["rollout.speculation.mode=fixed", "rollout.speculation.strategies=[plain, suffix:8]"],
            "rollout.speculation.strategies",
        ),
        (["rollout.speculation.batch_thresholds=[1, 8]"], "rollout.speculation.batch_thresholds"),
        (
            ["rollout.speculation={mode: paper, batch_thresholds: [2, 8]}"],
            "rollout.speculation.batch_thresholds",
        ),
        (
            ["rollout.speculation={mode: paper, strategies: ['suffix:8', 'ngram:8'], batch_thresholds: [1, 8]}"],
            "rollout.speculation.batch_thresholds",
        ),
        (["rollout.speculation.epsilon=0.2"], "rollout.speculation.epsilon"),
        (["rollout.speculation={mode: fixed, strategies: ['suffix:8'], seed: 3}"], "rollout.speculation.seed"),
        (["rollout.speculation={mode: paper, exploration: 0.1}"], "rollout.speculation.exploration"),
        (["rollout.speculation={mode: paper, budget: length_aware}"], "rollout.speculation.budget"),
        (
            ["rollout.speculation={strategies: ['suffix:8'], eagle: {path: random}}"],
            "rollout.speculation.eagle.path",
        ),
        (["rollout.speculation.suffix.window_bytes=5000"], "rollout.speculation.suffix.window_bytes"),
        (
            ["rollout.speculation.verification=rejection", "model.batch_invariant=true"],
            "rollout.speculation.verification",
        ),
        (
            ["rollout.speculation.verification=rejection", "model.batch_invariant=engine"],
            "rollout.speculation.verification",
        ),
        ([VLLM, "model.batch_invariant=engine"], "model.batch_invariant"),
        (
            [
                "rollout.speculation={mode: fixed, strategies: ['suffix:4x2/8']}",
                "cluster.layout=colocated",
                "model.batch_invariant=engine",
            ],
            "rollout.speculation.strategies",
        ),
        ([VLLM, "rollout.speculation.verification=coupled"], "rollout.speculation.verification"),
        ([VLLM, "rollout.speculation.strategies=['suffix:8x2/12']"], "rollout.speculation.strategies"),
        ([VLLM, "rollout.sampling.temperature=10"], "rollout.sampling.temperature"),
        ([VLLM, "rollout.engine.block_tokens=64"], "rollout.engine.block_tokens"),
        (["rollout.engine.seeded_requests=true"], "rollout.engine.seeded_requests"),
        (["rollout.engine.vllm_arguments={quantization: fp8}"], "rollout.engine.vllm_arguments"),
        ([VLLM, "rollout.sampling.top_p=0.9"], "rollout.sampling.top_p"),
        (["rollout.quantization=fp8", "rollout.engine.device=cpu"], "rollout.quantization"),
        ([VLLM, "rollout.quantization=w2a8"], "rollout.quantization"),
        (["rollout.quantization=w8a8", "model.implementation=transformers"], "model.implementation"),
        (["rollout.quantization=w8a8", "learner.autocast_bf16=true"], "learner.autocast_bf16"),
        (
            [VLLM, "rollout.quantization=w8a8", "rollout.engine.vllm_arguments={quantization: fp8}"],
            "rollout.engine.vllm_arguments",
        ),
        (
            [VLLM, "rollout.quantization=w8a8", "rollout.speculation.strategies=['self:4', plain]"],
            "rollout.speculation.strategies",
        ),
        (["rollout.speculation.self.format=w4a16"], "rollout.speculation.self.format"),  # embedded: on CPU
        ([VLLM, "rollout.speculation.self.format=w8a8"], "rollout.speculation.self.format"),
        (["rollout.quantization=w8a8", "rollout.speculation.self.format=w4a8"], "rollout.speculation.self.format"),
        (
            ["rollout.speculation.self.format=none", "rollout.speculation.strategies=['self:5']"],
            "rollout.speculation.self.format",
        ),
        (
            ["rollout.speculation.self.format=w8a8", "rollout.speculation.strategies=['suffix:5']"],
            "rollout.speculation.self.format",
        ),
        (["drafter.train=true"], "drafter.train"),
        ([*TRAINED, VLLM, "drafter.recording.source=engine"], "drafter.recording.source"),
        ([*TRAINED, "rollout.speculation.mode=off"], "rollout.speculation.mode"),
        ([*TRAINED, "rollout.speculation.strategies=[suffix:8, plain]"], "rollout.speculation.strategies"),
        ([*TRAINED, "drafter.layers=[0, 1, 2]"], "drafter.layers"),
        ([*TRAINED, "drafter={train: true, algorithm: eagle3, layers: [0, 2, 1]}"], "drafter.layers"),
        ([*TRAINED, "drafter={train: true, algorithm: eagle3, layers: [0, 1, 1]}"], "drafter.layers"),
        ([*TRAINED, "drafter={train: true, algorithm: eagle3, layers: [-1, 0, 1]}"], "drafter.layers"),
        ([*TRAINED, "drafter.betas=[0.9, 1.0]"], "drafter.betas"),
    ],
)
def test_contradictions(write_config: Write, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), overrides)
    assert [issue.key for issue in caught.value.issues] == [key]


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.kl_coef=0.1", "objective.kl=k3"],
        ["objective.name=dapo", "objective.clip_high=0.3"],
        ["objective={name: reinforce_pp, kl: none}"],
        ["objective={name: gspo, sampler_correction: {weights: sequence, mask: geometric}}"],
        ["objective.name=tbpo", "learner.mini_batches=2"],
        [VLLM, "objective.name=tbpo", "learner.mini_batches=2"],
        ["objective={aggregation: seq_mean_token_sum_norm, sum_divisor: 512, normalize: none}"],  # Dr. GRPO
        ["learner.mini_batches=128"],
        ["learner.autocast_bf16=true", "model.dtype=bfloat16"],
        ["eval.every=5", "data.eval=e.jsonl"],
        ["eval.every=5", "data.eval=e", "checkpoint.best_metric=eval/maj@4"],
        ["data={train: null, sets: [{name: a, path: e, weight: 3}, {name: b, path: f}]}", "rollout.skip.target=0.5"],
        ["eval={every: 5, at: [8], sets: [{name: a, path: e}, {name: b, path: f, samples: 8}]}"],
        [VLLM, "eval.sets=[{name: a, path: e, top_k: 20, top_p: 0.9}]"],  # of an evaluation nothing is learned
        ["cluster.layout=disaggregated", "cluster.rollout_resource=spot", "learner.device=cuda"],
        [*VLLM_ON_GPUS, "cluster.gpus_per_worker=8"],
        [*VLLM_ON_GPUS, "cluster.gpus_per_worker=8", "rollout.engine.tensor_parallel=8"],
        ["cluster.layout=disaggregated", "cluster.gpus_per_worker=8", "cluster.weights=broadcast"],
        ["rollout.engine.tensor_parallel=4", "model.batch_invariant=true", "rollout.max_logprob_gap=1e-4"],
        ["rollout.engine.tensor_parallel=2", "rollout.speculation={mode: fixed, strategies: ['suffix:4x2/8']}"],
        ["rollout.engine.backend=vllm", "cluster.layout=colocated", "cluster.gpus_per_worker=2", "learner.ranks=2"],
        ["cluster.layout=disaggregated", "cluster.gpus_per_worker=0.5"],
        ["model.batch_invariant=true"],  # embedded shows its actors no GPU
        ["cluster.layout=colocated", "model.batch_invariant=engine"],
        ["model.batch_invariant=engine", "rollout.speculation={mode: fixed, strategies: ['suffix:4x2/8']}"],  # on CPU
        [
            "cluster.layout=colocated",
            "learner.device=cpu",
            "rollout.engine.device=cpu",
            "model.batch_invariant=true",
        ],
        ["reward.terms.0={kind: python, function: 'pkg.mod:grade'}"],
        ["rollout.speculation={mode: fixed, strategies: ['eagle:4x2/8'], eagle: {path: random}}"],
        ["rollout.speculation={mode: paper, batch_thresholds: [1, 8, 32]}"],
        ["rollout.speculation={mode: off, strategies: ['eagle:4']}"],
        [*TRAINED],
        [*TRAINED, "rollout.speculation.strategies=[eagle:4, plain]"],
        [*TRAINED, "drafter.algorithm=eagle3", "drafter.layers=[0, 1, 2]"],
        ["drafter.layers=[0, 1, 2]"],
        ["rollout.speculation={mode: paper, epsilon: 0.2, seed: 3}"],
        ["rollout.speculation={strategies: ['suffix:8', 'eagle:2'], eagle: {path: random}, exploration: 0.02}"],
        [VLLM],
        [VLLM, "rollout.speculation.mode=paper"],
        [VLLM, "rollout.speculation.eagle.path=random"],
        [VLLM, "rollout.speculation={mtp: {path: x}, strategies: ['mtp:2', 'suffix:8']}"],
        [*TRAINED, VLLM],
        [VLLM, "rollout.speculation.strategies=['suffix:8', 'ngram:4', plain]"],
        [VLLM, "rollout.speculation.verification=rejection", "rollout.sampling.stop_strings=[x]", "eval.temperature=0"],
        [VLLM, "objective.sampler_correction={weights: none}"],
        [VLLM, "rollout.engine.vllm_arguments={quantization: fp8}", "rollout.engine.seeded_requests=true"],
        [VLLM, *TRAINED],
        [VLLM, "cluster.layout=disaggregated", "cluster.gpus_per_worker=8"],
        ["learner.quantization=none"],
        ["rollout.quantization=w8a8"],
        ["rollout.quantization=w2a8", "learner.quantization=none", "learner.autocast_bf16=true"],
        ["rollout.quantization=w4a8", "learner.autocast_bf16=true", "model.dtype=bfloat16"],
        ["rollout.quantization=w4a16", "cluster.layout=colocated"],
        ["rollout.quantization=fp8", "cluster.layout=colocated", "rollout.engine.device=cuda"],
        ["rollout.quantization=w8a8", "rollout.speculation.verification=rejection"],
        [VLLM, "rollout.quantization=w8a8", "rollout.speculation.strategies=['suffix:8', plain]"],
        [VLLM, "rollout.quantization=w8a8", "rollout.speculation={mode: off, strategies: ['self:4']}"],
    ],
)
def test_no_false_alarms(write_config: Write, overrides: list[str]) -> None:
    load_config(write_config(), overrides)


def test_environment(write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("launch.config.environment.importlib.util.find_spec", lambda name: None)
    blocked = tmp_path / "file"
    blocked.touch()
    overrides = [
        "observe.wandb_project=p", "cluster.layout=colocated", "warmup.data=w",
        f"run.dir={blocked}/runs", "model.tokenizer=t", "data.eval=e",
    ]  # fmt: skip
    found = {issue.key: issue for issue in check_environment(load_config(write_config(), overrides).config)}
    assert set(found) == {
        "observe.wandb_project", "cluster.layout", "model.path", "model.tokenizer",
        "data.train", "data.eval", "warmup.data", "run.dir",
    }  # fmt: skip
    assert found["observe.wandb_project"].remedy == install_extra("wandb")
    assert "looked in" in found["data.train"].message


def test_an_engine_that_would_run_here_needs_its_vllm(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*overrides: str) -> list[str]:
        loaded = load_config(write_config(), ["rollout.engine.backend=vllm", *overrides])
        return [issue.message for issue in check_environment(loaded.config) if issue.key == "rollout.engine.backend"]

    def absent() -> None:
        raise UnsupportedVllmError("vLLM is not installed in this environment: a remedy")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("launch.config.environment.check_version", absent)
    assert found() == ["vLLM is not installed in this environment: a remedy"]
    assert found("cluster.address=10.0.0.1:6379") == [], "the nodes of a cluster say it themselves"
    monkeypatch.setattr("launch.config.environment.check_version", lambda: None)
    assert found() == []


def test_gpus_of_an_engine_divide_the_models_heads(write_config: Write, tmp_path: Path) -> None:
    def found(*overrides: str) -> list[str]:
        loaded = load_config(write_config(), [*VLLM_ON_GPUS, f"model.path={tmp_path}", *overrides])
        return [str(issue) for issue in check_environment(loaded.config) if issue.key == "cluster.gpus_per_worker"]

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_attention_heads": 6, "head_dim": 2}))
    assert found("cluster.gpus_per_worker=3") == []
    assert "one of 1, 2, 3, 6" in found("cluster.gpus_per_worker=4")[0]


def test_drafter_weights_must_exist(write_config: Write, tmp_path: Path) -> None:
    """Found beside the configuration file, like every input; `random` is not a path."""

    def found(path: str, *more: str) -> list[str]:
        loaded = load_config(write_config(), [f"rollout.speculation.eagle.path={path}", *more])
        return [issue.key for issue in check_environment(loaded.config) if "eagle" in issue.key]

    assert found("heads/eagle") == ["rollout.speculation.eagle.path"]
    assert found("heads/eagle", "rollout.speculation.mode=off") == []
    assert found("random") == []
    (tmp_path / "heads/eagle").mkdir(parents=True)
    (tmp_path / "heads/eagle/config.json").write_text('{"drafter": "eagle"}')
    (tmp_path / "heads/eagle/model.safetensors").touch()
    (tmp_path / "random").mkdir()
    assert found("heads/eagle") == []
    resolved = load_config(write_config(), ["rollout.speculation.eagle.path=heads/eagle"]).config
    assert resolved.rollout.speculation.eagle.path == str(tmp_path / "heads/eagle")
    fresh = load_config(write_config(), ["rollout.speculation.eagle.path=random"]).config
    assert fresh.rollout.speculation.eagle.path == "random"


def test_key_files_must_exist(write_config: Write, tmp_path: Path) -> None:
    def found(*more: str) -> list[str]:
        loaded = load_config(write_config(), ["coordinator.curve.directory=keys", *more])
        return [issue.key for issue in check_environment(loaded.config) if "curve" in issue.key]

    assert found() == []  # no drafter is trained: there is no coordinator
    assert found(*TRAINED) == ["coordinator.curve.directory"]
    (tmp_path / "keys").mkdir()
    assert found(*TRAINED) == []
    resolved = load_config(write_config(), ["coordinator.curve.directory=keys"]).config
    assert resolved.coordinator.curve.directory == str(tmp_path / "keys")


def test_a_trained_drafter_begins_with_fresh_weights_unless_it_has_some(write_config: Write) -> None:
    from config.catalogue import fresh_path

    def path(*overrides: str) -> str | None:
        return load_config(write_config(), list(overrides)).config.speculation.eagle.path

    assert path() is None
    assert path(*TRAINED) == "random"
    assert path(*TRAINED, "rollout.speculation.eagle.path=/heads/eagle") == "/heads/eagle"
    eagle3 = (*TRAINED, "drafter.algorithm=eagle3")
    assert path(*eagle3) == path(*eagle3, "rollout.speculation.eagle.path=random") == "random:eagle3"
    assert path(*eagle3, "drafter.layers=[0, 1, 3]") == fresh_path("eagle3", (0, 1, 3)) == "random:eagle3:0,1,3"
    unset = load_config(write_config(), list(TRAINED)).config
    assert unset.rollout.speculation.eagle.path is None  # what the user wrote stays what is shown


def test_drafter_training_fits_the_model_and_the_weights_it_goes_on_from(write_config: Write, tmp_path: Path) -> None:
    def found(*overrides: str) -> list[tuple[str, str]]:
        loaded = load_config(write_config(), [*TRAINED, *overrides])
        return [(i.key, i.message) for i in check_environment(loaded.config) if i.key.startswith("drafter")]

    for name, text in (("model", '{"num_hidden_layers": 4}'), ("head", '{"drafter": "eagle"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    eagle3, head = "drafter.algorithm=eagle3", "rollout.speculation.eagle.path=head"
    assert found(eagle3, "drafter.layers=[0, 1, 3]") == []
    beyond = [("drafter.layers", f"4 is no layer of {tmp_path}/model, which has 0 to 3")]
    assert found(eagle3, "drafter.layers=[0, 1, 4]") == beyond
    assert found(head) == found("drafter.algorithm=hass", head) == []
    other = f"eagle3 trains a drafter of kind eagle3, and {tmp_path}/head holds one of kind eagle"
    assert found(eagle3, head) == [("drafter.algorithm", other)]
    assert found(eagle3, "rollout.speculation.eagle.path=random") == []
    (tmp_path / "head" / "config.json").write_text("torn")
    assert found(eagle3, head) == []


def test_a_complete_environment_is_silent(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "train.jsonl").touch()
    loaded = load_config(write_config(), [f"run.dir={tmp_path}/new/runs"])
    assert check_environment(loaded.config) == []
    assert not (tmp_path / "new").exists()


def test_weights_are_needed_unless_they_are_made(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "train.jsonl").touch()

    def found(*overrides: str) -> list[str]:
        loaded = load_config(write_config(), [f"run.dir={tmp_path}/runs", *overrides])
        return [issue.message for issue in check_environment(loaded.config)]

    demonstrations = f"warmup.data={tmp_path}/train.jsonl"
    assert found() == [f"no weights (*.safetensors) in {tmp_path}/model"]
    assert found(demonstrations) == found()
    assert found(demonstrations, "warmup.init=random") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_run_dir(write_config: Write, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    loaded = load_config(write_config(), [f"run.dir={tmp_path}/locked/runs"])
    assert "run.dir" in {issue.key for issue in check_environment(loaded.config)}


def test_a_job_does_not_write_its_run_into_rays_copy_of_the_checkout(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_0123456789abcdef"
    copy.mkdir(parents=True)
    config = write_config()
    monkeypatch.chdir(copy)

    def found(*overrides: str) -> list[Any]:
        issues = check_environment(load_config(config, list(overrides)).config)
        return [issue for issue in issues if issue.key == "run.dir"]

    (issue,) = found()
    assert str(copy / "runs") in issue.message
    assert "run.dir=/shared/runs" in issue.remedy
    assert len(found("run.dir=below/here")) == 1
    assert found(f"run.dir={tmp_path}/runs") == []
