"""How benchmark records become figures: worked out by hand on small inputs."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import rl_step_vs_trl, seeds
from benchmarks.harness import ROOT


def record(step: int, at_s: float) -> dict[str, Any]:
    metrics = {"tokens/generated": 100.0 * step, "reward/mean": 0.5, "tokens_per_s": 10.0 * step, "seconds/step": 2.0}
    return {"step": step, "kind": "step", "at_s": at_s} | metrics


def evaluation(step: int, reward: float) -> dict[str, Any]:
    return {"step": step, "kind": "eval", "eval/reward": reward, "eval/prompt_std": 0.3}


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    records = [evaluation(0, 0.4), record(1, 10.0), record(2, 13.0), record(3, 20.0), evaluation(3, 0.6)]
    assert [s.seconds for s in rl_step_vs_trl.our_steps(records, discard=1)] == [3.0, 7.0]
    assert [(s.seconds, s.tokens) for s in rl_step_vs_trl.our_steps(records, discard=2)] == [(7.0, 300.0)]


def test_medians_are_of_steps_not_of_runs() -> None:
    steps = [rl_step_vs_trl.Step(seconds, 100.0, 0.5) for seconds in (1.0, 2.0, 10.0)]
    found = rl_step_vs_trl.medians(steps)
    assert (found["seconds_per_step"], found["tokens_per_s"], found["steps"]) == (2.0, 50.0, 3)


def test_a_seed_is_summarised_from_its_first_and_last_evaluation() -> None:
    records = [evaluation(0, 0.4), record(1, 1.0), evaluation(1, 0.5), record(2, 3.0), evaluation(2, 0.75)]
    result = seeds.summarise(7, records, wall_s=30.0)
    assert (result.before, result.after, result.gain) == (0.4, 0.75, pytest.approx(0.35))
    assert (result.rl_steps, result.rl_s, result.tokens_per_s) == (2, 4.0, 15.0)
    machine, config = {"cores": 2, "cpu": "a CPU"}, ROOT / "examples/smollm/config.yaml"
    text = seeds.table([result], machine, config)
    assert text.startswith("# examples/smollm on several seeds")
    assert "| 7 | 0.400 | 0.750 | +0.350 |" in text
    assert "10 points on 1 of 1 seeds" in text
    text = seeds.table([replace(result, beside=1.25)], machine, config, "rollout.speculation.mode=off")
    assert "rollouts with `rollout.speculation.mode=off` |" in text
    assert "| 1.25x |" in text


def test_a_run_without_its_last_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="seed 7"):
        seeds.summarise(7, [evaluation(0, 0.4), record(1, 1.0)], wall_s=1.0)
    with pytest.raises(ValueError, match="seed 7"):
        seeds.summarise(7, [record(1, 1.0)], wall_s=1.0)
