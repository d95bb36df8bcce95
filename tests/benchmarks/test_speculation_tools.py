"""The tools of the speculation benchmarks: bounds worked out by hand, requests, records, tables, charts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batch.telemetry import EngineStepRecord
from benchmarks.rollout import share_of_first
from benchmarks.tools import rollout_report, rollouts
from benchmarks.tools.bound import MIN_STEPS, bound_s, bucket, estimate_s, interpolated
from benchmarks.tools.contenders import WrongDrafter
from benchmarks.tools.targets import Task
from config.strategy import Strategy
from drafter.protocol import BatchView


def step(
    strategy: str = "plain",
    running: int = 1,
    *,
    drafted: int = 0,
    emitted: int = 1,
    elapsed_s: float = 1.0,
    draft_s: float = 0.0,
    prefill: int = 0,
) -> EngineStepRecord:
    parsed = Strategy.parse(strategy)
    return EngineStepRecord(
        at_s=0.0,
        running=running,
        context_tokens=100 * running,
        strategy=parsed,
        drafted=drafted,
        accepted=emitted - running,
        emitted=emitted,
        elapsed_s=elapsed_s,
        draft_s=draft_s,
        prefill_tokens=prefill,
    )


def test_pass_costs_are_linear_between_rows_and_beyond() -> None:
    cost = interpolated({1: {1: 1.0, 3: 2.0}, 2: {2: 5.0}})
    assert [cost(1, rows) for rows in (1, 2, 3, 5)] == [1.0, 1.5, 2.0, 3.0]
    assert cost(3, 9) == 5.0  # 3 running requests count from 2 on
    assert [bucket(running) for running in (1, 2, 3, 4, 127, 128)] == [1, 2, 2, 4, 64, 128]


def test_the_estimate_takes_the_best_strategy_of_each_batch_size_at_its_bare_cost() -> None:
    # 10 plain steps of 1 s at one request: 0.6 s forward, 0.4 s beside it. 4 at two requests. One with a prompt: 3 s.
    off = (
        [step() for _ in range(10)] + [step(running=2, emitted=2) for _ in range(4)] + [step(prefill=8, elapsed_s=3.0)]
    )
    cost = interpolated({1: {1: 0.6, 5: 1.0}, 2: {2: 0.8, 10: 2.4}})
    # 3 tokens for 0.4 + 1.0 + 0.1 s at one request: 0.5 s per token. At two requests a loss: 4 tokens for 0.2 + 2.4 s.
    tried = [step("suffix:4", drafted=4, emitted=3, elapsed_s=2.0, draft_s=0.1)] * MIN_STEPS
    tried += [step("suffix:4", 2, drafted=8, emitted=4, elapsed_s=3.0)] * MIN_STEPS
    assert estimate_s(off, tried, cost) == pytest.approx(10 * 0.5 + 4 * 1.0 + 3.0)
    # Too few steps say nothing, and steps of the plain arm are no news.
    assert estimate_s(off, tried[: MIN_STEPS - 1] + [step()] * 99, cost) == pytest.approx(10 + 4 + 3)


def test_the_estimate_is_never_above_what_was_measured() -> None:
    off = [step() for _ in range(4)]
    tried = [step("suffix:4", drafted=4, emitted=5, elapsed_s=1.0)] * MIN_STEPS
    assert estimate_s(off, tried, lambda running, rows: 0.5 * rows) == pytest.approx(4 * 0.2)


Steps = list[EngineStepRecord]


def timed(steps: Steps, other_s: float = 0.0) -> tuple[float, Steps]:
    return sum(step.elapsed_s for step in steps) + other_s, steps


def test_the_bound_takes_the_fewest_seconds_per_token_of_any_run_at_each_batch_size() -> None:
    # Ten tokens at one request, four at two; one step with a prompt.
    prompt = step(prefill=8, elapsed_s=3.0)
    off = timed([*(step() for _ in range(40)), *(step(running=2, emitted=2) for _ in range(20)), prompt], other_s=0.5)
    # At one request 2 tokens a second, at two 1: half of what plain decoding has there.
    fixed = [step("suffix:4", drafted=4, emitted=2) for _ in range(20)]
    fixed += [step("suffix:4", 2, drafted=8, emitted=4, elapsed_s=4.0) for _ in range(20)]
    assert bound_s([off, timed([*fixed, prompt], 0.5)]) == pytest.approx(0.5 + 3 + 40 * 0.5 + 40 * 0.5)


def test_a_strategy_of_a_run_that_also_tried_others_counts_by_itself() -> None:
    off = timed([step() for _ in range(60)])
    good = [step("suffix:4", drafted=4, emitted=4) for _ in range(MIN_STEPS)]
    chooser = timed([*good, *(step("ngram:4", drafted=4, emitted=1, elapsed_s=3.0) for _ in range(20))])
    tokens = 4 * MIN_STEPS + 20
    assert bound_s([off, chooser]) == pytest.approx(min(60, tokens) * 0.25)


def test_few_steps_say_nothing_about_other_runs() -> None:
    lucky = timed([step("suffix:4", drafted=4, emitted=5), *(step(elapsed_s=2.0) for _ in range(55))])
    assert bound_s([timed([step() for _ in range(60)]), lucky]) == pytest.approx(60)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[float, Steps]]:
    """Runs of any strategies at any batch sizes, that each write the same tokens."""

    def one() -> tuple[float, Steps]:
        steps: Steps = []
        left = 120
        while left > 0:
            running = draw(st.sampled_from((1, 2, 3, 8)))
            text = draw(st.sampled_from(("plain", "suffix:4", "ngram:4")))
            count = draw(st.integers(1, 30))
            emitted = running * (1 if text == "plain" else draw(st.integers(1, 5)))
            seconds = draw(st.floats(0.01, 10))
            prefill = draw(st.sampled_from((0, 0, 0, 5)))
            for _ in range(count):
                wrote = min(emitted, left)
                left -= wrote
                if not wrote:
                    break
                steps.append(step(text, running, emitted=wrote, elapsed_s=seconds, prefill=prefill))
        return timed(steps, draw(st.floats(0, 5)))

    return [one() for _ in range(draw(st.integers(1, 4)))]


@settings(deadline=None, max_examples=60)
@given(runs())
def test_no_run_is_faster_than_the_bound(found: list[tuple[float, Steps]]) -> None:
    assert 0 < bound_s(found) <= min(seconds for seconds, _ in found) * (1 + 1e-9)


def test_the_first_seconds_are_compared_by_the_same_work() -> None:
    def run(*taken_s: float) -> rollouts.Run:
        at_s, steps = 5.0, []
        for seconds in taken_s:
            steps.append(replace(step(emitted=2, elapsed_s=seconds), at_s=at_s))
            at_s += seconds
        return rollouts.Run(at_s, {}, steps)

    # Four tokens in the first two seconds; the cold one explores first, and is as fast then.
    assert share_of_first(run(1, 1, 1, 1), run(2, 1, 1, 1), 2.0) == (2 / 3, 2)
    assert share_of_first(run(1, 1), run(1, 0.5), 9.0) == (2 / 1.5, 2)  # it ends before


def task() -> Task:
    return Task([np.array([i + 1], np.int32) for i in range(3)], (0,))


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_waves_take_other_prompts_and_never_the_same_noise(count: int) -> None:
    made = rollouts.waves(task(), 6, count, epoch=2)
    assert all(len(requests) == count for requests in made)
    requests = [request for wave in made for request in wave]
    assert len({request.request_id for request in requests}) == len(requests)
    assert len({request.noise_key for request in requests}) == len(requests)
    assert {request.prompt_id for request in requests} == {0, 1, 2}
    assert all(
        request.prompt_tokens is not None and request.prompt_tokens[0] == request.prompt_id + 1 for request in requests
    )
    groups = [len({request.prompt_id for request in wave}) for wave in made]
    assert groups == [max(1, count // rollouts.GROUP)] * 6
    earlier = rollouts.wave(task(), 0, count, epoch=0)
    assert not {request.noise_key for request in earlier} & {request.noise_key for request in requests}


def test_a_difference_is_found_and_named() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    assert rollouts.first_difference({7: tokens}, {7: tokens.copy()}) is None
    assert rollouts.first_difference({7: tokens}, {}) == "request 7 has no response"
    assert rollouts.first_difference({7: tokens}, {7: tokens[:2]}) == "request 7 differs from token 2 on"
    runs = [rollouts.Run(1.0, {7: of}, []) for of in (tokens, tokens + 1)]
    with pytest.raises(SystemExit, match="suffix:4 is not lossless: request 7 differs from token 0 on"):
        rollouts.require_same(runs[0], runs[1], "suffix:4")


def test_speed_leaves_prompt_chunks_and_other_batch_sizes_out() -> None:
    steps = [
        step("suffix:4", 2, drafted=8, emitted=6, elapsed_s=3.0, draft_s=1.0),
        step("suffix:4", 2, emitted=2, prefill=5, elapsed_s=50.0),
        step("suffix:4", 1, drafted=4, emitted=5, elapsed_s=20.0),
        step(running=2, emitted=2, elapsed_s=9.0),
    ]
    speed = rollouts.speed_of(steps, rollouts.is_speculative, running=2)
    assert (speed.steps, speed.accept_length, speed.token_s) == (1, 3.0, 0.5)
    assert rollouts.speed_of(steps, rollouts.is_speculative).accept_length == 11 / 3


def test_the_hostile_drafter_fills_the_room_with_one_token() -> None:
    nothing = np.zeros(2, np.int64)
    view = BatchView(
        request_ids=nothing,
        prompt_ids=nothing,
        slots=nothing,
        history=np.zeros((2, 4), np.int32),
        lengths=nothing,
        prompt_lengths=nothing,
        noise_keys=nothing,
        temperatures=np.zeros(2, np.float32),
        vocab_size=9,
        top_k=nothing,
        top_p=np.ones(2, np.float32),
        room=np.array([1, 7]),
    )
    drafts = WrongDrafter("suffix", 8).propose(view, Strategy("suffix", 3))
    assert drafts.tokens.tolist() == [[8, 8, 8]] * 2
    assert drafts.counts.tolist() == [1, 3]


def case(requests: int, speedup: float, hostile: float = 1.0, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    contenders = {
        "adaptive": {"speedup": speedup, "accept_length": 2.0},
        "hostile": {"speedup": hostile, "accept_length": 1.0},
        "cold": {"speedup": 1.0, "accept_length": 1.0},
        "hostile, cold": {"speedup": 1.0, "accept_length": 1.0},
        "suffix:4": {"speedup": 1.5, "accept_length": 2.5},
        "ngram:4": {"speedup": 1.25, "accept_length": 2.0},
    }
    shared = {"target": "20m", "parameters": 20, "dtype": dtype, "off_tokens_per_s": 1000.0}
    bound = {"bound_speedup": 2.0, "adaptive_of_bound": speedup / 2}
    return {"requests": requests, "contenders": contenders} | shared | bound | more


def test_cases_are_merged_and_replaced_but_only_on_one_machine(tmp_path: Path) -> None:
    path, settings = tmp_path / "rollout.json", {"threads": 2}
    for row in (case(2, 1.8), case(1, 1.0), case(1, 1.9)):
        rollout_report.merge(path, row, "what?", settings)
    cases = json.loads(path.read_text())["cases"]
    assert [(c["requests"], c["contenders"]["adaptive"]["speedup"]) for c in cases] == [(1, 1.9), (2, 1.8)]
    with pytest.raises(SystemExit, match="differs from this run in threads"):
        rollout_report.merge(path, case(4, 1.0), "what?", {"threads": 1})


def test_the_table_tells_the_best_fixed_and_the_worst_cases() -> None:
    first = {"cold_of_adaptive": 0.88}
    record = {"machine": {}, "cases": [case(1, 1.9, first=first), case(2, 1.6, hostile=0.96)]}
    text = rollout_report.table(record)
    assert "| 20m float32 | 1 | 1,000 | **1.90x** | 2.00 | 2.00x | 0.95 | 1.50x suffix:4 | 0.88 | 1.00x |  |" in text
    assert "Smallest share of the bound: 80% (20m float32 at 2 requests)." in text
    assert "at least 0.90 in 0 of 1 cases; smallest: 0.88 (20m float32 at 1 requests)" in text
    assert "Hostile against off: at least 0.97x in 1 of 2 cases; slowest: 0.96x (20m float32 at 2 requests)." in text
    before = {"cases": [case(1, 2.0), case(4, 3.0)]}
    text = rollout_report.table(record, before)
    assert "| 1.00x | 2.00x |\n" in text
    assert "smallest 0.95 (20m float32 at 1 requests), median 0.95." in text


def test_a_figure_has_every_line_and_is_the_same_file_twice(tmp_path: Path) -> None:
    record = {"machine": {}, "cases": [case(1, 1.9), case(128, 1.1), case(1, 3.1, dtype="bfloat16")]}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rollout_report.plot(record, tmp_path / name / "rollout.svg")
    text = (tmp_path / "a/rollout.svg").read_text()
    assert text == (tmp_path / "b/rollout.svg").read_text()
    for words in ("20m float32", "20m bfloat16", "adaptive", "suffix:4", "bound"):
        assert f">{words}</text>" in text
