"""How benchmark records become figures: worked out by hand on small inputs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import engine_smollm, rl_step_vs_trl, seeds, smollm_precision
from benchmarks.harness import ROOT
from benchmarks.tools.targets import Task
from launch.config import load_config


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


def test_reward_curves_are_compared_step_by_step_over_the_ranges_of_seeds() -> None:
    def run(*rewards: float) -> list[rl_step_vs_trl.Step]:
        return [rl_step_vs_trl.Step(1.0, 10.0, reward) for reward in rewards]

    found = rl_step_vs_trl.curves([run(0.1, 0.5), run(0.3, 0.75)], [run(0.2, 0.25), run(0.5, 0.375)])
    assert found["trl"] == [[0.2, 0.25], [0.5, 0.375]]
    assert found["mean"]["paceline"] == [pytest.approx(0.2), pytest.approx(0.625)]
    assert found["largest_difference_of_means"] == pytest.approx(0.3125)
    assert found["largest_range_over_seeds"] == pytest.approx(0.3)
    assert (found["steps_that_overlap"], found["steps"]) == (1, 2)


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
    assert "below 0.2 before RL on 0, at 0.6 or more after it on 1" in text
    text = seeds.table([replace(result, before=0.1, after=0.59, beside=1.25)], machine, config, ["a=off", "b=null"])
    assert "rollouts with `a=off b=null` |" in text
    assert "| 1.25x |" in text
    assert "below 0.2 before RL on 1, at 0.6 or more after it on 0" in text
    assert "0.6 or more" not in seeds.table([result], machine, ROOT / "examples/guess_and_check/config.yaml")


def test_what_the_seeds_are_compared_with_is_several_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo with speculation off is a configuration that is accepted: it trains no drafter."""
    asked: list[tuple[str, list[str]]] = []

    def run(seed: int, config: Path, run_dir: Path, overrides: list[str], timeout_s: float, name: str) -> Any:
        asked.append((name, overrides))
        load_config(config, [*overrides, f"run.dir={run_dir}"])
        records = [evaluation(0, 0.1), record(1, 1.0), evaluation(1, 0.7)]
        records[1]["seconds/rollout"] = 3.0 if name == "beside" else 2.0
        return seeds.summarise(seed, records, wall_s=5.0)

    monkeypatch.setattr(seeds, "run_seed", run)
    off = ["rollout.speculation.mode=off", "drafter.train=false", "drafter.offline=null"]
    assert all(key in str(seeds.__doc__) for key in off)
    config = ROOT / "examples/smollm/config.yaml"
    found = seeds.with_beside(1, config, tmp_path, ["observe.live=false"], 60.0, off)
    assert asked == [("beside", ["observe.live=false", *off]), ("seed", ["observe.live=false"])]
    assert found.beside == 1.5


def test_a_run_without_its_last_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="seed 7"):
        seeds.summarise(7, [evaluation(0, 0.4), record(1, 1.0)], wall_s=1.0)
    with pytest.raises(ValueError, match="seed 7"):
        seeds.summarise(7, [record(1, 1.0)], wall_s=1.0)


def smollm_row(requests: int, prompt_tokens: int, **seconds: list[tuple[float, float]]) -> dict[str, Any]:
    """A cell of five new tokens; (prefill, decoding) seconds by contender."""
    names = {"ours": "paceline w8a8", "llama": "llama.cpp Q4_0", "vllm": "vllm bfloat16"}
    row: dict[str, Any] = {"requests": requests, "prompt_tokens": prompt_tokens, "new_tokens": 5}
    for at, phase in enumerate(("prefill_s", "decode_s")):
        row[phase] = {names[name]: [pair[at] for pair in pairs] for name, pairs in seconds.items()}
    return row | {"tokens_per_s": engine_smollm.rates(row)}


def test_prefill_and_decoding_have_rates_and_goals_of_their_own() -> None:
    one = smollm_row(1, 60, ours=[(0.1, 0.02), (9.0, 9.0), (0.1, 0.02)], llama=[(0.2, 0.03)], vllm=[(0.3, 0.4)])
    assert one["tokens_per_s"]["prefill"] == {"paceline w8a8": 600.0, "llama.cpp Q4_0": 300.0, "vllm bfloat16": 200.0}
    assert one["tokens_per_s"]["decode"] == {"paceline w8a8": 200.0, "llama.cpp Q4_0": 133.3, "vllm bfloat16": 10.0}
    four = smollm_row(4, 60, ours=[(1.0, 0.5)], llama=[(0.5, 0.4)])
    assert [line.removeprefix("- ") for line in engine_smollm.goals([one, four])] == [
        "met: prefill, 1 x 60: paceline w8a8 is 2.00x llama.cpp Q4_0, goal 1",
        "met: decode, 1 x 60: paceline w8a8 is 1.50x llama.cpp Q4_0, goal 1.5",
        "**missed**: prefill, 4 x 60: paceline w8a8 is 0.50x llama.cpp Q4_0, goal 1",
        "**missed**: decode, 4 x 60: paceline w8a8 is 0.80x llama.cpp Q4_0, goal 1",
    ]
    text = engine_smollm.table([one, four])
    assert "| 1 | 60 | 200 | 133 | 10 |" in text
    assert "| 4 | 60 | 32 | 40 |  |" in text


def test_large_cells_are_asked_once_and_last() -> None:
    small, large = ({"requests": count, "prompt_tokens": 500} for count in (1, 64))
    assert [(number, row["requests"]) for number, row in engine_smollm.order([large, small], 2)] == [
        (0, 1),
        (1, 1),
        (0, 64),
    ]


def test_rollouts_by_precision_are_paired_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts that begin with one token; float32 takes (1, 3) s a wave, bfloat16 half of it, `less` less for
    prompts; the first wave of each is left out."""
    prompts = [np.array([7, 1, 2], np.int32), np.array([7, 3], np.int32)]
    asked: list[list[int]] = []

    class Worker:
        def __init__(self, model: Any, requests: list[Any]) -> None:
            self.model, self.waves = model, 0

        def roll(self, requests: list[Any]) -> smollm_precision.Turn:
            shortened = any(len(request.prompt_tokens) == 1 for request in requests)
            asked.append(sorted({len(request.prompt_tokens) for request in requests}))
            self.waves += 1
            first_s = 9.0 if self.waves == 1 else 0.0
            return smollm_precision.Turn((0.6 if shortened else 1.0) / self.model + first_s, 3.0 / self.model, 40, 5)

    monkeypatch.setattr(smollm_precision, "Worker", Worker)
    monkeypatch.setattr(smollm_precision, "PROMPTS", 2)
    models: Any = {"float32": 1, "bfloat16": 2}
    found = smollm_precision.rollouts(models, Task(prompts, (), 4), 0.7, 2)
    assert found["prompt_tokens"] == {"of_a_prompt": 2.5, "all_begin_with": 1}
    assert asked[:3] == [[2, 3], [2, 3], [1, 3]]
    assert found["precisions"]["bfloat16"]["over_float32"]["median"] == 2.0
    assert found["precisions"]["float32"] == {
        "tokens_per_cpu_s": 10.0,
        "over_float32": {"median": 1.0, "low": 1.0, "high": 1.0},
        "prompt_share": 0.25,
    }
    assert found["saved_by_sharing"]["median"] == pytest.approx(0.1)
    cells = [{"requests": 1, "prompt_tokens": 24, "step_ms": {"float32": 2.0, "bfloat16": 1.0}}]
    cells[0]["head_ms"] = {"float32": 0.5, "bfloat16": 0.25}
    text = smollm_precision.table(cells, found)
    assert "| 1 | 24 | 2.0 (0.5) | 1.0 (0.2) |" in text
    assert "| bfloat16 | 20 | 2.00x (2.00 to 2.00) | 25.0% |" in text
    assert "saves at most 10.0%" in text
