"""experiments.ablation: every cell is a configuration on its task and warm start, in a fair order; its tables are of
the journal's rows, and stand where the pages have a place for them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import replace_block
from experiments import ablation_report
from experiments.ablation import OTHER_TOKENS, SYSTEMS, TASKS, Journal, Run, in_order, same_tokens
from launch.config import load_config

MACHINE: dict[str, Any] = {"cores": 2, "cpu": "x", "commit": "y", "versions": {"torch": "2"}}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cell_is_its_system_on_the_task(task: str, system: str, tmp_path: Path) -> None:
    run = Run(kind="timed", task=task, system=system, seed=3, extra=("run.steps=2",), run_dir=tmp_path)
    config = load_config(run.config, run.overrides(tmp_path / "warm")).config
    of_task = load_config(Path(f"examples/{task}/config.yaml")).config
    assert (config.model.path, config.warmup, config.run.seed, config.run.steps) == (str(tmp_path / "warm"), None, 3, 2)
    assert config.data == of_task.data
    assert config.rollout.sampling == of_task.rollout.sampling
    assert config.eval == of_task.eval
    assert config.drafter.train == (system in ("tlt", "everything"))
    assert config.rollout.budget.on == (system in ("duet", "everything"))
    assert (config.rollout.quantization != "none") == (system in ("qarl", "everything"))
    assert (config.rollout.speculation.mode == "off") == (system in ("nothing", "half", "duet", "qarl"))
    assert config.objective.name == ("duet" if config.rollout.budget.on else "grpo")
    halved = of_task.rollout.rollouts_per_prompt // (2 if system == "half" else 1)
    assert config.rollout.rollouts_per_prompt == halved


@pytest.mark.parametrize("system", OTHER_TOKENS)
def test_what_is_learned_without_the_program_has_neither_drafts_nor_other_workers(system: str, tmp_path: Path) -> None:
    run = Run(kind="learned", task=TASKS[1], system=system, seed=0, extra=(), run_dir=tmp_path)
    config = load_config(run.config, run.overrides(tmp_path)).config
    assert (config.rollout.workers.max, config.learner.threads, config.rollout.speculation.mode) == (1, 1, "off")
    assert not config.drafter.train


def test_the_journal_has_a_run_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep/journal.jsonl")
    for system, seed, after in (("nothing", 0, 0.7), ("nothing", 0, 0.9), ("duet", 0, 0.8)):
        journal.add(row(system, seed, extra="", after=after))
    assert [(found["system"], found["after"]) for found in journal.rows()] == [("nothing", 0.7), ("duet", 0.8)]


def test_every_system_is_first_and_last_about_as_often() -> None:
    cells = list(in_order(TASKS, SYSTEMS, range(len(SYSTEMS))))
    assert len(set(cells)) == len(cells) == len(TASKS) * len(SYSTEMS) ** 2
    blocks = [cells[at : at + len(SYSTEMS)] for at in range(0, len(cells), len(SYSTEMS))]
    assert all(len({(task, seed) for task, _, seed in block}) == 1 for block in blocks), "complete pairs early"
    for at in (0, -1):
        assert set(Counter(block[at][1] for block in blocks).values()) == {2}


def row(system: str, seed: int, kind: str = "timed", **changed: Any) -> dict[str, Any]:
    seconds = {"rl_s": 20.0, "rollout_s": 12.0, "learn_s": 6.0} if kind == "timed" else {}
    found = {"cell": f"{kind} t {system}", "kind": kind, "task": "t", "system": system, "seed": seed, "tokens": 1000}
    return found | seconds | {"before": 0.5, "after": 0.7} | changed


def test_the_table_pairs_by_seed_and_says_what_failed() -> None:
    rows = [row("nothing", 0), row("nothing", 1, rl_s=30.0), row("das", 0, rl_s=10.0), row("das", 1, rl_s=20.0)]
    rows += [row("nothing", seed, "learned", after=0.7 + 0.1 * seed) for seed in (0, 1, 2)]
    rows += [row("duet", seed, "learned", after=0.72 + 0.1 * seed) for seed in (0, 1, 2)]
    rows += [{"cell": "timed t duet", "seed": 0, "task": "t", "system": "duet", "kind": "timed", "error": "exit 1"}]
    assert same_tokens(rows) == {"t das": True}
    text = ablation_report.table(rows, {"t das": True}, MACHINE)
    (das,) = [line for line in text.splitlines() if "[DAS]" in line]
    assert [cell.strip() for cell in das.strip("|").split("|")][2:] == [
        *("1,000", "12.0", "6.0", "15.0", "+10.0", "1.75 (1.50 to 2.00)", "0.800", "the same"),
    ]
    (duet,) = [line for line in text.splitlines() if "[DUET]" in line]
    assert "0.820 | +0.020 +- 0.000" in duet
    assert "timed t duet, seed 0" in text
    other = [row("nothing", 0), row("das", 0, tokens=999)]
    assert same_tokens(other) == {"t das": False}


def test_the_page_has_a_place(tmp_path: Path) -> None:
    copy = tmp_path / ablation_report.PAGE.name
    copy.write_text(ablation_report.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    replace_block(copy, "experiments.ablation", "filled\n")
    assert copy.read_text(encoding="utf-8").count("filled") == 1
    (tmp_path / "none.md").write_text("nothing here")
    with pytest.raises(ValueError, match=r"none\.md"):
        replace_block(tmp_path / "none.md", "experiments.ablation", "filled\n")
