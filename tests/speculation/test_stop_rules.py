"""Stop rules in the engine: a response ends at the same token whatever is drafted, wherever it is taken up again, and
what ran past the end leaves no trace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.data.stop_strings import compile_marker
from actors.engine.native.engine import NativeEngine
from actors.engine.stopping import End, find_end
from config.strategy import Strategy
from contracts.rollout import FinishReason, Recorded, Request, Rollout, StopRule
from drafter.protocol import Drafter
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import VOCAB, as_prefix, assert_same, drain, engine, make_requests, options_of, rollouts, run
from tests.engine.test_recording import fresh_rows
from tests.engine.test_stopping import slow_end
from tests.speculation.hostile import HOSTILE, Adversary, Answers
from tests.speculation.support import Mixed, Served, Trees, model_of

WORDS = [bytes(np.random.default_rng(i).choice(list(b"abc<>"), i % 4).tolist()) for i in range(VOCAB)]
STRINGS, ANSWERS = [b"ab<", b"cc"], [b"a>", b"<b"]
RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "strings": (STRINGS, None, {}),
    "answer": (None, ANSWERS, {"poll_from_tokens": 4, "grace_tokens": 3}),
    "given up": (None, ANSWERS, {"give_up_at_tokens": 6, "keep": 0.5, "grace_tokens": 2}),
    "given up without a marker": (None, None, {"give_up_at_tokens": 5, "keep": 0.5}),
    "all": (STRINGS, ANSWERS, {"poll_from_tokens": 3, "grace_tokens": 5, "give_up_at_tokens": 9, "keep": 0.3}),
}
Case = tuple[Transformer, list[Request], dict[int, Rollout], dict[int, Rollout]]


def rule_of(name: str) -> StopRule:
    strings, answers, more = RULES[name]
    markers = [None if texts is None else compile_marker(texts, WORDS) for texts in (strings, answers)]
    return StopRule(strings=markers[0], answer=markers[1], **more)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Requests with rules of every kind, some without; how they end without any; how they must end."""
    model = model_of(tmp_path_factory.mktemp("rules"), "qwen3")
    plain = make_requests(40, prompts=8, seed=12, stop_token_ids=(2, 9))
    whole = run(engine(model), plain)
    names = [None, *RULES]
    requests, expected = [], {}
    for i, request in enumerate(plain):
        name, natural = names[i % len(names)], whole[request.request_id]
        if name is None:
            requests.append(request)
            expected[request.request_id] = natural
            continue
        requests.append(replace(request, stop=rule_of(name)))
        tokens = natural.tokens.tolist()
        end = slow_end(requests[-1], tokens, RULES[name][:2], WORDS, request.sampling.max_new_tokens)
        assert end is not None
        expected[request.request_id] = replace(
            natural,
            sampled=natural.sampled.first(end.tokens),
            finish_reason=end.reason,
            propensity=end.propensity,
        )
    reasons = {rollout.finish_reason for rollout in expected.values()}
    assert reasons == set(FinishReason) - {FinishReason.ABORT, FinishReason.TURNS}, "those are the driver's"
    assert {0.5, 1.0} <= {rollout.propensity for rollout in expected.values()}
    return model, requests, whole, expected


def drafters_of(name: str, whole: dict[int, Rollout]) -> dict[str, Drafter]:
    if name in HOSTILE:
        return {"test": Answers(HOSTILE[name])}
    return {"test": {"knows all": Trees(whole, 1.0), "knows much": Trees(whole, 0.8), "lies": Adversary(whole)}[name]}


@pytest.mark.parametrize("name", ["knows all", "knows much", "lies", "random chains", "random trees", "too long"])
@pytest.mark.parametrize("strategy", ["test:6", "test:4x3/12"])
def test_a_draft_that_runs_past_the_end_changes_nothing(case: Case, name: str, strategy: str) -> None:
    model, requests, whole, expected = case
    served = Served(model, requests, FixedPolicy(Strategy.parse(strategy)), drafters_of(name, whole))
    served.assert_same(expected)
    for request_id, rollout in served.rollouts.items():
        assert rollout.propensity == expected[request_id].propensity
    if name == "knows all":
        assert served.accepted("test") > 100
        assert all(record.accepted <= record.emitted for record in served.records)
        assert sum(record.emitted for record in served.records) == served.tokens


def test_plain_decoding_and_a_full_cache_end_them_there_too(case: Case) -> None:
    model, requests, _, expected = case
    assert_same(run(engine(model), requests), expected)
    small = engine(model, kv_tokens=160, max_running=6)
    small.submit(requests)
    events = drain(small)
    assert_same(rollouts(events), expected)
    assert small._scheduler.preempted > 0


@pytest.mark.parametrize("strategy", ["plain", "test:6"])
def test_a_response_taken_up_after_any_token_ends_where_it_would_have_ended(case: Case, strategy: str) -> None:
    model, requests, whole, expected = case
    rng = np.random.default_rng(5)
    for _ in range(3):
        again = []
        for request in requests:
            tokens = int(rng.integers(0, len(expected[request.request_id].tokens) + 1))
            again.append(replace(request, prefix=as_prefix(expected[request.request_id], tokens)))
        if strategy == "plain":
            core = engine(model)
        else:
            policy = FixedPolicy(Strategy.parse(strategy))
            core = NativeEngine(model, options_of(), drafters=drafters_of("knows all", whole), policy=policy)
        found = run(core, again)
        assert_same(found, expected)
        assert {i: r.propensity for i, r in found.items()} == {i: r.propensity for i, r in expected.items()}


def test_a_prefix_that_runs_past_its_end_is_cut_to_it(case: Case) -> None:
    """As if another worker had known no rule."""
    model, requests, whole, expected = case
    again = [replace(r, prefix=whole[r.request_id].sampled) for r in requests]
    assert_same(run(engine(model), again), expected)


def test_hidden_states_are_recorded_up_to_the_end_and_no_further(case: Case) -> None:
    model, requests, whole, expected = case
    drafters = {"test": Trees(whole, 0.9)}
    core = NativeEngine(
        model, options_of(), drafters=drafters, policy=Mixed(["test:6", "test:4x3/12"]), recording_bytes=1 << 30
    )
    core.submit(requests)
    events = drain(core)
    assert_same(rollouts(events), expected)
    recorded: Sequence[Recorded] = [event for event in events if isinstance(event, Recorded)]
    assert not any(event.failure for event in recorded)
    records = {record.request_id: record for event in recorded for record in event.records}
    assert records.keys() == expected.keys()
    by_id = {request.request_id: request for request in requests}
    for request_id, record in records.items():
        tokens = np.concatenate((by_id[request_id].prompt_tokens, expected[request_id].tokens))
        assert record.tokens.tolist() == tokens.tolist()
        states = torch.from_numpy(record.states).view(torch.float32)
        assert torch.equal(states, fresh_rows(model, tokens)[:-1]), request_id


class Listening(Answers):
    """A drafter that remembers what it was told of ends."""

    def __init__(self) -> None:
        super().__init__(HOSTILE["random chains"])
        self.ended: list[tuple[list[int], bool]] = []

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        self.ended.append((tokens[prompt_length:].tolist(), finished))


def test_drafters_learn_of_a_response_that_a_rule_ended_as_of_any_other_and_no_token_behind_its_end(case: Case) -> None:
    model, requests, _, expected = case
    drafter = Listening()
    policy = FixedPolicy(Strategy.parse("test:6"))
    run(NativeEngine(model, options_of(), drafters={"test": drafter}, policy=policy), requests)
    assert sorted(drafter.ended) == sorted((rollout.tokens.tolist(), True) for rollout in expected.values())


def test_a_rule_of_another_vocabulary_is_refused(case: Case) -> None:
    model, requests, _, _ = case
    foreign = compile_marker([b"z"], [b"a"] * VOCAB + [b"z"])
    core = engine(model)
    core.submit([replace(requests[0], stop=StopRule(strings=foreign))])
    [event] = [event for event in drain(core) if hasattr(event, "reason")]
    assert "outside the model's vocabulary" in event.reason


def test_with_rejection_sampling_a_response_ends_by_its_own_tokens_too(case: Case) -> None:
    """There the tokens are other ones; each must still end exactly where the law says."""
    model, requests, whole, _ = case
    core = NativeEngine(
        model,
        options_of(),
        drafters=drafters_of("knows much", whole),
        policy=FixedPolicy(Strategy.parse("test:6")),
        verification="rejection",
    )
    found = run(core, requests)
    assert found.keys() == {request.request_id for request in requests}
    for request in requests:
        rollout = found[request.request_id]
        end = find_end(request, rollout.tokens, request.sampling.max_new_tokens)
        assert end == End(len(rollout.tokens), rollout.finish_reason, rollout.propensity)
