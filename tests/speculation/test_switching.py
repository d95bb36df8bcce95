"""Speculation and drafters switched on and off 1,000 times in one run: same tokens, and no prompt is computed twice."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import Request, Rollout
from drafter.protocol import Drafter
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import make_requests, rollouts, t1_bytes
from tests.native import needs_native
from tests.speculation.support import ENGINE, Trees, model_of, real_drafters

pytestmark = needs_native
SWITCHES = 1_000
STRATEGIES = (
    "ngram:4",
    "suffix:6",
    "eagle:3",
    "eagle:3x2/6",
    "suffix:4x2/8",
    "self:4",
    "right:1",
    "often:3x2/6",
    "ngram:3x2/5",
)


def decode(
    model: Transformer, requests: Sequence[Request], drafters: dict[str, Drafter], strategies: Sequence[Strategy]
) -> tuple[dict[int, Rollout], list[EngineStepRecord]]:
    """Sixteen requests to begin with, one more whenever one has ended; the strategy of step i is strategies[i % n]."""
    records: list[EngineStepRecord] = []
    core = NativeEngine(model, ENGINE, drafters=drafters, steps=records)
    waiting, finished = list(requests), dict[int, Rollout]()
    core.submit([waiting.pop() for _ in range(16)])
    while waiting or core.has_work:
        core.use(FixedPolicy(strategies[len(records) % len(strategies)]))
        ended = rollouts(core.step())
        finished |= ended
        if ended and waiting:
            core.submit([waiting.pop() for _ in range(min(len(ended), len(waiting)))])
    return finished, records


@pytest.mark.slow
def test_a_thousand_switches_change_no_token_and_prefill_nothing_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = model_of(tmp_path, "qwen3")
    requests = make_requests(260, prompts=65, seed=31, max_new_tokens=140, temperature=0.9, top_k=20)
    expected, plain = decode(model, requests, {}, [PLAIN])
    oracles = {"right": Trees(expected, 1.0), "often": Trees(expected, 0.5)}
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(STRATEGIES)), 16))
    # Off and on in turn, and from one drafter to the next.
    strategies = [s for i in order for s in (Strategy.parse(STRATEGIES[i]), PLAIN, Strategy.parse(STRATEGIES[i - 3]))]
    actual, records = decode(model, requests, real_drafters(model) | oracles, strategies)

    assert actual.keys() == expected.keys()
    for request_id, rollout in expected.items():
        assert actual[request_id].tokens.tobytes() == rollout.tokens.tobytes()
        assert actual[request_id].logprobs.tobytes() == rollout.logprobs.tobytes()
        assert t1_bytes(actual[request_id]) == t1_bytes(rollout)
    pairs = list(pairwise(records))
    switches = sum(before.strategy.drafter != after.strategy.drafter for before, after in pairs)
    turned_on = sum(before.strategy == PLAIN != after.strategy for before, after in pairs)
    print(f"{switches} switches of drafter, {turned_on} from plain decoding, in {len(records)} steps")
    assert switches >= SWITCHES
    assert turned_on >= SWITCHES / 4
    used = {str(record.strategy) for record in records if record.drafted}
    assert used == set(STRATEGIES)
    # Every prompt token is computed once: switching on starts from what is there. (The last token of a prompt counts as
    # decoding where it is left alone in a step.)
    prompts = {request.prompt_id: len(request.prompt_tokens) for request in requests}
    for run in (plain, records):
        assert sum(prompts.values()) - len(prompts) <= sum(r.prefill_tokens for r in run) <= sum(prompts.values())
        assert sum(r.emitted for r in run) == sum(len(rollout.tokens) for rollout in expected.values())
