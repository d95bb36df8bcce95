"""`paceline plan-step`: time and memory of a configuration on a GPU that is not here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.config import load_config
from launch.errors import UsageError
from planner.plan_step import step_report
from tests.launch.test_cli import python
from tests.launch.test_memory import COLOCATED, write_model

Write = Callable[..., Path]
EIGHT = (*COLOCATED, "learner.ranks=8", "rollout.workers=8", "learner.activation_checkpointing=true")


@pytest.fixture
def config(write_config: Write, tmp_path: Path) -> Path:
    write_model(tmp_path / "model", "7b")
    return write_config()


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan-step", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_tables_show_steps_strategies_and_every_phase(config: Path) -> None:
    code, out, err = run(str(config), *EIGHT, "rollout.speculation.eagle.path=random", "--device", "H100")
    assert code == 0, err
    for text in ("of floor", "eagle:4", "suffix:8", "learning", "hand-over", "not measured", "tokens/s on 8 ranks"):
        assert text in out
    assert "sum, nobody asleep" in out


def test_json_holds_the_whole_report(config: Path) -> None:
    code, out, err = run(str(config), *EIGHT, "cluster.gpu=A100", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["device"] == "A100"
    assert found["fits"] is True
    first = found["steps"][0]
    assert first["batch"] == 1
    assert first["floor_ms"] < first["plain_ms"] <= first["eager_ms"]
    assert {arm["strategy"] for arm in first["strategies"]} >= {"suffix:8", "ngram:6", "self:5"}
    for arm in first["strategies"]:
        assert arm["cycle_ms"] == pytest.approx(arm["draft_ms"] + arm["verify_ms"])
        assert (arm["draft_ms"] > 0) == arm["strategy"].startswith("self")
    (plan,) = found["memory"]
    assert plan["phases"]["rollout"]["KV cache"] == 65_536 * 57_344
    assert found["learner"]["hand_over_s"]["direct"] < found["learner"]["hand_over_s"]["object store"]


def test_what_cannot_fit_is_shown_and_refused_with_the_sum(config: Path) -> None:
    code, out, err = run(str(config), *EIGHT, "--device", "A10G")
    assert code == 2
    assert "no" in out
    assert "a colocated A10G has 22.5 GiB" in err
    assert "Traceback" not in err


def test_sleep_and_offload_are_planned_where_memory_asks_for_them(config: Path) -> None:
    def planned(*overrides: str) -> tuple[bool, bool]:
        report = step_report(load_config(config, [*EIGHT, *overrides]).config, "A100")
        assert report.misfit is None
        return report.engines_sleep, report.optimizer_away

    assert planned() == (False, False)
    assert planned("rollout.engine.kv_tokens=700000") == (True, False)
    assert planned("rollout.engine.kv_tokens=1000000") == (True, True)
    assert planned("cluster.offload=always") == (True, True)
    never = load_config(config, [*EIGHT, "rollout.engine.kv_tokens=700000", "cluster.offload=never"]).config
    assert step_report(never, "A100").misfit is not None


def test_batches_that_do_not_run_together_are_left_out(config: Path) -> None:
    overrides = [*EIGHT, "rollout.engine.max_running=40", "rollout.speculation.max_running=8"]
    report = step_report(load_config(config, overrides).config, "H100")
    assert max(row.batch for row in report.steps) == 40
    assert all(row.batch * row.context <= 65_536 for row in report.steps)
    assert all(bool(row.strategies) == (row.batch <= 8) for row in report.steps)


def test_a_device_must_be_known(config: Path) -> None:
    loaded = load_config(config, list(EIGHT)).config
    with pytest.raises(UsageError, match="no GPU is known as 'B9'"):
        step_report(loaded, "B9")
    with pytest.raises(UsageError, match=r"cluster\.gpu"):
        step_report(loaded, None)
    code, _, err = run(str(config), *EIGHT, "--device", "B9")
    assert code == 2
    assert "H100" in err


def test_a_missing_model_is_named(config: Path) -> None:
    """With the one file that is needed, and the line that brings it: before anything is said of a GPU."""
    code, _, err = run(str(config), "model.path=elsewhere", "--device", "B9")
    said = " ".join(err.replace("\u2502", " ").split())
    assert code == 2
    assert "elsewhere/config.json does not exist" in said
    assert "this one file is enough: hf download OWNER/elsewhere config.json --local-dir" in said
    code, _, err = run(str(config), "model.path=Qwen/Qwen2.5-7B", "--device", "H100")
    said = " ".join(err.replace("\u2502", " ").split())
    assert "hf download Qwen/Qwen2.5-7B config.json --local-dir hub/Qwen2.5-7B, then model.path=hub/Qwen2.5-7B" in said
    assert "Traceback" not in err


def test_listed_and_light() -> None:
    done = python(
        "import sys\nimport planner.plan_step\nfrom launch.commands.cli import app\n"
        "print('torch' in sys.modules, 'ray' in sys.modules)\napp(['--help'])"
    )
    assert done.stdout.startswith("False False"), done.stderr
    assert "plan-step" in done.stdout
