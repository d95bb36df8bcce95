"""`paceline plan-graphs`: the engine's own plan, from a configuration and a config.json, without torch or a GPU."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.config import load_config
from planner.plan_graphs import graph_report
from policies.calibration.roofline import UNKNOWN_GPU
from policies.speculation.chooser import most_nodes
from policies.speculation.graph_plan import GraphShape
from tests.launch.test_cli import python

Write = Callable[..., Path]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def config(write_config: Write, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return write_config()


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan-graphs", *arguments])
    return result.exit_code, result.stdout, result.stderr


def rows_of(out: str) -> dict[str, list[str]]:
    """Cells of the printed tables, by the first of each row."""
    cells = [
        [cell.strip() for cell in re.split("[\u2502|]", line)[1:-1]] for line in out.splitlines() if "\u2502" in line
    ]
    return {row[0]: row[1:] for row in cells}


def test_the_table_shows_the_plan(config: Path) -> None:
    drafting = ["rollout.speculation.eagle.path=random", "rollout.speculation.max_running=32"]
    code, out, err = run(str(config), *drafting, "rollout.engine.max_running=40")
    assert code == 0, err
    rows = rows_of(out)
    report = graph_report(load_config(config, drafting).config)
    for served, batch in (("1", 1), ("3-4", 4), ("9-16", 16), ("25-32", 32)):
        _, target, drafter = rows[served]
        own = [g for g in report.bucketed.of("target") if g.batch == batch]
        cells = [cell for cell in target.split() if "+" not in cell]
        planned = sorted((g.rows, g.tree) for g in own if not g.chunk)
        assert [(int(cell.rstrip("t")), cell.endswith("t")) for cell in cells] == planned
        named = [each.partition(":")[::2] for each in drafter.split()]
        shown = {f"{name}:{shape}" for name, shapes in named for shape in shapes.split(",")}
        assert shown == {str(arm) for at, arm in report.bucketed.drafts if at == batch}
    buckets = {batch for batch, _ in report.bucketed.drafts}
    assert report.bucketed_bytes.graphs == (
        len(report.bucketed.of("target")) + len(report.bucketed.drafts) + len(buckets)
    )
    assert rows["33-40"] == ["40", "1 1+64..1024", "-"], "beyond the elastic switch: plain decoding only"
    assert rows["bucketed"][-1].endswith("iB")
    assert rows["naive"][-1].endswith("iB")


def test_larger_batches_verify_fewer_tokens_and_the_plan_is_smaller(config: Path) -> None:
    report = graph_report(load_config(config, ["rollout.speculation.eagle.path=random"]).config)
    for batch in (1, 2, 4, 8, 16, 32):
        most = 1 + most_nodes(batch, UNKNOWN_GPU.rows)
        assert all(g.rows <= most for g in report.bucketed.of("target") if g.batch == batch)
    assert len(report.bucketed.graphs) < len(report.naive.graphs) / 5
    assert report.bucketed_bytes.total_bytes < report.naive_bytes.total_bytes / 2
    assert {g.rows for g in report.bucketed.graphs} <= {g.rows for g in report.naive.graphs} | {2}, "2: ragged chains"


def test_without_speculation_only_plain_decoding(config: Path) -> None:
    report = graph_report(load_config(config, ["rollout.speculation.mode=off", "rollout.engine.max_running=3"]).config)
    plain = {GraphShape(kind="target", batch=batch, rows=1) for batch in (1, 2, 3)}
    assert {graph for graph in report.bucketed.graphs if not graph.chunk} == plain
    mixed = {(graph.batch, graph.rows, graph.chunk) for graph in report.bucketed.graphs if graph.chunk}
    assert mixed == {(3, 1, chunk) for chunk in (64, 128, 256, 512, 1024)}
    assert report.strategies == ()
    code, out, _ = run(str(config), "rollout.speculation.mode=off")
    assert code == 0
    assert "plain decoding only" in out


def test_named_strategies_modes_and_bfloat16(config: Path) -> None:
    named = "rollout.speculation={mode: fixed, strategies: ['suffix:9'], max_running: 6}"
    fixed = graph_report(load_config(config, [named]).config)
    assert {g.batch for g in fixed.bucketed.graphs if g.rows == 10} == {1, 2, 4, 8}
    paper = graph_report(load_config(config, ["rollout.speculation.mode=paper"]).config)
    assert len(paper.bucketed.graphs) < len(graph_report(load_config(config, []).config).bucketed.graphs)
    halved = graph_report(load_config(config, [named, "model.dtype=bfloat16"]).config)
    assert 2 * halved.bucketed_bytes.output_bytes == fixed.bucketed_bytes.output_bytes, "hidden states"


def test_a_missing_model_is_named(config: Path) -> None:
    code, _, err = run(str(config), "model.path=elsewhere")
    assert code == 2
    assert "elsewhere" in err
    assert "Traceback" not in err


def test_listed_and_light(config: Path) -> None:
    done = python("import sys\nfrom launch.commands.cli import app\nprint('torch' in sys.modules)\napp(['--help'])")
    assert done.stdout.startswith("False"), done.stderr
    assert "plan-graphs" in done.stdout


def test_a_batch_invariant_engine_has_no_graphs_of_trees(config: Path) -> None:
    drafter = "rollout.speculation.eagle.path=random"
    every = graph_report(load_config(config, [drafter]).config)
    chains = graph_report(load_config(config, [drafter, "model.batch_invariant=engine"]).config)
    assert any(arm.is_tree for arm in every.strategies)
    assert chains.strategies
    assert not any(arm.is_tree for arm in chains.strategies)
    assert not any(graph.tree for graph in chains.bucketed.graphs)
