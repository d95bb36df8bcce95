"""The paces of GPUs, and the table of paced runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import ROOT
from benchmarks.tools.qwen import network, qwen
from config.strategy import Strategy
from experiments.paced_report import is_valid, table
from experiments.paced_run import ARMS, TASK, Setting, configuration, learner_price, rows_of
from experiments.pacing import pace_of, sweep_fit
from launch.config import load_config
from launch.config.check import check_values
from launch.config.lookahead import ahead_meanwhile, no_lookahead
from policies.roofline.devices import DEVICES
from policies.roofline.kernels import draft_kernels
from policies.roofline.timing import DEFAULT, step_time, time_of

NET = network(qwen("7b"))
MACHINE = {"cores": 2, "cpu": "some", "busy_cores": 0.1, "commit": "c0ffee"}
SETTING = {"setting": "A100 7b, share 0.7"}


def test_the_a100_is_the_sweep_s_fit() -> None:
    pace, fitted = pace_of("A100", scale=2.0, context_scale=1.0), sweep_fit()
    for batch, context in ((1, 300), (16, 2000), (64, 4000)):
        assert pace.pass_s(batch, batch, batch * context) == pytest.approx(fitted.target_s(batch, context))
        drafted_s = pace.draft_s(Strategy("self", 5), batch, batch * context, caught_up=False)
        assert drafted_s == pytest.approx(5 * fitted.draft_s(batch, context))
    with pytest.raises(ValueError, match="the A100's sweep is of the 7b model"):
        pace_of("A100", scale=1.0, model="0.5b")


def test_the_h100_is_within_a_tenth_of_the_roofline() -> None:
    """A fitted roofline stands for the list of kernels."""
    pace, gpu = pace_of("H100", scale=1.0, context_scale=1.0), DEVICES["H100"]
    for batch in (1, 6, 24, 64):
        for rows in (1, 5, 9):
            for context in (500, 3000):
                true_s = step_time(NET, gpu, batch, rows, context).ms / 1e3
                assert pace.pass_s(batch, batch * rows, batch * context) == pytest.approx(true_s, rel=0.1)
        strategy = Strategy("eagle", 4)
        true_s = time_of(draft_kernels(NET, batch, strategy, 1000), gpu).ms / 1e3 - DEFAULT.host_s
        assert pace.draft_s(strategy, batch, batch * 1000, caught_up=False) == pytest.approx(true_s, rel=0.1)


def test_prices_of_the_rest_are_those_of_a_7b_model() -> None:
    """By hand: 15.2 GB twice over 2.04 TB/s; 2,048 tokens of 3.7 GFLOP at 40 % of 312 TFLOP/s."""
    pace = pace_of("A100", scale=1.0)
    assert pace.hand_over_s == pytest.approx(2 * 15.2e9 / 2.04e12, rel=0.05)
    assert pace.micro_step_s == pytest.approx(2048 * 3.7e9 / (0.4 * 312e12), rel=0.05)
    assert 4 * pace_of("A100", scale=1.0, micro_step_tokens=512).micro_step_s == pytest.approx(pace.micro_step_s)
    assert "ngram" not in pace.levels
    assert pace.name == "paced A100, Qwen2.5-7b, 1 s per second, context x 20"


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "eagle-frozen"])
def test_arms_are_the_examples_on_the_same_task(tmp_path: Path, arm: str) -> None:
    setting = _setting(tmp_path)
    config, source = configuration(setting, arm, 3, tmp_path / "model", f"{arm}-3")
    plain, _ = configuration(setting, "off", 3, tmp_path / "model", "off-3")
    for part in ("data", "reward", "objective", "eval", "learner"):
        if (arm, part) != ("one-step-off", "objective"):  # it weighs tokens of older weights
            assert getattr(config, part) == getattr(plain, part), part
    assert config.rollout.sampling == plain.rollout.sampling
    assert (config.run.seed, config.run.steps, config.rollout.workers.max) == (3, 4, 2)
    assert (config.speculation.mode == "off") == (arm in ("off", "lookahead", "rounds"))
    words = source.split(" ")
    assert load_config(Path(words[0]), _joined(words[1:])).config == config


@pytest.mark.parametrize(("layout", "gpus"), [("colocated", 1), ("disaggregated", 0)])
def test_in_each_layout_auto_looks_ahead_where_its_page_says(tmp_path: Path, layout: str, gpus: int) -> None:
    setting = replace(_setting(tmp_path), layout=layout)
    config, _ = configuration(setting, "default", 0, tmp_path / "model", "default-0")
    assert not check_values(config)
    assert (config.cluster.layout, config.cluster.gpus_per_worker) == (layout, gpus)
    assert no_lookahead(config) is None
    assert ahead_meanwhile(config) == (layout == "disaggregated")


def test_one_step_off_is_compared_without_its_last_step_and_by_its_reward() -> None:
    rows = [_row("off", 0, 4.0, reward=[0.1, 0.2, 0.4, 0.6])]
    rows.append(
        _row("one-step-off", 0, 1.0, rl_s=[3.0, 2.0, 2.0, 0.1], reward=[0.1] * 4, staleness=[None, 1.0, 1.0, 1.0])
    )
    text = table(rows, SETTING, MACHINE)
    (line,) = [line for line in text.splitlines() if line.startswith("| [one step off]")]
    assert line.split("|")[3:5] == ["  ", " 2.50 (2.50 to 2.50) "]
    assert "staleness 1.0, mean reward 0.100 beside 0.400" in text


def _joined(words: list[str]) -> list[str]:
    """Values with spaces in them come in parts."""
    found: list[str] = []
    for word in words:
        if "=" in word.partition("{")[0].partition("[")[0]:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def test_void_runs_are_named_and_not_counted() -> None:
    rows = [_row("off", 0, 4.0), _row("ngram", 0, 2.0), _row("ngram", 1, 1.0, late_share=0.06), _row("off", 1, 4.0)]
    rows.append(_row("default", 0, 1.0, differs="step 2: other tokens"))
    text = table(rows, SETTING, MACHINE)
    assert "Void: ngram, seed 1 (6.0% of its parts late)." in text
    assert "Void: default, seed 0 (other tokens: step 2: other tokens)." in text
    (line,) = [line for line in text.splitlines() if line.startswith("| n-gram")]
    assert (
        line
        == "| n-gram | 0 | 2.00 (2.00 to 2.00) | 1.67 (1.67 to 1.67) | 1.67 1.67 1.67 | 2.5 | 5.0 s | 8.0 s | 1.0% |"
    )
    assert "all drafters" not in text
    assert [is_valid(row) for row in rows] == [True, True, False, True, False]


def test_arms_that_reorder_are_compared_by_sums() -> None:
    rows = [_row("off", 0, 4.0), _row("rounds", 0, 2.0)]
    (line,) = [line for line in table(rows, SETTING, MACHINE).splitlines() if line.startswith("| [rounds")]
    assert "| 2.00 (2.00 to 2.00) of sums |" in line


def test_a_trained_head_is_compared_with_the_frozen_one() -> None:
    """Paired by RL step, from the second on; its second half beside."""
    trained = _row("eagle-trained", 0, 2.0, trained_s=[0.5, 0.0, 0.5, 0.3], micro_steps=4)
    trained |= {"rollout_s": [9.0, 2.0, 1.0, 1.0], "accept_length": [None, 3.0, 4.0, 5.0]}
    rows = [_row("off", 0, 4.0), _row("eagle-frozen", 0, 2.0), trained]
    (line,) = [line for line in table(rows, SETTING, MACHINE).splitlines() if line.count("|") == 8 and "EAGLE" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:4] == ["2.00 (1.00 to 2.00)", "2.00 (2.00 to 2.00)"]
    assert cells[4:] == ["2.75 4.50", "4", "5.0%"]


@pytest.mark.skipif(not (ROOT / "examples" / TASK / "data").is_dir(), reason="needs the demo's data: make_data")
def test_each_prompt_once_takes_the_held_out_ones_too(tmp_path: Path) -> None:
    setting = replace(_setting(tmp_path), once=True, extra=("rollout.prompts_per_step=8",), steps=21)
    config, _ = configuration(setting, "off", 0, tmp_path / "model", "off-0")
    assert isinstance(config.data.train, str)
    assert len(Path(config.data.train).read_text().splitlines()) == 168 == 21 * 8
    assert "each prompt once" in setting.key != replace(setting, once=False).key
    with pytest.raises(SystemExit, match="22 RL steps take 176 prompts, there are 168"):
        configuration(replace(setting, steps=22), "off", 0, tmp_path / "model", "off-0")


def test_the_journal_keeps_the_last_run_of_an_arm(tmp_path: Path) -> None:
    journal, setting = tmp_path / "journal.jsonl", _setting(tmp_path)
    lines = [f'{{"setting": "{setting.key}", "arm": "off", "seed": {seed}, "n": {n}}}' for seed, n in ((0, 1), (0, 2))]
    journal.write_text("\n".join([*lines, '{"setting": "other", "arm": "off", "seed": 0}']) + "\n")
    assert [row["n"] for row in rows_of(setting, journal)] == [2]
    assert rows_of(setting, tmp_path / "none") == []


def test_a_learners_price_that_is_given_needs_no_pilot_and_stays_the_journals(tmp_path: Path) -> None:
    journal, setting = tmp_path / "journal.jsonl", _setting(tmp_path)
    assert learner_price(setting, 0, tmp_path, journal, 2e-4) == 2e-4
    row = f'{{"setting": "{setting.key}", "arm": "off", "seed": 0, "learner_token_s": 0.0002}}'
    journal.write_text(row + "\n")
    assert [learner_price(setting, 1, tmp_path, journal, given) for given in (None, 2e-4)] == [2e-4, 2e-4]
    with pytest.raises(SystemExit, match=r"runs have 0\.0002"):
        learner_price(setting, 1, tmp_path, journal, 1e-4)


def _setting(folder: Path) -> Setting:
    return Setting(
        device="A100",
        model="7b",
        share=0.7,
        scale=4.0,
        context_scale=20.0,
        workers=2,
        steps=4,
        layout="embedded",
        extra=(),
        run_dir=folder,
    )


def _row(arm: str, seed: int, rollout_s: float, **changes: Any) -> dict[str, Any]:
    """Four RL steps of a second of learning each."""
    row = {"arm": arm, "seed": seed, "steps": 4, "late_share": 0.01, "differs": None, "saved_s": 5.0}
    row |= {"workers": 2, "trained_s": [0.0] * 4, "micro_steps": 0}
    row |= {"rollout_s": [rollout_s] * 4, "rl_s": [rollout_s + 1] * 4, "learn_s": [1.0] * 4}
    return row | {"accept_length": [None, 2.0, 2.5, 3.0], "engine_s": 4 * rollout_s} | changes
