"""A case of the rollout benchmark from end to end, on a tiny random model. No figure of it counts."""

import json

import numpy as np
import pytest

from benchmarks import rollout
from benchmarks.tools import rollouts
from benchmarks.tools.contenders import adaptive, fixed, hostile
from benchmarks.tools.targets import Target, Task
from config.strategy import Strategy
from models.checkpoint import init_model, parameter_count
from policies.speculation.policy import FixedPolicy

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
}
pytestmark = pytest.mark.skipif(
    not hasattr(pytest.importorskip("paceline_native"), "Suffixes"), reason="the native extension is older than this"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    model = init_model(directory, 0, batch_invariant=False)
    return Target("demo", "float32", model, parameter_count(model))


@pytest.fixture(scope="module")
def task() -> Task:
    return Task([np.array([i, i + 1, 3], np.int32) for i in range(4)], (7,))


@pytest.mark.long
def test_a_case_with_every_kind_of_contender(target: Target, task: Task) -> None:
    history = rollouts.record_history(target, task)
    options = rollout.Options(seconds=0.0, min_requests=4, case_seconds=60.0, repeats=1, fixed=["suffix:4"])
    case = rollout.Case(target, task, history, 2, options)
    assert case.count == 2
    contenders, left_out = rollout.contenders_for(case, None, options)
    assert [contender.name for contender in contenders] == [
        "adaptive",
        "hostile",
        "cold",
        "cold, no history",
        "cold, uncalibrated",
        "hostile, cold",
        "suffix:4",
        "off, policy asked",
    ]
    assert left_out == []
    row = rollout.measure(case, contenders, repeats=2, learning_runs=1)
    assert (row["requests"], row["tokens"]) == (2, case.reference.tokens)
    assert row["contenders"]["hostile"]["accept_length"] in (0.0, 1.0)  # 0: it never drafted
    assert row["contenders"]["suffix:4"]["accept_length"] > 1.0
    assert row["contenders"]["off, policy asked"]["steps"] == {"plain": 1.0}
    assert all(found["speedup"] <= row["bound_speedup"] for found in row["contenders"].values())
    assert 0 < row["adaptive_of_bound"] <= 1
    first = rollout.measure_first(case, contenders[0], contenders[2], seconds=0.05, repeats=2)
    assert first["cold_of_adaptive"] > 0
    assert first["seconds"] > 0


def test_no_time_leaves_the_fixed_contenders_out_and_says_so(target: Target, task: Task) -> None:
    options = rollout.Options(seconds=0.0, min_requests=1, case_seconds=0.0, repeats=3, fixed=["suffix:4", "ngram:4"])
    case = rollout.Case(target, task, ([], []), 1, options)
    contenders, left_out = rollout.contenders_for(case, None, options)
    assert len(contenders) == rollout.ALWAYS
    assert left_out == ["suffix:4", "ngram:4", "off, policy asked"]


def test_other_tokens_end_the_benchmark(target: Target, task: Task) -> None:
    options = rollout.Options(seconds=0.0, min_requests=1)
    case = rollout.Case(target, task, ([], []), 1, options)
    (request_id, tokens), *_ = case.reference.responses.items()
    case.reference.responses[request_id] = tokens + 1
    with pytest.raises(SystemExit, match=r"suffix:4 at 1 requests is not lossless: request \d+ differs from token 0"):
        case.run(fixed(target, "suffix:4"))


def test_hostile_drafts_are_all_rejected(target: Target, task: Task) -> None:
    case = rollout.Case(target, task, ([], []), 2, rollout.Options(seconds=0.0, min_requests=8))
    token = case.unused_token()
    assert token < target.model.config.vocab_size
    contender = hostile(token)
    policy = FixedPolicy(Strategy("suffix", 4))
    run = rollouts.decode(target, case.waves, policy=policy, drafters=contender.drafters(case.engine))
    assert sum(step.drafted for step in run.steps) > 0
    assert sum(step.accepted for step in run.steps) == 0


def test_taught_drafters_accept_more(target: Target, task: Task) -> None:
    """At temperature 0 the responses of two epochs are the same: who has seen the first drafts the second."""
    waves = rollouts.waves(task, 4, 1, rollouts.MEASURED_EPOCH, temperature=0.0)
    history = rollouts.record_history(target, task, temperature=0.0)
    contender = fixed(target, "suffix:4")

    def accept_length(known: rollouts.History | None) -> float:
        drafters = contender.drafters(rollouts.engine_options(1))
        run = rollouts.decode(target, waves, policy=contender.policy(), drafters=drafters, history=known)
        return rollouts.speed_of(run.steps).accept_length

    assert accept_length(history) > accept_length(None)


def test_adaptive_contenders_are_warm_and_cold(target: Target) -> None:
    warm, cold = adaptive(target), adaptive(target, "cold", history=False, learnt=False)
    assert (warm.knows_history, warm.learns) == (True, True)
    assert (cold.knows_history, cold.learns) == (False, False)
    assert set(cold.drafters(rollouts.engine_options(1))) == {"ngram", "self", "suffix"}
