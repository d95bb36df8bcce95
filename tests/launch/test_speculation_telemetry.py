"""Engine windows to the numbers of an RL step: hand-computed, lossless through the file, bounded in size."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.rollout import EngineWindow, PromptUse, ReasonUse, StrategyUse
from launch.observe import SpeculationMeter
from launch.observe.reasons import off_share, off_text, reasons_of, reasons_over_run
from launch.observe.speculation import (
    MAX_POINTS,
    MAX_PROMPTS,
    by_drafter,
    over_run,
    prompts_over_run,
    speculating,
    strategies_of,
    traces_of,
)
from tests.windows import engine_window

PLAIN = StrategyUse(
    strategy="plain", engine_steps=10, request_steps=300, drafted=0, accepted=0, seconds=1.0, draft_s=0.0, saved_s=0.0
)
CHAIN = StrategyUse(
    strategy="suffix:4",
    engine_steps=6,
    request_steps=60,
    drafted=200,
    accepted=90,
    seconds=0.5,
    draft_s=0.1,
    saved_s=0.4,
    offered=(60, 50, 50, 40),
    taken=(40, 30, 15, 5),
)
TREE = StrategyUse(
    strategy="suffix:2x2/4",
    engine_steps=2,
    request_steps=10,
    drafted=40,
    accepted=10,
    seconds=0.2,
    draft_s=0.0,
    saved_s=-0.1,
    offered=(10, 10),
    taken=(8, 2),
)
NGRAM = StrategyUse(
    strategy="ngram:2", engine_steps=2, request_steps=10, drafted=0, accepted=0, seconds=0.2, draft_s=0.0, saved_s=-0.1
)


def window(*uses: StrategyUse, at_s: float = 0.0, trace: tuple[tuple[float, int, str], ...] = ()) -> EngineWindow:
    return engine_window(
        start_s=at_s, end_s=at_s + 0.2, engine_steps=sum(u.engine_steps for u in uses), strategies=uses, trace=trace
    )


def test_metrics_of_a_step() -> None:
    meter = SpeculationMeter()
    meter.window("rollout-0", window(PLAIN, CHAIN))
    meter.window("rollout-1", window(TREE, NGRAM))
    metrics = meter.take([(30, 10), (8, 8), (50, 10)]).metrics()
    assert metrics["engine/steps"] == 20
    assert metrics["speculation/share"] == pytest.approx(10 / 20)
    assert metrics["speculation/accept_length"] == pytest.approx(1 + 100 / 80)
    assert metrics["speculation/acceptance"] == pytest.approx(100 / 240)
    assert metrics["speculation/saved_s"] == pytest.approx(0.2)
    assert metrics["speculation/suffix/accept_length"] == pytest.approx(1 + 100 / 70)
    assert metrics["speculation/suffix/steps"] == 8
    assert metrics["speculation/suffix/saved_s"] == pytest.approx(0.3)
    assert metrics["speculation/ngram/saved_s"] == pytest.approx(-0.1)
    assert "speculation/ngram/acceptance" not in metrics  # nothing was drafted: there is none
    assert metrics["speculation/request_accept_length/p50"] == 3.0
    assert not any(name.startswith("speculation/plain") for name in metrics)


def test_predictions_and_reasons_of_an_rl_step_are_metrics_and_come_back_from_the_file() -> None:
    plain = replace(PLAIN, expected_s=0.8, measured_s=0.9, missed_s=0.2)
    chain = replace(CHAIN, expected_s=0.4, measured_s=0.3, missed_s=0.1)
    meter = SpeculationMeter()
    meter.window("rollout-0", replace(window(plain), reasons=(ReasonUse("plain is faster", 6, 4, 3.6),)))
    choices = (ReasonUse("pays most", 12), ReasonUse("plain is faster", 2, 1, 0.9))
    meter.window("rollout-1", replace(window(chain), reasons=choices))
    step = meter.take()
    metrics = step.metrics()
    assert metrics["speculation/predicted_error"] == pytest.approx(0.3 / 1.2)
    assert metrics["speculation/predicted_ratio"] == pytest.approx(1.0)
    assert metrics["speculation/plain/predicted_ratio"] == pytest.approx(0.9 / 0.8)
    assert metrics["speculation/suffix/predicted_ratio"] == pytest.approx(0.3 / 0.4)
    assert metrics["speculation/reason/plain_is_faster"] == pytest.approx(0.4)
    assert metrics["speculation/reason/pays_most"] == pytest.approx(0.6)
    record = json.loads(json.dumps(step.to_json()))
    assert strategies_of(record) == step.strategies
    assert reasons_of(record) == step.reasons
    assert not meter.take().reasons
    whole = reasons_over_run([record, {}, record])
    assert off_share(whole) == pytest.approx(0.4)
    assert off_text(whole) == "off in 40 % of steps: plain decoding was faster (drafts predicted at 0.90x of it) 40 %"
    assert off_text({}) == ""
    assert reasons_of({"reasons": {"x": 3, "y": [1, 2]}}) == {}


def test_position_counts_add_up_over_strategies_of_different_depth() -> None:
    meter = SpeculationMeter()
    meter.window("rollout-0", window(CHAIN, TREE))
    suffix = by_drafter(meter.take().strategies)["suffix"]
    assert suffix.by_position() == [48 / 70, 32 / 60, 15 / 50, 5 / 40]


def test_begin_forgets_and_take_begins_anew() -> None:
    meter = SpeculationMeter()
    meter.window("rollout-0", window(CHAIN, trace=((0.0, 3, "suffix"),)))
    meter.begin()
    assert meter.take().strategies == {}
    meter.window("rollout-0", window(PLAIN))
    assert set(meter.take().strategies) == {"plain"}
    assert meter.take().traces == {}
    assert meter.take().metrics() == {
        "engine/steps": 0.0,
        "speculation/saved_s": 0.0,
        "speculation/draft_s": 0.0,
    }


def test_the_record_gives_back_what_was_measured() -> None:
    meter = SpeculationMeter()
    meter.window("rollout-0", window(PLAIN, CHAIN, at_s=1e9, trace=((1e9, 3, "none"), (1e9 + 0.05, 2, "suffix"))))
    meter.window("rollout-1", window(NGRAM, at_s=1e9, trace=((1e9 + 0.1, 1, "ngram"), (1e9 + 0.15, 0, "none"))))
    step = meter.take([(5, 3)])
    record = json.loads(json.dumps(step.to_json()))
    assert strategies_of(record) == step.strategies
    found = traces_of(record)
    assert {w: [(n, d) for _, n, d in points] for w, points in found.items()} == {
        "rollout-0": [(3, "plain"), (2, "suffix"), (0, "suffix")],  # closed with its window: the worker was lost
        "rollout-1": [(1, "ngram"), (0, "plain")],
    }
    assert found["rollout-0"][-1][0] == pytest.approx(1e9 + 0.2, abs=1e-3)
    assert record["requests"] == [[5, 3]]
    assert speculating(over_run([record, record, {"torn": 1}, {"strategies": {"x": {"y": 1}}}])).accepted == 180


@pytest.mark.parametrize(
    "record", [{}, {"origin_s": None}, {"origin_s": 1, "drafters": [], "traces": {"a": [[0, 1, 5]]}}]
)
def test_foreign_records_have_no_traces(record: dict[str, object]) -> None:
    assert traces_of(record) == {}


@given(st.integers(1, 4), st.integers(1, 3 * MAX_POINTS))
def test_traces_are_bounded_and_keep_their_ends(workers: int, points: int) -> None:
    meter = SpeculationMeter()
    for worker in range(workers):
        trace = tuple((float(i), points - i, "suffix") for i in range(points))
        meter.window(f"rollout-{worker}", window(at_s=float(points), trace=trace))
    traces = meter.take().traces
    assert sum(map(len, traces.values())) <= MAX_POINTS
    for trace_ in traces.values():
        assert trace_[0] == (0.0, points, "suffix")
        assert trace_[-1] == (points + 0.2, 0, "suffix")
        assert [t for t, _, _ in trace_] == sorted({t for t, _, _ in trace_})


def test_prompts_add_up_over_workers_and_records_and_the_metrics_say_how_far_they_are_apart() -> None:
    meter = SpeculationMeter()
    records = []
    for used in ((10, 1), (10, 9)):
        for worker in ("rollout-0", "rollout-1"):
            prompts = PromptUse(3, *used), PromptUse(7, 30, 15)
            meter.window(worker, replace(window(CHAIN), prompts=prompts))
        taken = meter.take()
        assert taken.prompts == {3: (20, 2 * used[1]), 7: (60, 30)}
        assert taken.metrics()["speculation/prompt_acceptance/p50"] == pytest.approx((used[1] / 10 + 0.5) / 2)
        records.append(json.loads(json.dumps(taken.to_json())))
    assert records[0]["prompts"] == [[7, 60, 30], [3, 20, 2]], "the most drafted for first"
    assert prompts_over_run([*records, {"prompts": 3}, {}, {"prompts": [[1]]}]) == {3: (40, 20), 7: (120, 60)}
    assert not any("prompt" in name for name in meter.take().metrics())


def test_a_record_holds_at_most_so_many_prompts() -> None:
    meter = SpeculationMeter()
    prompts = tuple(PromptUse(i, i + 1, 0) for i in range(2 * MAX_PROMPTS))
    meter.window("rollout-0", replace(window(CHAIN), prompts=prompts))
    kept = meter.take().to_json()["prompts"]
    assert len(kept) == MAX_PROMPTS
    assert min(drafted for _, drafted, _ in kept) > MAX_PROMPTS
