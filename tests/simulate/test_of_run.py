"""The command, with scenarios and with runs' own configurations."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.config.issues import ConfigError
from planner.simulate import Scenario
from planner.simulate.of_run import load

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster" / "qwen2.5-7b-gsm8k.yaml"
QUICK = ["workload.steps=1", "workload.prompts_per_step=16", "workload.pool=16", "costs.source=table"]


def test_a_run_s_configuration_is_a_scenario_and_says_what_it_assumes() -> None:
    found, assumed = load(CLUSTER, ["lengths.median=300", "rollout.workers=8"])
    assert found.model == "Qwen2.5-7B"
    assert (found.fleet.workers, found.fleet.device, found.fleet.layout) == (8, "H100", "disaggregated")
    assert found.workload.prompts_per_step == 128
    assert found.lengths.median == 300
    few, _ = load(CLUSTER, ["learner.ranks=2", "checkpoint.every=0"])
    assert (few.learner_ranks, few.learning.checkpoint_every) == (2, 0)
    assert found.speculation.training.enabled
    assert any("acceptance" in text for text in assumed)
    assert not any("lengths.median" in text for text in assumed)


def test_a_model_that_is_not_here_and_has_no_known_name_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say model="):
        load(CLUSTER, ["model.path=/shared/models/Nobody-9B"])
    found, _ = load(CLUSTER, ["model.path=/shared/models/Nobody-9B", "model=Llama-3.1-8B"])
    assert found.model == "Llama-3.1-8B"


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "simulate").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_scenario(path: Path) -> None:
    assert isinstance(load(path)[0], Scenario)


def test_the_command_prints_a_table_or_json_and_draws_a_sweep(tmp_path: Path) -> None:
    runner, path = CliRunner(), str(ROOT / "examples" / "simulate" / "qwen2.5-7b.yaml")
    table = runner.invoke(app, ["simulate", path, *QUICK])
    assert table.exit_code == 0
    assert "simulated, not measured" in table.output
    plot = tmp_path / "deep" / "sweep.svg"
    swept = runner.invoke(
        app, ["simulate", path, *QUICK, "--sweep", "nodes=1,2", "--ablation", "--json", "--plot", str(plot)]
    )
    rows = json.loads(swept.stdout)
    assert [row["fleet.nodes"] for row in rows] == ["1", "2"]
    assert {one["name"] for one in rows[0]["techniques"]} == {"speculation", "drafter training"}
    assert plot.read_text().startswith("<svg")
    refused = runner.invoke(app, ["simulate", path, "--weak"])
    assert refused.exit_code == 2


def test_the_swept_key_has_its_whole_name_over_its_column() -> None:
    path = str(ROOT / "examples" / "simulate" / "qwen2.5-7b.yaml")
    for key in ("workload.prompts_per_step", "fleet.gpus_per_node"):
        found = CliRunner().invoke(app, ["simulate", path, *QUICK, "--sweep", f"{key}=8"])
        assert found.exit_code == 0
        assert key.rpartition(".")[2] in found.output
