"""Batch-invariant mode: the same tokens and log-probs, to the last bit, whatever drafts, in over 100,000 tokens."""

from pathlib import Path

import pytest
import torch

from config.speculation import SpeculationOptions
from config.strategy import Strategy
from policies.speculation.build import build_policy
from policies.speculation.policy import FixedPolicy, StrategyPolicy
from tests.engine.support import FAMILIES, engine, make_requests, run
from tests.native import needs_native
from tests.speculation.support import MAX_RUNNING, SAMPLINGS, Mixed, Served, Trees, model_of, real_drafters

pytestmark = needs_native
REAL = ("ngram:4", "ngram:3x2/6", "suffix:8", "suffix:4x3/10", "eagle:3", "eagle:4x2/8", "self:5")
FIXED = (*REAL, "right:6", "often:7", "often:4x3/12", "seldom:3x2/5")
CHOSEN = ("adaptive", "paper", "mixed")
TOKENS_PER_FAMILY = 40_000


def policy_of(name: str, seed: int) -> StrategyPolicy:
    if name == "mixed":
        return Mixed(("plain", *FIXED), seed)
    if name in CHOSEN:
        options = SpeculationOptions(
            mode=name, strategies=REAL, exploration=0.5, epsilon=0.5, seed=seed, eagle={"path": "random"}
        )
        policy = build_policy(options, ("ngram", "suffix", "eagle", "self"))
        assert policy is not None
        return policy
    return FixedPolicy(Strategy.parse(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [one if one == "qwen2" else pytest.param(one, marks=pytest.mark.long) for one in FAMILIES]
)
def test_tokens_and_logprobs_are_bitwise_those_without_speculation(tmp_path: Path, family: str) -> None:
    torch.set_num_threads(1)
    model = model_of(tmp_path, family)
    tokens, running = 0, set[int]()
    accepted = dict.fromkeys(("ngram", "suffix", "eagle", "self", "right", "often", "seldom"), 0)
    drafted = accepted.copy()
    for seed, sampling in enumerate(SAMPLINGS):
        requests = make_requests(80, prompts=20, seed=40 + seed, stop_token_ids=(2, 9), **sampling)
        expected = run(engine(model), requests)
        memory = {request_id: rollout for request_id, rollout in expected.items() if request_id % 2}
        for name in (*FIXED, *CHOSEN):
            oracles = {
                "right": Trees(expected, 1.0),
                "often": Trees(expected, 0.7, seed),
                "seldom": Trees(expected, 0.1, seed),
            }
            drafters = real_drafters(model, seed) | oracles
            served = Served(model, requests, policy_of(name, seed), drafters, seed=seed, memory=memory)
            served.assert_same(expected)
            tokens += served.tokens
            running |= served.running
            for drafter in accepted:
                accepted[drafter] += served.accepted(drafter)
                drafted[drafter] += served.drafted(drafter)
    print(f"{family}: {tokens} tokens; accepted of drafted: {accepted} of {drafted}")
    assert tokens > TOKENS_PER_FAMILY > 100_000 / len(FAMILIES)
    assert {1, 2, MAX_RUNNING} <= running, running
    assert min(drafted.values()) > 1000, drafted
    assert min(accepted.values()) > 10, accepted
