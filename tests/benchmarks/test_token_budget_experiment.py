"""experiments.token_budget: its journal, its order, its intervals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import DEMO
from experiments.token_budget import FIRST, FORMS, SECOND, THIRD, Cell, Journal, Run, in_order
from experiments.token_budget_report import difference, half_width, into_docs, main, page, tables
from launch.config import load_config


def row(cell: str, seed: int, after: float, **more: Any) -> dict[str, Any]:
    made = {"cell": cell, "seed": seed, "warm_seed": seed % 5, "extra": "", "before": 0.4, "after": after}
    return made | {"failed": False, "tokens": 1000.0, "responses": 10, "cpu_s": 2.0, "metrics": {}} | more


def run(cell: str, seed: int, *extra: str) -> Run:
    return Run(
        config=Path("config.yaml"), responses=8, cell=Cell.of(cell), seed=seed, extra=extra, run_dir=Path("runs")
    )


def test_a_finished_run_is_not_made_again_and_one_with_other_settings_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep/journal.jsonl")
    asked = [run("grpo@1", 0), run("grpo@1", 1), run("grpo@1", 0, "run.steps=2"), run("both@0.5", 0)]
    assert journal.lacks(asked) == asked
    journal.add(row("grpo@1", 0, 0.7))
    journal.add(row("grpo@1", 0, 0.9))
    assert journal.lacks(asked) == asked[1:]
    assert [found["after"] for found in journal.rows()] == [0.7]


def test_the_cells_that_answer_most_come_first_and_pairs_are_complete_early() -> None:
    cells = [Cell.of(text) for text in SECOND + FIRST]  # in another order
    order = [(str(cell), seed) for cell, seed in in_order(cells, range(20))]
    assert len(order) == len(set(order)) == 20 * len(FIRST) + 10 * len(SECOND)
    assert order[: len(FIRST)] == [(cell, 0) for cell in FIRST]
    assert {cell for cell, _ in order[: 20 * len(FIRST)]} == set(FIRST)
    assert list(in_order([Cell.of("dapo@1")], [3])) == [(Cell.of("dapo@1"), 3)]


def test_a_cell_asks_for_its_share_of_the_examples_responses_or_tokens() -> None:
    assert Cell.of("grpo@0.5").overrides(8) == ["objective.name=grpo", "rollout.rollouts_per_prompt=4"]
    both = Cell.of("both@0.25").overrides(8)
    assert "rollout.budget.share=0.25" in both
    assert not any("rollouts_per_prompt" in override for override in both)
    with pytest.raises(KeyError, match="vip"):
        Cell.of("vip@1").overrides(8)


@pytest.mark.parametrize("cell", FIRST + SECOND + THIRD)
def test_every_cell_is_a_configuration_of_the_demo(cell: str) -> None:
    config = load_config(DEMO / "config.yaml", Cell.of(cell).overrides(8)).config
    form = FORMS[cell.partition("@")[0]]
    assert (config.rollout.budget.on, config.rollout.abort.enabled) == (form.allocates, bool(form.abort))
    assert config.objective.name == form.objective


def test_differences_are_within_seeds_and_seeds_of_one_warm_start_may_count_once() -> None:
    theirs = {seed: row("grpo@1", seed, 0.5) for seed in (0, 1, 2, 5, 6)}
    ours = {seed: row("both@1", seed, 0.5 + gain) for seed, gain in ((0, 0.1), (5, 0.3), (1, 0.0), (6, 0.0), (3, 9.0))}
    half = half_width([0.2, 0.0])  # of warm starts 0 and 1
    assert half == pytest.approx(12.706 * 0.1)  # t with one degree of freedom, times the standard error
    assert difference(ours, theirs, by="warm_seed") == f"+0.100 [{0.1 - half:+.3f}, {0.1 + half:+.3f}]"
    half = half_width([0.1, 0.3, 0.0, 0.0])
    assert half == pytest.approx(3.182 * math.sqrt(0.02) / 2)
    assert difference(ours, theirs) == f"+0.100 [{0.1 - half:+.3f}, {0.1 + half:+.3f}]"
    assert difference({3: ours[3]}, theirs) == "-"


def test_a_failed_run_is_counted_and_never_dropped(tmp_path: Path) -> None:
    rows = [row("grpo@1", 0, 0.7), row("grpo@1", 1, 0.7), row("both@0.5", 0, 0.7)]
    rows.append(row("both@0.5", 1, 0.0, failed=True, error="not finite", tokens=500.0, cpu_s=0.1))
    rows.append(row("abort@0.5", 0, 0.2, failed=True, error=None, tokens=500.0))
    text = tables("demo", json.loads(json.dumps(rows)), [])
    (line,) = [line for line in text.splitlines() if line.startswith("| `both` | 0.5 | 2")]
    assert "| 2 | 1 | 0.350 +-" in line
    assert "| 1.00 | 1.00 | 100 | 1.00 |" in line, "its tokens and seconds are not those of a whole run"
    (line,) = [line for line in text.splitlines() if line.startswith("| `abort`")]
    assert "| 0.50 | 1.00 | 50 | 1.00 |" in line, "one that only ended badly is whole"


def test_wall_times_are_compared_within_seeds() -> None:
    wall = [row("grpo@1", 0, 0.7, rl_s=30.0), row("both@0.5", 0, 0.7, rl_s=10.0), row("both@0.5", 1, 0.7, rl_s=99.0)]
    text = tables("demo", [row("grpo@1", 0, 0.7)], wall)
    assert "3.00x (3.00 to 3.00)" in text
    wall += [row("grpo@1", 1, 0.7, rl_s=10.0), row("both@0.5", 2, 0.7, rl_s=1.0)]
    wall[2] |= {"rl_s": 10.0}
    assert "2.00x (1.00 to 3.00)" in tables("demo", [row("grpo@1", 0, 0.7)], wall), "40 s over 20 s"
    wall[1] |= {"rl_s": 40.0}
    assert "0.80x (0.75 to 1.00)" in tables("demo", [row("grpo@1", 0, 0.7)], wall), "the mean of ratios is 0.88"


def test_the_page_has_all_tasks_what_was_decided_and_the_papers_figures(tmp_path: Path) -> None:
    metrics = {"budget/variance": 0.3, "budget/variance_uniform": 0.4, "budget/bound": 0.5, "abort/surcharge": 1.25}
    runs = [
        row("grpo@1", 0, 0.7, metrics={}, commit="b2"),
        row("grpo@1", 1, 0.7, commit="a1-dirty"),
        row("both@0.5", 0, 0.8, tokens=500.0, metrics=metrics),
    ]
    paths = []
    for task in ("demo", "long"):
        record = {"settings": {"task": task}, "machine": {"cores": 2, "cpu": "a"}, "runs": runs, "wall": []}
        paths.append(tmp_path / f"{task}.json")
        paths[-1].write_text(json.dumps(record))
    docs, out = tmp_path / "docs.md", tmp_path / "page.md"
    docs.write_text("a\n<!-- experiments.token_budget: begin -->\nold\n<!-- experiments.token_budget: end -->\nz\n")
    main(*map(str, paths), out=out, docs=docs)
    text = out.read_text()
    assert text == page([json.loads(path.read_text()) for path in paths])
    assert text.count("| 25.0% | 50.0% |") == 2
    assert text.endswith("\n\nCommits of the runs: a1-dirty, b2.\n")
    assert "| `both` | 0.5 | 62.1 | 2.51x | 1.73x |" in text
    assert docs.read_text().startswith("a\n<!--")
    assert docs.read_text().endswith("-->\nz\n")
    assert "old" not in docs.read_text()
    assert "### `long`" in docs.read_text()
    assert out.with_suffix(".svg").exists()


def test_a_page_without_a_place_for_the_tables_is_not_changed() -> None:
    with pytest.raises(ValueError, match="is not on the page"):
        into_docs("nothing", "made")
