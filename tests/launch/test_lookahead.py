"""Looking ahead without Ray: who gets which requests, what becomes of their text, where it is off, and when it pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.rollout import EarlyUse, FinishReason, Rollout, Sampled
from launch.config import Config
from launch.config.lookahead import ahead_meanwhile, no_lookahead
from launch.dispatch.early import EarlySampling, is_early
from launch.report.summary import lookahead_text, rounds_text
from policies.lookahead import Worth
from tests.actors.fake_engine import make_request, response


def ended(request_id: int, tokens: list[int], reason: FinishReason = FinishReason.STOP) -> Rollout:
    zeros = np.zeros(len(tokens), np.float32)
    return Rollout(
        request_id=request_id,
        sampled=Sampled(np.array(tokens, np.int32), zeros, zeros),
        finish_reason=reason,
        weights_version=1,
        started_s=0.0,
        finished_s=0.0,
    )


def planned(count: int) -> EarlySampling:
    early = EarlySampling()
    early.plan([make_request(i) for i in range(count)])
    early.begin([])
    return early


def test_text_goes_with_the_request_of_its_noise_and_is_measured_at_its_end() -> None:
    early = planned(2)
    first, second = early.give("w", 8, 1)
    assert is_early(first.request_id)
    assert first.evaluation, "drafters must not learn from it"
    early.finished("w", ended(first.request_id, [1, 2, 3, 4]))
    early.finished("w", ended(second.request_id, []))
    one, other = early.begin([make_request(0), make_request(1)])
    assert one.early is not None
    assert one.early.tolist() == [1, 2, 3, 4]
    assert other.early is None
    assert (one.request_id, one.noise_key, one.evaluation) == (0, make_request(0).noise_key, False)
    early.ended(ended(0, [1, 2, 9, 4, 5]))
    early.ended(ended(1, [7]))
    early.used(EarlyUse(engine_steps=1, checked=4, stood=2, seconds=0.5, saved_s=1.5))
    tally = early.take()
    assert (tally.sampled, tally.responses, tally.tokens, tally.stood, tally.drawn) == (4, 1, 4, 2, 5)
    assert tally.use.saved_s == 1.5
    assert early.take().responses == 0


def test_what_is_aborted_comes_back_and_goes_on_from_its_text() -> None:
    early = planned(3)
    given_ = early.give("w", 2, 1)
    ids = early.take_back("w")
    assert ids == tuple(request.request_id for request in given_)
    early.finished("w", ended(ids[0], [5, 6], FinishReason.ABORT))
    early.lost("w")  # before it said the other
    assert not any(early._aborted.values())
    again = early.give("v", 3, 1)
    assert sorted(request.noise_key for request in again) == [0, 1, 2]
    assert [r.early.tolist() for r in again if r.early is not None] == [[5, 6]]


def test_text_that_comes_too_late_is_dropped_and_a_lost_worker_loses_only_time() -> None:
    early = planned(2)
    first, second = early.give("w", 8, 1)
    early.begin([make_request(0)])  # asked for, with another still to come
    early.finished("w", ended(first.request_id, [1]))
    assert early.begin([make_request(0)])[0].early is None
    early.lost("w")
    early.finished("w", ended(second.request_id, [1]))  # its last words
    assert [request.noise_key for request in early.give("v", 8, 1)] == [1]


def test_idle_workers_share_what_there_is() -> None:
    early = planned(8)
    assert len(early.give("a", 64, 2)) == 4
    assert early.give("a", 64, 2) == ()
    assert len(early.give("b", 64, 2)) == 4
    assert early.give("c", 64, 2) == ()


@settings(deadline=None)
@given(st.data())
def test_whatever_happens_each_request_keeps_its_own_text_and_nothing_else(data: st.DataObject) -> None:
    """Random runs, losses, aborts and late answers: a real request changes in nothing but `early`, and that is text
    that was sampled under its own noise."""
    early, flying, begun = EarlySampling(), dict[int, int](), 0
    for _ in range(data.draw(st.integers(1, 40))):
        worker = data.draw(st.sampled_from(["a", "b"]))
        match data.draw(st.sampled_from(["begin", "give", "back", "lost", "finish"])):
            case "begin":
                real = [make_request(i) for i in range(begun, begun + 4)]
                begun += data.draw(st.sampled_from([0, 4]))
                early.plan([make_request(i) for i in range(begun, begun + 4)])
                for was, now in zip(real, early.begin(real), strict=True):
                    assert (now.request_id, now.noise_key, now.evaluation) == (was.request_id, was.noise_key, False)
                    whole = response(was)[0]
                    assert now.early is None or now.early.tolist() == whole[: len(now.early)]
            case "give":
                for request in early.give(worker, 3, 2):
                    assert request.noise_key >= begun - 4
                    flying[request.request_id] = request.noise_key
            case "back":
                early.take_back(worker)
            case "lost":
                early.lost(worker)
            case "finish" if flying:
                request_id = data.draw(st.sampled_from(sorted(flying)))
                whole = response(make_request(flying[request_id]))[0]
                part = data.draw(st.integers(0, len(whole)))
                reason = data.draw(st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
                early.finished(worker, ended(request_id, whole[:part], reason))


PLAUSIBLE = {"rollout": {"workers": 2, "lookahead": "auto"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"rollout": {"lookahead": "off"}}, "off"),
        ({"rollout": {"engine": {"backend": "vllm"}}}, "vllm"),
        (
            {"rollout": {"speculation": {"verification": "rejection", "mode": "fixed", "strategies": ["ngram:2"]}}},
            "rej",
        ),
        ({"rollout": {"staleness": 1}}, "staleness"),
        ({"rollout": {"partial": {"tokens_per_step": 10}}}, "partial"),
        ({"rollout": {"skip": {"after": 2}}}, "skip"),
        ({"rollout": {"rounds": {"factor": 1.5}}}, "rounds"),
        ({"drafter": {"train": True}}, "drafter.train"),
        ({"rollout": {"workers": 1}}, "one worker"),
        ({"rollout": {"workers": 1}, "cluster": {"layout": "disaggregated"}}, None),
    ],
    ids=str,
)
def test_where_it_is_off_the_reason_is_said(changes: dict, said: str | None) -> None:
    tree = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "data": {},
        "rollout": PLAUSIBLE["rollout"] | changes.get("rollout", {}),
    }
    config = Config.model_validate(tree | {name: value for name, value in changes.items() if name != "rollout"})
    reason = no_lookahead(config)
    assert (reason is None) if said is None else (reason is not None and said in reason)
    assert ahead_meanwhile(config) == (config.cluster.layout == "disaggregated")


def test_what_lost_is_left_off_for_longer_and_longer_and_tried_again() -> None:
    worth, offs = Worth(), []
    for _ in range(3):
        worth.observe(100, -1.0)
        steps = 0
        while not worth.pays:
            worth.observe(100, 5.0)  # of text that was sampled before
            steps += 1
        offs.append(steps)
    assert offs == [4, 8, 16]
    worth.observe(100, 2.0)
    worth.observe(100, -1.0)  # less than was won just before
    assert worth.pays
    worth.observe(0, 0.0)
    assert worth.pays


def test_the_summary_says_what_it_brought() -> None:
    steps = [
        {"lookahead/sampled_tokens": 50.0, "lookahead/won_s": 0.0},
        {
            "lookahead/sampled_tokens": 30.0,
            "lookahead/tokens": 40.0,
            "lookahead/stood": 0.75,
            "lookahead/won_s": 1.25,
        },
    ]
    assert lookahead_text(steps) == (
        "80 tokens sampled ahead; of 40 that were checked 75 % stood; 1.2 engine seconds won"
    )
    assert lookahead_text([{"lookahead/sampled_tokens": 0.0}]) is None
    assert lookahead_text([{}]) is None


def test_the_summary_says_what_rounds_did() -> None:
    short = {"rounds/long": 0.0, "rounds/waiting": 2.0, "lookahead/put_off_tokens": 30.0}
    long = {"rounds/long": 1.0, "rounds/waiting": 0.0, "lookahead/put_off_tokens": 0.0}
    assert rounds_text([short, long]) == "1 short, 1 long; 30 tokens put off; biased: order"
    assert rounds_text([long, short]) == "1 short, 1 long; 30 tokens put off, 2 prompts wait; biased: order"
    assert rounds_text([{}]) is None
