"""An engine that loses more by choosing than drafts save rests for whole rollouts; its tokens stay what they are."""

from collections import Counter
from itertools import count
from pathlib import Path

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import EngineWindow, Recorded
from policies.speculation.chooser import AdaptivePolicy
from policies.speculation.policy import Reason
from tests.engine.support import (
    DrafterBase,
    assert_same,
    drain,
    engine,
    make_requests,
    options_of,
    rollouts,
    run,
    tiny_model,
)


def test_rollouts_rest_where_choosing_costs_more_than_drafts_save(tmp_path: Path) -> None:
    """Each look at the clock takes a millisecond, so a step that chooses takes more than one that does not."""
    model, ticks = tiny_model(tmp_path), count()
    policy = AdaptivePolicy([Strategy.parse("test:4")], max_running=64, exploration=0.01)
    core = NativeEngine(
        model,
        options_of(kv_tokens=4096),
        drafters={"test": DrafterBase()},
        policy=policy,
        timer=lambda: next(ticks) * 1e-3,
        recording_bytes=1 << 20,
    )
    rested, recorded = [], []
    for rollout in range(4):
        requests = make_requests(8, seed=rollout, max_new_tokens=100)
        core.submit(requests)
        events = drain(core)
        reasons = Counter[str]()
        for window in (event for event in events if isinstance(event, EngineWindow)):
            reasons.update({use.reason: use.engine_steps for use in window.reasons})
            if Reason.RESTS in reasons:
                assert {use.strategy for use in window.strategies} == {str(PLAIN)}
        rested.append(reasons[Reason.RESTS] == reasons.total())
        assert rested[-1] or not reasons[Reason.RESTS]
        recorded.append(any(isinstance(event, Recorded) and event.records for event in events))
        assert_same(rollouts(events), run(engine(model), requests))
    assert rested == [False, True, False, True]
    assert all(recorded), "what trains a drafter goes on: it may be what makes drafts pay"
