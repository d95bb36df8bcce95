"""Which tokens the engine draws: those of the dumb oracle, whatever runs beside a request."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.training.network import chunk_logprobs
from contracts.rollout import FinishReason, Progress
from models import ops
from tests.engine.support import (
    FAMILIES,
    as_prefix,
    assert_close,
    assert_same,
    drain,
    engine,
    logits_of,
    make_requests,
    oracle,
    rollouts,
    run,
    tiny_model,
)

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "stop_token_ids": (3, 17, 40)},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "fast"])
def test_engine_draws_what_the_oracle_draws(tmp_path: Path, sampling: dict, invariant: bool) -> None:
    model = tiny_model(tmp_path, invariant=invariant)
    requests = make_requests(10, prompts=4, seed=5, **sampling)
    results = run(engine(model), requests)
    for request in requests:
        assert_close(results[request.request_id], oracle(model, request))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_bitwise_independent_of_everything_around_a_request(
    tmp_path: Path, family: str
) -> None:
    model = tiny_model(tmp_path, family)
    requests = make_requests(24, prompts=7, seed=1, stop_token_ids=(2,), top_p=0.95)
    expected = run(engine(model), requests)
    alone: dict = {}
    for request in requests[:8]:
        alone |= run(engine(model, max_running=1), [request])
    assert_same(alone, {key: expected[key] for key in alone})
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
    assert_same(run(engine(model, max_running=23, block_tokens=5), shuffled), expected)
    assert_same(run(engine(model, prefill_chunk_tokens=16, max_running=3), requests), expected)
    two_workers = run(engine(model), requests[::2]) | run(engine(model), requests[1::2])
    assert_same(two_workers, expected)


def test_arrivals_in_the_middle_change_no_token(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(20, prompts=5, seed=2)
    expected = run(engine(model), requests)
    core, events = engine(model, prefill_chunk_tokens=16), []
    for request in requests:
        core.submit([request])
        for _ in range(3):
            events += core.step()
    assert_same(rollouts(events + drain(core)), expected)


def test_kv_pressure_preempts_and_recomputes_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(16, prompts=4, seed=3, max_new_tokens=50)
    expected = run(engine(model), requests)
    core = engine(model, kv_tokens=128)
    core.submit(requests)
    events = drain(core)
    assert_same(rollouts(events), expected)
    assert core._scheduler.preempted > 0, "the test must preempt"
    assert sum(getattr(event, "preempted", 0) for event in events) == core._scheduler.preempted


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_reissued_prefix_continues_with_the_same_tokens(tmp_path: Path, cut: int) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(6, prompts=3, seed=4, max_new_tokens=31)
    expected = run(engine(model), requests)
    reissued = [replace(r, prefix=as_prefix(expected[r.request_id], cut)) for r in requests]
    core = engine(model, progress_every_tokens=10)
    core.submit(reissued)
    events = drain(core)
    assert_same(rollouts(events), expected)
    for request_id, rollout in expected.items():  # Progress tells new tokens only.
        deltas = [e.delta.tokens for e in events if isinstance(e, Progress) and e.request_id == request_id]
        told = np.concatenate([np.zeros(0, np.int32), *deltas])
        assert told.tolist() == rollout.tokens[cut : cut + len(told)].tolist()
        assert len(told) == (31 - 1 - cut) // 10 * 10


def test_a_complete_prefix_finishes_without_a_step(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(8, seed=6, max_new_tokens=30, stop_token_ids=(1, 2, 3, 4))
    expected = run(engine(model), requests)
    assert {rollout.finish_reason for rollout in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    complete = [replace(r, prefix=as_prefix(expected[r.request_id], 30)) for r in requests]
    core = engine(model)
    core.submit(complete)
    assert_same(rollouts(core.step()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_learners_packed_forward(tmp_path: Path, family: str) -> None:
    """At temperature 1 without truncation both log-probs are the learner's, bitwise in batch-invariant mode."""
    model = tiny_model(tmp_path, family)
    requests = make_requests(9, prompts=3, seed=7)
    for request_id, rollout in run(engine(model, prefill_chunk_tokens=16), requests).items():
        request = next(r for r in requests if r.request_id == request_id)
        prompt = request.prompt_tokens.tolist()
        logits = logits_of(model, prompt + rollout.tokens.tolist())[len(prompt) - 1 : -1]
        drawn = torch.from_numpy(rollout.tokens).long()
        wanted = logits.double().log_softmax(-1).gather(1, drawn[:, None])[:, 0].numpy()
        np.testing.assert_allclose(rollout.logprobs_t1, wanted, atol=1e-6)
        assert rollout.logprobs_t1 is not None
        learned, learned_t1, _ = chunk_logprobs(lambda hidden: hidden, logits, drawn, 1.0)
        assert learned.numpy().tobytes() == rollout.logprobs.tobytes()
        assert learned_t1.numpy().tobytes() == rollout.logprobs_t1.tobytes()
        # The same logits through the same sampler: equal to the last bit.
        keys = torch.full((len(logits),), request.noise_key)
        positions = torch.arange(len(logits))
        ones, off = torch.ones(len(logits)), torch.full((len(logits),), -torch.inf)
        tokens, logprobs, _ = ops.sample(logits, off, ones, keys, positions)
        assert tokens.tolist() == rollout.tokens.tolist()
        assert logprobs.numpy().tobytes() == rollout.logprobs.tobytes()


def test_sampled_frequencies_follow_the_model(tmp_path: Path) -> None:
    """Chi-square of first tokens of 20,000 rollouts of one prompt against softmax(logits / T)."""
    model = tiny_model(tmp_path)
    count, temperature = 20_000, 1.5
    base = make_requests(count, prompts=1, seed=8, max_new_tokens=1, temperature=temperature)
    results = run(engine(model, max_running=500, kv_tokens=65_536), base)
    tokens = np.concatenate([rollout.tokens for rollout in results.values()])
    probability = (logits_of(model, base[0].prompt_tokens.tolist())[-1].double() / temperature).softmax(0).numpy()
    observed = np.bincount(tokens, minlength=len(probability))
    common = probability * count >= 5
    observed = np.append(observed[common], observed[~common].sum())
    wanted = np.append(probability[common], probability[~common].sum()) * count
    usable = wanted > 0
    statistic = float(((observed - wanted)[usable] ** 2 / wanted[usable]).sum())
    degrees = int(usable.sum()) - 1
    assert degrees > 5
    # Six standard deviations of a chi-square with that many degrees of freedom; the draws are fixed by the seed.
    assert statistic < degrees + 6 * (2 * degrees) ** 0.5
