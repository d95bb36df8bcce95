"""Looking ahead without Ray: who gets which requests, what becomes of their text, where it is off, and when it pays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data import PromptOrder, PromptSet
from actors.data.prompts import LoadReport
from benchmarks.harness import DEMO
from contracts.rollout import EarlyUse, FinishReason, Rollout, Sampled, SamplingParams
from launch.config import Config, load_config
from launch.config.lookahead import ahead_meanwhile, lookahead_issues, no_lookahead
from launch.config.lookahead import lookahead_text as lookahead_line
from launch.config.show import resolved_lines
from launch.dispatch.early import EarlySampling, is_early
from launch.observe import StepDrafter
from launch.report.summary import lookahead_text, rounds_text
from launch.run.lookahead import Lookahead
from policies.idle import IdleTime, Turn
from policies.lengths import LengthModel
from policies.lookahead import PROBE, SHARE, EarlyGain, Extent, Worth
from tests.actors.fake_engine import make_request, response
from tests.launch.graded import prompt_of

KEY = "lookahead:"


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


def test_the_window_of_the_last_steps_arrives_after_the_text_and_is_still_early() -> None:
    early = planned(2)
    assert not early.sampled_in("w", evaluation=True), "an evaluation's"
    first, second = early.give("w", 8, 1)
    assert early.sampled_in("w", evaluation=True)
    assert not early.sampled_in("w", evaluation=False)
    early.finished("w", ended(first.request_id, [1, 2]))
    early.finished("w", ended(second.request_id, [3]))
    assert early.sampled_in("w", evaluation=True)
    assert not early.sampled_in("w", evaluation=True), "an evaluation's again"


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


def config_of(changes: dict) -> Config:
    """Two workers that share a machine's cores, unless changed."""
    tree = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {}} | changes
    return Config.model_validate(tree | {"rollout": {"workers": 2} | changes.get("rollout", {})})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"engine": {"backend": "vllm"}}}, "vllm"),
        (
            {"rollout": {"speculation": {"verification": "rejection", "mode": "fixed", "strategies": ["ngram:2"]}}},
            "rej",
        ),
        ({"rollout": {"staleness": 1}}, "staleness"),
        ({"rollout": {"partial": {"tokens_per_step": 10}}}, "partial"),
        ({"rollout": {"skip": {"after": 2}}}, "skip"),
        ({"rollout": {"rounds": {"factor": 1.5}}}, "rounds"),
        ({"rollout": {"workers": 1}}, "one worker"),
        ({"learner": {"ranks": 2}}, "only cores"),
    ],
    ids=str,
)
def test_where_it_cannot_be_auto_is_off_with_the_reason_and_a_wish_is_refused(
    changes: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = config_of(changes)
    assert said in lookahead_line(config)
    assert lookahead_line(config).startswith("off: ")
    assert list(lookahead_issues(config)) == []
    wished = config_of(changes | {"rollout": changes.get("rollout", {}) | {"lookahead": "always"}})
    (issue,) = lookahead_issues(wished)
    assert said in str(issue)
    assert issue.key == "rollout.lookahead"


@pytest.mark.parametrize(
    ("changes", "auto", "always"),
    [
        ({}, "off: workers and learner share this machine's cores", "in the tail of the rollout"),
        ({"drafter": {"train": True}}, "off: workers", "in the tail of the rollout"),
        ({"cluster": {"address": "10.0.0.1:6379"}}, "on nodes where no worker decodes, while", "tail of the rollout"),
        ({"cluster": {"layout": "colocated"}}, "in the tail of the rollout, while it is measured", "tail"),
        ({"cluster": {"layout": "disaggregated"}}, "while the learner works, while it is measured", "learner works"),
        ({"cluster": {"layout": "disaggregated"}, "rollout": {"workers": 1}}, "learner works", "learner works"),
    ],
    ids=str,
)
def test_auto_looks_ahead_where_idle_workers_have_devices_of_their_own(
    changes: dict, auto: str, always: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = config_of(changes)
    assert auto in lookahead_line(config)
    assert (no_lookahead(config) is not None) == auto.startswith("off")
    assert ahead_meanwhile(config) == (config.cluster.layout == "disaggregated")
    wished = config_of(changes | {"rollout": changes.get("rollout", {}) | {"lookahead": "always"}})
    assert always in lookahead_line(wished)
    assert no_lookahead(wished) is None
    off = config_of(changes | {"rollout": changes.get("rollout", {}) | {"lookahead": "off"}})
    assert no_lookahead(off) == "rollout.lookahead is off"


def test_the_configuration_shown_says_what_auto_does_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shown = {
        pair: next(source for line, source in resolved_lines(load_config(DEMO / "config.yaml", [pair])) if KEY in line)
        for pair in ("run.steps=1", "cluster.address=10.0.0.1:6379", "rollout.lookahead=off")
    }
    assert shown["run.steps=1"].startswith("default; off: workers and learner share this machine's cores")
    assert shown["cluster.address=10.0.0.1:6379"].startswith("default; idle workers sample the next RL step")
    assert shown["rollout.lookahead=off"] == "override"


def measured(won_s: float, *, checked: int = 100, own_s: float = 0.0, all_s: float = 100.0) -> EarlyGain:
    return EarlyGain(checked=checked, won_s=won_s, own_s=own_s, all_s=all_s)


def test_what_lost_is_left_off_for_longer_and_longer_and_probed_again() -> None:
    worth, offs = Worth(), []
    for _ in range(3):
        assert "stopped" in worth.observe(measured(-1.0))
        steps = 0
        while worth.extent is Extent.NONE:
            said = worth.observe(measured(5.0))  # of text that was sampled before
            steps += 1
        assert worth.extent is Extent.PROBE
        assert "probe" in said
        offs.append(steps)
    assert offs == [4, 8, 16]
    assert "on again" in worth.observe(measured(2.0))
    assert worth.observe(measured(-1.0)) == "", "less than was won just before"
    assert worth.observe(measured(0.0, checked=0)) == ""
    assert worth.extent is Extent.ALL


def test_a_large_loss_is_paid_back_before_the_next_probe() -> None:
    worth = Worth()
    worth.observe(measured(-20.0))
    steps = 0
    while worth.extent is Extent.NONE:
        worth.observe(measured(0.0, checked=0))
        steps += 1
    assert steps == 20.0 / (SHARE * 100.0)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 0.5), st.floats(1, 200)), min_size=1, max_size=200))
def test_no_more_is_lost_than_the_share_beyond_one_step(steps: list[tuple[float, float, float]]) -> None:
    """Whatever checks win or lose, RL step by RL step: a step without lookahead has none, a probe has its part."""
    worth, net_s, all_s, worst_s = Worth(), 0.0, 0.0, 0.0
    for won_s, own_s, step_s in steps:
        part = {Extent.ALL: 1.0, Extent.PROBE: PROBE, Extent.NONE: 0.0}[worth.extent]
        one = measured(part * won_s, checked=int(100 * part), own_s=part * own_s, all_s=step_s)
        worth.observe(one)
        net_s, all_s, worst_s = net_s + one.net_s, all_s + step_s, max(worst_s, -one.net_s)
        assert net_s >= -(SHARE * all_s + worst_s) - 1e-6


def test_a_lost_workers_last_early_steps_mark_no_later_window() -> None:
    early = planned(1)
    (first,) = early.give("w", 8, 1)
    early.finished("w", ended(first.request_id, [1]))
    early.lost("w")
    assert not early.sampled_in("w", evaluation=True)


def ahead(lookahead: str = "auto", **changes: Any) -> Lookahead:
    """Of a run of 8 prompts a step, of 4 samples."""
    early = EarlySampling()
    options = {"lookahead": lookahead, "prompts_per_step": 8, "rollouts_per_prompt": 4}
    config = config_of({"rollout": options, "run": {"name": "r", "steps": 9}})
    prompts = PromptSet([prompt_of(i) for i in range(16)], LoadReport())
    return Lookahead(
        early=early, config=config, prompts=prompts, sampling=SamplingParams(max_new_tokens=9), stop=None, **changes
    )


def wanted(lookahead: Lookahead, step: int = 1, *, trains: bool = False) -> int:
    """Requests to look ahead at in that RL step."""
    order = PromptOrder(16, 0, True)
    looks = lookahead.plan(order, LengthModel(100.0), step, trains=trains)
    lookahead.early.begin([])
    assert order.state_dict() == PromptOrder(16, 0, True).state_dict(), "the run's own order is not touched"
    count = len(lookahead.early.give("w", 1000, 1))
    lookahead.early.lost("w")
    assert looks == (count > 0)
    return count


def test_auto_stops_says_why_and_probes_an_eighth_of_the_prompts() -> None:
    lookahead, asked, said = ahead(), [], []
    for step in range(1, 9):
        asked.append(wanted(lookahead, step))
        if asked[-1]:
            lookahead.early.used(EarlyUse(engine_steps=1, checked=9, saved_s=-0.01))
        metrics, news = lookahead.take(1.0, 2)
        said += [news] if news else []
        assert metrics["lookahead/own_s"] >= 0
    assert asked == [32, 0, 0, 0, 0, 4, 0, 0]
    assert [text.split(" ")[0].rstrip(":") for text in said] == ["stopped", "a", "stopped"]
    always = ahead("always")
    for step in range(1, 9):
        assert wanted(always, step) == 32
        always.early.used(EarlyUse(engine_steps=1, checked=9, saved_s=-5.0))
        assert always.take(1.0, 2)[1] == ""
    assert wanted(always, 9) == 0, "no RL step comes behind the last"


def test_where_training_brings_more_the_trainer_has_the_idle_seconds() -> None:
    lookahead = ahead(idle=IdleTime(turn=Turn.TRAIN))
    assert wanted(lookahead, trains=True) == 0
    assert wanted(lookahead, trains=False) == 32, "no training is due"
    drafter = StepDrafter(updates=(), worker_s=2.0, counts={}, levels={})
    lookahead.early.tally.spent_s = 3.0
    assert lookahead.idle is not None
    metrics, _ = lookahead.take(1.0, 2, drafter)
    assert metrics["lookahead/spent_s"] == 3.0
    assert lookahead.idle.turn is Turn.LOOK, "it was not measured yet"
    lookahead.early.used(EarlyUse(engine_steps=1, checked=9, saved_s=6.0))
    metrics, _ = lookahead.take(1.0, 2, drafter)
    assert metrics["lookahead/value"] == pytest.approx(2.0, rel=0.01)
    assert metrics["drafter/value"] == 0.0, "its acceptance did not grow"
    assert wanted(lookahead, trains=True) == 32


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
    said = "stopped for 4 RL steps at least: 1 s of 30 s were lost"
    events = [{"kind": "lookahead", "message": said}, {"kind": "checkpoint", "message": "step 4"}]
    assert str(lookahead_text(steps, events)).endswith(f"won; {said}")
    assert lookahead_text([{"lookahead/sampled_tokens": 0.0}]) is None
    assert lookahead_text([{}]) is None


def test_the_summary_says_what_rounds_did() -> None:
    short = {"rounds/long": 0.0, "rounds/waiting": 2.0, "lookahead/put_off_tokens": 30.0}
    long = {"rounds/long": 1.0, "rounds/waiting": 0.0, "lookahead/put_off_tokens": 0.0}
    assert rounds_text([short, long]) == "1 short, 1 long; 30 tokens put off; biased: order"
    assert rounds_text([long, short]) == "1 short, 1 long; 30 tokens put off, 2 prompts wait; biased: order"
    assert rounds_text([{}]) is None
