"""No drafter, however wrong, changes a token or stops the engine; one that raises is given up and the policy told."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from contracts.rollout import Request, Rollout
from drafter.protocol import Drafter
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import VOCAB, drain, engine, make_requests, options_of, rollouts, run
from tests.policies.loads import load
from tests.speculation.hostile import HOSTILE, Adversary, Answers, Exits, Keeps, Raises, Writes
from tests.speculation.support import Served, model_of

STRATEGIES = ("test:5", "test:4x3/12")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, list[Request], dict[int, Rollout]]:
    model = model_of(tmp_path_factory.mktemp("hostile"), "qwen3")
    requests = make_requests(26, prompts=6, seed=12, stop_token_ids=(2, 9), top_p=0.95)
    return model, requests, run(engine(model), requests)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*HOSTILE, "adversary", "keeps", "writes"])
def test_no_token_changes(case: tuple, name: str, strategy: str) -> None:
    model, requests, expected = case
    drafter: Drafter
    if name == "adversary":
        drafter = Adversary(expected)
    elif name == "keeps":
        drafter = Keeps()
    elif name == "writes":
        drafter = Writes()
    else:
        drafter = Answers(HOSTILE[name])
    served = Served(model, requests, FixedPolicy(Strategy.parse(strategy)), {"test": drafter})
    served.assert_same(expected)
    if isinstance(drafter, Writes):
        assert drafter.refused > 0
    if isinstance(drafter, Adversary):
        assert 0 < served.accepted("test") < served.drafted("test")


@pytest.mark.parametrize("method", ["begin", "end", "propose", "remember"])
@pytest.mark.parametrize("calls", [0, 3])
def test_one_that_raises_is_given_up_at_once(
    case: tuple, method: str, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, requests, expected = case
    policy = FixedPolicy(Strategy.parse("test:4"))
    served = Served(model, requests, policy, {"test": Raises(method, calls)}, memory=expected)
    served.assert_same(expected)
    if method != "remember" or calls == 0:
        assert [r.levelname for r in caplog.records if "goes on without it" in r.message] == ["ERROR"]
        assert policy.choose(load(1)) is PLAIN


def test_a_save_that_fails_is_told_and_costs_no_drafter(case: tuple, tmp_path: Path) -> None:
    model, requests, expected = case
    drafters = {"full": Raises("save"), "good": Adversary(expected)}
    policy = FixedPolicy(Strategy.parse("full:4"))
    core = NativeEngine(model, options_of(), drafters=drafters, policy=policy)
    assert core.save_drafters(str(tmp_path / "kept")) == "full: drafter is out of order"
    assert policy.choose(load(1)) == Strategy.parse("full:4")
    (tmp_path / "file").touch()
    failure = core.save_drafters(str(tmp_path / "file" / "below"))
    assert failure is not None
    assert str(tmp_path / "file") in failure
    assert run(core, requests).keys() == expected.keys()


def test_running_out_of_memory_in_a_drafter_is_its_own_affair(case: tuple) -> None:
    model, requests, expected = case
    Served(model, requests, FixedPolicy(Strategy.parse("test:4")), {"test": Exits()}).assert_same(expected)


def test_one_drafter_down_leaves_the_others(case: tuple) -> None:
    model, requests, expected = case
    records: list = []
    drafters = {"bad": Raises("propose"), "good": Adversary(expected)}
    core = NativeEngine(
        model,
        options_of(),
        drafters=drafters,
        policy=FixedPolicy(Strategy.parse("bad:4")),
        steps=records,
    )
    core.submit(requests)
    events = []
    for _ in range(5):
        events += core.step()
    core.use(FixedPolicy(Strategy.parse("good:4")))
    events += drain(core)
    finished = rollouts(events)
    assert finished.keys() == expected.keys()
    for request_id, rollout in finished.items():
        assert rollout.tokens.tobytes() == expected[request_id].tokens.tobytes()
    assert sum(record.accepted for record in records) > 0


@pytest.mark.parametrize("name", HOSTILE)
def test_with_rejection_sampling_nothing_breaks_either(case: tuple, name: str) -> None:
    """There the tokens are other ones, but all of the vocabulary, with finite log-probs and up to their limits."""
    model, requests, expected = case
    core = NativeEngine(
        model,
        options_of(),
        drafters={"test": Answers(HOSTILE[name])},
        policy=FixedPolicy(Strategy.parse("test:5")),
        verification="rejection",
    )
    results = run(core, requests)
    assert results.keys() == expected.keys()
    for request in requests:
        rollout = results[request.request_id]
        assert 1 <= len(rollout.tokens) <= request.sampling.max_new_tokens
        assert (rollout.tokens >= 0).all()
        assert (rollout.tokens < VOCAB).all()
        assert np.isfinite(rollout.logprobs).all()
        assert (rollout.logprobs <= 0).all()
