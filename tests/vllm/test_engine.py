"""The vLLM engine beside the native one: the same greedy tokens, ends and counts, with drafts and without."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from actors.data.stop_strings import compile_marker
from actors.engine.process import spawn_engine
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from contracts.engine import Sleep, Submit, UpdateWeights, Wake
from contracts.rollout import DrafterFailed, EngineWindow, Event, FinishReason, Request, Rollout, StopRule
from models import weights
from models.checkpoint import hf_state_dict, init_model
from tests.engine.contract import Talk, finished
from tests.engine.support import make_requests
from tests.vllm.support import VLLM, tiny_checkpoint

pytestmark = VLLM
ADAPTIVE = SpeculationOptions(eagle=EagleOptions(path="random"))


@dataclass(frozen=True)
class Pair:
    """One model in both engines; vLLM's drafts with every drafter at hand."""

    native: Talk
    vllm: Talk


def engine(model_dir: Path, speculation: SpeculationOptions, **options: object) -> Talk:
    common = {"max_running": 6, "kv_tokens": 4096, "progress_every_tokens": 5, "threads": 1}
    eager = {"vllm_arguments": {"enforce_eager": True}}
    return Talk(
        spawn_engine(
            ModelOptions(path=str(model_dir)),
            EngineOptions.model_validate(common | eager | options),
            speculation=speculation,
            start_timeout_s=240.0,
        )
    )


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model_dir, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    native = engine(model_dir, SpeculationOptions(mode="off"))
    vllm = engine(model_dir, ADAPTIVE, backend="vllm")
    yield Pair(native, vllm)
    native.engine.close()
    vllm.engine.close()


def greedy(requests: Sequence[Request]) -> list[Request]:
    return [replace(request, sampling=replace(request.sampling, temperature=0.0)) for request in requests]


def same_tokens(one: dict[int, Rollout], other: dict[int, Rollout]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[i].tokens, other[i].tokens) and one[i].finish_reason == other[i].finish_reason for i in one
    )


def drafted(events: Sequence[Event]) -> Counter[str]:
    """Tokens by drafter."""
    found: Counter[str] = Counter()
    for window in (event for event in events if isinstance(event, EngineWindow)):
        for use in window.strategies:
            found[use.strategy.partition(":")[0]] += use.drafted
    return found


def test_greedy_tokens_are_the_native_engines_whatever_is_drafted(pair: Pair) -> None:
    told: Counter[str] = Counter()
    for seed in range(6):  # six at a time: every prompt comes again, so that there is something to draft from
        requests = greedy(make_requests(12, prompts=4, seed=seed % 3, max_new_tokens=60))
        pair.vllm.submit(requests)
        events = pair.vllm.idle(12)
        told += drafted(events)
        assert same_tokens(finished(events), pair.native.run(requests))
        assert [event.reason for event in events if isinstance(event, DrafterFailed)] == []
    assert {"suffix", "ngram", "eagle"} <= {name for name, tokens in told.items() if tokens}


def test_stop_strings_end_responses_at_the_same_token(pair: Pair) -> None:
    requests = greedy(make_requests(6, seed=4, max_new_tokens=40))
    whole = pair.native.run(requests)
    texts = [f"<{token}>".encode() for token in range(61)]
    for position in (0, 7, 20):
        rules = {}
        for request in requests:
            first, second = whole[request.request_id].tokens[position : position + 2].tolist()
            marker = compile_marker((texts[first] + texts[second][:2],), texts)
            rules[request.request_id] = StopRule(strings=marker)
        ruled = [replace(request, stop=rules[request.request_id]) for request in requests]
        found = pair.vllm.run(ruled)
        assert same_tokens(found, pair.native.run(ruled))
        assert all(rollout.finish_reason is FinishReason.STOP for rollout in found.values())


def test_answers_and_give_ups_end_responses_at_the_same_token(pair: Pair) -> None:
    """Those whose coin lets them run on too, and again where a response is taken up in the middle."""
    requests = greedy(make_requests(12, prompts=4, seed=5, max_new_tokens=40))
    whole = pair.native.run(requests)
    texts = [f"<{token}>".encode() for token in range(61)]
    ruled = []
    for i, request in enumerate(requests):
        tokens = whole[request.request_id].tokens.tolist()
        marker = compile_marker([b"".join(texts[token] for token in tokens[12:15])], texts)
        rules = (
            StopRule(answer=marker, poll_from_tokens=18, grace_tokens=4),
            StopRule(answer=marker, grace_tokens=3, give_up_at_tokens=9, keep=0.5),
            StopRule(answer=marker, poll_from_tokens=20, give_up_at_tokens=30, keep=0.5),
        )
        ruled.append(replace(request, stop=rules[i % 3]))
    expected = pair.native.run(ruled)
    assert {FinishReason.ANSWERED, FinishReason.GIVEN_UP} <= {r.finish_reason for r in expected.values()}
    assert {0.5, 1.0} == {rollout.propensity for rollout in expected.values()}
    found = pair.vllm.run(ruled)
    assert same_tokens(found, expected)
    assert {i: r.propensity for i, r in found.items()} == {i: r.propensity for i, r in expected.items()}
    again = [replace(r, prefix=replace(found[r.request_id].sampled.first(7), logprobs_t1=None)) for r in ruled]
    assert same_tokens(pair.vllm.run(again), expected)


def test_a_full_cache_preempts_and_loses_nothing(tmp_path: Path) -> None:
    """vLLM takes requests out of the batch and computes them again; what they drew before stays."""
    model_dir, _ = tiny_checkpoint(tmp_path)
    vllm = engine(model_dir, ADAPTIVE, backend="vllm", kv_tokens=512)
    native = engine(model_dir, SpeculationOptions(mode="off"))
    try:
        requests = greedy(make_requests(6, prompts=6, seed=9, max_new_tokens=200))
        vllm.submit(requests)
        events = vllm.idle(6)
        assert sum(event.preempted for event in events if isinstance(event, EngineWindow))
        assert same_tokens(finished(events), native.run(requests))
    finally:
        vllm.engine.close()
        native.engine.close()


def test_weights_that_come_while_it_sleeps_are_what_it_wakes_with(tmp_path: Path) -> None:
    model_dir, _ = tiny_checkpoint(tmp_path)
    vllm = engine(model_dir, SpeculationOptions(mode="off"), backend="vllm")
    native = engine(model_dir, SpeculationOptions(mode="off"))
    try:
        requests = greedy(make_requests(4, seed=12, max_new_tokens=20))
        manifest, buffer = weights.pack(hf_state_dict(init_model(model_dir, 5)), 1)
        for talk in (vllm, native):
            assert talk.ask(Sleep()).refusal == ""
            assert talk.ask(UpdateWeights(manifest), buffer).version == 1
            talk.engine.send(Wake())
        assert same_tokens(vllm.run(requests), native.run(requests))
    finally:
        vllm.engine.close()
        native.engine.close()


def test_telemetry_counts_what_was_decoded(pair: Pair) -> None:
    requests = greedy(make_requests(5, seed=11, max_new_tokens=30))
    pair.vllm.engine.send(Submit(tuple(requests)))
    events = pair.vllm.idle(5)
    windows = [event for event in events if isinstance(event, EngineWindow)]
    tokens = sum(len(rollout.tokens) for rollout in finished(events).values())
    assert sum(window.decode_tokens for window in windows) == tokens
    prompts = [len(request.prompt_tokens) for request in requests]
    assert sum(window.prefill_tokens for window in windows) == sum(n for n in prompts if n > 1)  # one decodes at once
    verifications = sum(rollout.verifications for rollout in finished(events).values())
    accepted = sum(use.accepted for window in windows for use in window.strategies)
    assert tokens - accepted <= verifications <= tokens
    assert windows[-1].running == 0
