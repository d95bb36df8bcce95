"""Paced parts, on a clock that only computing and sleeping move."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from actors.pacing import Pacer, Tally, read_tallies
from config.strategy import PLAIN, Strategy
from contracts.rollout import Rollout
from drafter.protocol import BatchView, Drafts
from policies.calibration.roofline import Roofline
from policies.roofline.pace import Pace
from policies.speculation.policy import FixedPolicy
from tests.engine.support import DrafterBase, assert_same, make_requests, options_of, run, tiny_model

TARGET = Roofline(fixed_s=10e-3, context_s=1e-6, row_s=1e-4, request_s=1e-5, overlap=2.0)
LEVEL = Roofline(fixed_s=1e-3, context_s=0.0, row_s=1e-6, request_s=1e-5)
PACE = Pace(device="X, toy", scale=2.0, target=TARGET, levels={"eagle": LEVEL, "self": LEVEL}, copy_s=0.2)
LOOK_S = 1e-4


class FakeTime:
    """Each look says that computing took LOOK_S since the last one."""

    def __init__(self, look_s: float = LOOK_S) -> None:
        self.now_s, self.look_s, self.slept_s = 100.0, look_s, 0.0

    def clock(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.slept_s += seconds
        self.now_s += seconds


class Zeros(DrafterBase):
    """Drafts token 0 as deep as it may."""

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        counts = np.minimum(batch.room, strategy.depth)
        return Drafts(np.zeros((len(batch.slots), strategy.depth), np.int64), counts)


def test_prices_are_the_roofline_s() -> None:
    """Numbers worked out by hand."""
    assert PACE.pass_s(4, 8, 1000) == pytest.approx((11e-3**2 + 0.8e-3**2) ** 0.5 + 4e-5)
    assert replace(PACE, context_scale=20.0).pass_s(4, 8, 50) == PACE.pass_s(4, 8, 1000)
    level_s = 1e-3 + 4e-6 + 4e-5
    assert PACE.draft_s(Strategy("eagle", 3), 4, 0, caught_up=True) == pytest.approx(3 * level_s)
    tree_s = PACE.draft_s(Strategy("eagle", 3, 2, 6), 4, 0, caught_up=False)
    assert tree_s == pytest.approx(3 * (1e-3 + 8e-6 + 4e-5))
    assert PACE.draft_s(Strategy("self", 3), 4, 0, caught_up=True) == pytest.approx(3 * level_s + 0.2)
    assert PACE.draft_s(Strategy("ngram", 3), 4, 0, caught_up=False) is None
    assert replace(PACE, learner_token_s=1e-4).learner_s(50) == pytest.approx(5e-3)


def test_early_work_sleeps_and_late_work_is_counted() -> None:
    time = FakeTime(0.0)
    pacer = Pacer(PACE, "test", clock=time.clock, sleeps=time.sleep)
    begin_s = time.clock()
    time.now_s += 0.3
    pacer.hold("pass", begin_s, 0.5)  # 1 s here
    assert time.now_s == pytest.approx(begin_s + 1.0)
    pacer.hold("pass", begin_s, 0.4)  # 0.8 s: over already
    assert time.now_s == pytest.approx(begin_s + 1.0)
    assert pacer.tallies["pass"] == Tally(2, 1, pytest.approx(1.3), pytest.approx(1.8), pytest.approx(2.0))
    begin_s = time.clock()
    time.now_s += 0.25
    pacer.stretch("ngram", begin_s)
    assert time.now_s == pytest.approx(begin_s + 0.5)
    assert (pacer.tallies["ngram"].count, pacer.tallies["ngram"].spent_s) == (0, pytest.approx(0.5))


def test_tallies_of_all_processes_add_up(tmp_path: Path) -> None:
    time = FakeTime(0.0)
    pacer = Pacer(replace(PACE, tally_dir=str(tmp_path / "paced")), "a", clock=time.clock, sleeps=time.sleep)
    pacer.hold("pass", time.clock() - 2.0, 0.5)
    pacer.write()
    path = tmp_path / "paced/b-7.json"
    path.write_text(json.dumps({"pass": {"count": 3, "late": 0, "own_s": 1.0, "paced_s": 2.0, "spent_s": 2.0}}))
    assert read_tallies(tmp_path / "paced") == {"pass": Tally(4, 1, 3.0, 3.0, 4.0)}
    assert read_tallies(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("name", ["eagle", "ngram"])
def test_an_engine_s_steps_last_as_paced(tmp_path: Path, name: str) -> None:
    """Inside what the engine times: a policy learns the device's costs, and nothing else changes."""
    model, requests = tiny_model(tmp_path), make_requests(6, max_new_tokens=12)

    def steps(pace: Pace | None) -> tuple[dict[int, Rollout], list[EngineStepRecord], FakeTime]:
        time, records = FakeTime(), list[EngineStepRecord]()
        strategy = Strategy(name, 3)
        core = NativeEngine(
            model,
            options_of(),
            drafters={name: Zeros()},
            policy=FixedPolicy(strategy),
            timer=time.clock,
            steps=records,
            pacer=None if pace is None else Pacer(pace, "test", clock=time.clock, sleeps=time.sleep),
        )
        return run(core, requests), records, time

    plain, _, _ = steps(None)
    paced, records, time = steps(PACE)
    assert_same(plain, paced)
    decoding = [record for record in records if not record.prefill_tokens]
    assert len(decoding) > 3
    for record in decoding:
        assert record.strategy != PLAIN
        rows = record.running + record.drafted
        passed_s = 2 * PACE.pass_s(record.running, rows, record.context_tokens)
        own = PACE.draft_s(record.strategy, record.running, record.context_tokens, caught_up=False)
        drafted_s = 2 * own if own is not None else 2 * LOOK_S
        assert record.draft_s == pytest.approx(drafted_s, abs=4 * LOOK_S)
        assert record.elapsed_s == pytest.approx(drafted_s + passed_s, abs=8 * LOOK_S)
    assert time.slept_s > sum(record.elapsed_s for record in decoding) / 2


def test_a_slow_machine_is_late(tmp_path: Path) -> None:
    """Nothing is slept for a pass that took longer than the device's."""
    time = FakeTime(1.0)
    pacer = Pacer(PACE, "test", clock=time.clock, sleeps=time.sleep)
    core = NativeEngine(tiny_model(tmp_path), options_of(), timer=time.clock, pacer=pacer)
    run(core, make_requests(2, max_new_tokens=5))
    assert pacer.tallies["pass"].late == pacer.tallies["pass"].count >= 5
    assert time.slept_s == 0.0
